"""Whether an engine holds a session's context, by what the gateway predicts of the tool and by what the engine has seen."""

from dataclasses import replace

import pytest

from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import session_hold
from tidegate_policy.engine.session_hold import Handling
from tidegate_policy.model import Call, CallId

COST = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=100_000)
CALL = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=4000, output_predicted=100, session="s", tool="search")


def ended(holds: session_hold.SessionHolds, now: float, call: Call, *, free_tokens: int = 100) -> Handling:
    """The call ends where memory is short, so what is not held is soon gone."""
    return holds.on_call_end(
        now, call, output_tokens=100, context_tokens=4100, other_tokens=20_000, free_tokens=free_tokens,
        allocated_per_s=10_000.0, cost=COST,
    )  # fmt: skip


def made() -> session_hold.SessionHolds:
    return session_hold.SessionHolds(capacity_tokens=100_000)


def returned(holds: session_hold.SessionHolds, gap_s: float, call: Call) -> None:
    """Sessions that invoke the call's tool come back after `gap_s`, several times."""
    for number in range(20):
        now = 1000.0 * number
        each = replace(call, id=CallId(f"{number}"), session=f"s{number}")
        ended(holds, now, each)
        holds.on_arrival(now + gap_s, replace(each, id=CallId(f"{number} again"), prompt_tokens=4300))
        holds.clear()


@pytest.mark.parametrize(("tool_s", "handling"), [(0.1, Handling.PRESERVE), (600.0, Handling.DISCARD)])
def test_a_context_is_held_for_a_short_tool_and_not_for_a_long_one(tool_s: float, handling: Handling) -> None:
    holds = made()
    returned(holds, 0.5, replace(CALL, tool_s=None))
    assert ended(holds, 50_000.0, replace(CALL, tool_s=tool_s)) is handling


def test_the_label_of_a_call_decides_how_long_its_context_is_held() -> None:
    holds = made()
    returned(holds, 0.5, replace(CALL, tool_s=None))
    sent = labels.write(0.0, replace(CALL, tool_s=0.2, tool_return_tokens=50))
    call = labels.read(50_000.0, sent, call_id=CallId("read"), prompt_tokens=4000, max_tokens=100)
    assert (call.tool, call.tool_s, call.tool_return_tokens) == ("search", 0.2, 50)
    assert ended(holds, 50_000.0, call) is Handling.PRESERVE
    until_s = 50_000.0 + holds.settings.patience * 0.2 + 1.0
    assert holds.expired(until_s - 0.01) == []
    assert holds.expired(until_s + 0.01) == ["read"]


def test_without_a_predicted_time_the_engine_uses_what_it_has_seen_of_the_tool() -> None:
    holds = made()
    quick, slow = replace(CALL, tool="quick", tool_s=None), replace(CALL, tool="slow", tool_s=None)
    returned(holds, 0.1, quick)
    returned(holds, 500.0, slow)
    assert ended(holds, 50_000.0, quick) is Handling.PRESERVE
    assert ended(holds, 50_000.0, replace(slow, id=CallId("d"), session="t")) is Handling.DISCARD


def test_a_tenant_whose_sessions_return_at_false_times_changes_no_hold_of_another_tenant() -> None:
    holds = made()
    honest, false = replace(CALL, tenant="honest", tool_s=None), replace(CALL, tenant="false", tool_s=None)
    returned(holds, 0.1, honest)
    returned(holds, 500.0, false)
    assert ended(holds, 50_000.0, replace(honest, id=CallId("h"))) is Handling.PRESERVE
    assert ended(holds, 50_000.0, replace(false, id=CallId("f"))) is Handling.DISCARD
    holds.clear()
    returned(holds, 500.0, honest)
    for _ in range(3):
        returned(holds, 0.1, false)
    assert ended(holds, 90_000.0, replace(honest, id=CallId("i"))) is Handling.DISCARD


def test_a_call_of_another_tenant_with_the_same_session_name_uses_no_held_context() -> None:
    holds = made()
    ours = replace(CALL, tenant="a", tool_s=0.1)
    assert ended(holds, 0.0, ours) is Handling.PRESERVE
    stranger = replace(ours, id=CallId("stranger"), tenant="b")
    holds.on_arrival(0.1, stranger)
    assert holds.on_used([stranger.id]) == []
    holds.on_arrival(0.2, replace(ours, id=CallId("back")))
    assert holds.on_used([CallId("back")]) == [ours.id]


def test_of_two_calls_of_a_session_that_end_one_after_the_other_the_last_is_held() -> None:
    holds = made()
    returned(holds, 0.5, replace(CALL, tool_s=None))
    for name in ("first", "last"):
        assert ended(holds, 50_000.0, replace(CALL, id=CallId(name), tool_s=0.1)) is Handling.PRESERVE
    assert holds.expired(50_000.0) == ["first"]
    assert holds.held_tokens == 4100
