"""Which tool follows a call, how long it runs and what it returns, as the gateway learns it."""

import pytest

from tidegate_policy.predict import tenant_tools, tool_times, tool_use
from tidegate_policy.predict.tool_use import NO_TOOL, NOT_KNOWN, NextTool, ToolUse

KIND = ("acme", "", "agent", "m")


def answers(tools: ToolUse, *names: str, before: str = NO_TOOL) -> None:
    for name in names:
        tools.on_answer(KIND, before, name)


def round_trip(
    tools: ToolUse, tool: str, gap_s: float, returned: int, *, tenant: str = "acme", session: str = "s"
) -> None:
    """A call of the session invokes `tool`, and the session returns."""
    tools.on_arrival(100.0, tenant, session)
    assert tools.on_leave(tenant, session)
    tools.on_away(100.0, tenant, session, tool, 1000)
    gap = tools.on_arrival(100.0 + gap_s, tenant, session)
    assert gap is not None
    tools.observe(tenant, gap, 1000 + returned)
    tools.on_leave(tenant, session)


def test_the_tool_is_the_one_that_most_answers_of_the_kind_invoked_and_no_other_is_guessed() -> None:
    tools = ToolUse()
    assert tools.predict(KIND, "acme", NO_TOOL) == NOT_KNOWN
    answers(tools, "search", "search")
    assert tools.predict(KIND, "acme", NO_TOOL) == NOT_KNOWN, "two answers are too few"
    answers(tools, "search", "read")
    assert tools.predict(KIND, "acme", NO_TOOL) == NextTool(tool="search"), "its time is not known"
    assert tools.predict(("other", "", "agent", "m"), "other", NO_TOOL) == NOT_KNOWN
    answers(tools, "read", "write", "list", "run")
    assert tools.predict(KIND, "acme", NO_TOOL) == NOT_KNOWN, "no tool has half of the answers"
    answers(tools, *[NO_TOOL] * 40)
    assert tools.predict(KIND, "acme", NO_TOOL) == NOT_KNOWN, "answers of this kind invoke no tool"


def test_what_follows_depends_on_the_tool_that_the_session_ran_before() -> None:
    tools = ToolUse()
    answers(tools, *["search"] * 5)
    answers(tools, *["read"] * 5, before="search")
    answers(tools, *[NO_TOOL] * 5, before="read")
    found = [tools.predict(KIND, "acme", before).tool for before in (NO_TOOL, "search", "read")]
    assert found == ["search", "read", None]


def test_the_time_and_the_return_are_the_means_of_the_tool_of_the_tenant() -> None:
    tools = ToolUse()
    answers(tools, *["search"] * 5)
    for gap_s, returned in ((1.0, 10), (2.0, 20)):
        round_trip(tools, "search", gap_s, returned)
    assert tools.predict(KIND, "acme", NO_TOOL) == NextTool(tool="search"), "two returns are too few"
    round_trip(tools, "search", 3.0, 30)
    for _ in range(5):
        round_trip(tools, "search", 50.0, 5000, tenant="other")
        round_trip(tools, "slow", 50.0, 5000)
    found = tools.predict(KIND, "acme", NO_TOOL)
    assert (found.tool_s, found.return_tokens) == (pytest.approx(2.0), 20)


def test_calls_of_a_session_that_run_side_by_side_say_nothing_of_a_tool() -> None:
    tools = ToolUse()
    assert tools.on_arrival(0.0, "acme", "s") is None
    assert tools.on_arrival(1.0, "acme", "s") is None
    assert not tools.on_leave("acme", "s"), "the other one runs"
    assert tools.on_arrival(2.0, "acme", "s") is None
    tools.on_leave("acme", "s")
    assert tools.on_leave("acme", "s")
    tools.on_away(3.0, "acme", "s", "search", 10)
    gap = tools.on_arrival(5.0, "acme", "s")
    assert gap is not None
    assert (gap.tool, gap.seconds) == ("search", 2.0)


def test_a_session_that_stays_away_is_forgotten_and_teaches_nothing() -> None:
    tools = ToolUse()
    tools.on_away(0.0, "acme", "gone", "search", 10)
    tools.on_away(tool_times.ABSENT_S + 1.0, "acme", "s", "search", 10)
    assert tools.on_arrival(tool_times.ABSENT_S + 2.0, "acme", "gone") is None


def test_names_are_cut_and_few_names_are_remembered_for_each_kind_and_tenant() -> None:
    tools, long = ToolUse(), "x" * 1000
    answers(tools, *[long] * 5)
    for _ in range(5):
        round_trip(tools, long, 2.0, 7)
    found = tools.predict(KIND, "acme", NO_TOOL)
    assert found == NextTool(tool=long[: tool_use.MOST_NAME], tool_s=2.0, return_tokens=7)
    answers(tools, *[f"made up {index}" for index in range(1000)])
    names = tools._names.get("acme", (KIND, NO_TOOL))
    assert names is not None
    assert len(names.weights) == tool_use.MAX_NAMES
    for index in range(tenant_tools.MAX_TENANT_TOOLS + 10):
        round_trip(tools, f"made up {index}", 1.0, 1)
    answers(tools, *[long] * 40)
    assert tools.predict(KIND, "acme", NO_TOOL) == NextTool(tool=long[: tool_use.MOST_NAME]), "its time is forgotten"


def test_few_kinds_are_remembered() -> None:
    tools = ToolUse()
    for index in range(tool_use.MAX_KINDS + 10):
        tools.on_answer(("acme", "", str(index), "m"), NO_TOOL, "search")
    assert len(tools._names) == tool_use.MAX_KINDS
