"""A tenant's tools are judged by its own sessions, and a tenant that returns at false times misleads only itself."""

import pytest

from tidegate_policy.predict import tenant_tools
from tidegate_policy.predict.tenant_tools import TenantTools
from tidegate_policy.predict.tool_times import DEFAULT_RETURN


def returned(tools: TenantTools, tenant: str, gap_s: float, *, times: int = 5, tokens: int = 10) -> None:
    """Sessions of the tenant return from `search` after `gap_s`."""
    for number in range(times):
        tools.on_call_end(1000.0 * number, tenant, "s", "search", 100)
        gap = tools.on_arrival(1000.0 * number + gap_s, tenant, "s")
        assert gap is not None
        tools.observe(tenant, gap, 100 + tokens)


def test_a_tenant_is_judged_by_its_own_sessions_whatever_another_one_does() -> None:
    tools = TenantTools()
    returned(tools, "honest", 2.0)
    before = tools.expect("honest", "search")
    returned(tools, "false", 500.0, times=1000, tokens=100_000)
    assert tools.expect("honest", "search") == before
    assert tools.expect("false", "search").tool_s > 100.0


def test_one_false_tenant_among_three_moves_what_a_new_tenant_expects_within_what_the_honest_ones_showed() -> None:
    tools = TenantTools()
    returned(tools, "a", 2.0)
    returned(tools, "b", 3.0)
    for lie_s in (0.0, 500.0):
        returned(tools, "false", lie_s, times=300)
        found = tools.expect("new", "search")
        assert 2.0 <= found.tool_s <= 3.0
        assert found.return_tokens == 10


def test_a_tenant_without_enough_sessions_expects_what_the_others_showed_and_alone_what_it_has() -> None:
    tools = TenantTools()
    assert tools.expect("new", "search") == DEFAULT_RETURN
    returned(tools, "new", 9.0, times=1)
    assert tools.expect("new", "search").tool_s == pytest.approx(9.0)
    returned(tools, "other", 2.0)
    assert tools.expect("new", "search").tool_s == pytest.approx(2.0)
    returned(tools, "new", 9.0, times=tenant_tools.LEAST_SEEN)
    assert tools.expect("new", "search").tool_s == pytest.approx(9.0)


def test_a_session_of_another_tenant_with_the_same_name_is_another_session() -> None:
    tools = TenantTools()
    tools.on_call_end(0.0, "a", "s", "search", 100)
    assert tools.on_arrival(1.0, "b", "s") is None
    found = tools.on_arrival(4.0, "a", "s")
    assert found is not None
    assert found.seconds == pytest.approx(4.0)


def test_tenants_tools_and_sessions_are_bounded_and_a_flood_leaves_the_others_their_part() -> None:
    tools = TenantTools()
    for index in range(20):
        tools.on_call_end(1.0, "quiet", f"s{index}", "search", 10)
    for index in range(3 * tenant_tools.MAX_SESSIONS):
        tools.on_call_end(2.0, "loud", f"s{index}", f"tool {index % 1000}", 10)
    kept = [times.away for times in tools._times.values()]
    assert kept == [20, tenant_tools.MAX_SESSIONS // 2]
    assert len(tools._times["loud"]._tools) == tenant_tools.MAX_TENANT_TOOLS
    assert tools.on_arrival(3.0, "quiet", "s0") is not None
    for index in range(2 * tenant_tools.MAX_TENANTS):
        tools.on_call_end(3.0, f"tenant {index}", "s", "search", 10)
    assert len(tools) == tenant_tools.MAX_TENANTS
