"""A tenant cannot keep others from engines that only some calls may use."""

import heapq
import math
from collections.abc import Container
from dataclasses import replace

import pytest
from test_dispatcher import Gate, call

from tidegate_policy import policies
from tidegate_policy.admit.tenant_load import PoolLoad
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.dispatch.core_actions import Action, Send, Shed
from tidegate_policy.model import Call, CallId, DropReason, EngineId
from tidegate_policy.policies import QueuedRequest

ALL = None
FIRST = frozenset({EngineId("e0")})
FIRST_TWO = frozenset({EngineId("e0"), EngineId("e1")})
FLOOD = 300
SERVICE_S = 1.0
"""Every call keeps its place at an engine for so long."""


def taught(gate: Gate) -> Gate:
    """A new gateway that was told that as many calls saturate the pool as the engines may have."""
    gate.tenants.on_others(0.0, PoolLoad(places=gate.table.limits()), 1)
    return gate


class Pool:
    """Engines of six places, and two more for tenants that have too few."""

    def __init__(self, policy: str, engines: int = 4) -> None:
        self.gate = taught(Gate(policy, max_inflight="auto", engines=engines))  # type: ignore[arg-type]
        self.ends: list[tuple[float, CallId]] = []
        self.sent_at_s: dict[str, float] = {}

    def arrive(self, now: float, arriving: Call, only: Container[EngineId] | None) -> None:
        self._carry_out(now, self.gate.on_arrival(now, arriving, only))

    def run(self, until_s: float) -> None:
        while self.ends and self.ends[0][0] <= until_s:
            at_s, name = heapq.heappop(self.ends)
            self._carry_out(at_s, self.gate.on_end(at_s, name))

    def _carry_out(self, now: float, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Send)
            self.sent_at_s[action.call.id] = now
            heapq.heappush(self.ends, (now + SERVICE_S, action.call.id))


def flooded(
    policy: str,
    flood: list[Container[EngineId] | None],
    only: Container[EngineId] | None,
    *,
    calls: int,
    engines: int,
    tenants: int = 1,
) -> list[float]:
    """How long the calls of another tenant wait, which come 2.5 s after a flood of calls that claim to be short and due."""
    pool = Pool(policy, engines)
    for number in range(FLOOD):
        arriving = replace(call(f"flood {number}", due_at_s=1.0, output=1), tenant=f"flood {number % tenants}")
        pool.arrive(0.001 * number, arriving, flood[number // tenants % len(flood)])
    pool.run(2.5)
    for number in range(calls):
        pool.arrive(2.5, replace(call(f"other {number}", due_at_s=60.0, output=20), tenant="other"), only)
    pool.run(100.0)
    assert len(pool.sent_at_s) == FLOOD + calls, "every call was served"
    assert not pool.gate.tenants._part_of
    return sorted(pool.sent_at_s[f"other {number}"] - 2.5 for number in range(calls))


@pytest.mark.parametrize("tenants", [1, 2, 4, 8])
@pytest.mark.parametrize("engines", [4, 16])
@pytest.mark.parametrize("policy", ["fcfs", "edf", "sjf", "two-lane", "urgency"])
@pytest.mark.parametrize(
    "flood",
    [
        pytest.param([FIRST], id="same engine"),
        pytest.param([ALL], id="all engines"),
        pytest.param([FIRST_TWO], id="more engines"),
        pytest.param([FIRST, ALL, FIRST_TWO], id="mixed"),
    ],
)
def test_calls_for_one_engine_wait_for_no_flood(policy, flood, engines, tenants) -> None:
    """The flood alone takes up to 50 s for this engine. Its six places are shared by all tenants."""
    waits = flooded(policy, flood, FIRST, calls=8, engines=engines, tenants=tenants)
    assert waits[0] <= SERVICE_S
    assert waits[-1] <= 8 / max(6 // (tenants + 1), 1) * SERVICE_S


@pytest.mark.parametrize("policy", ["fcfs", "edf", "sjf"])
def test_calls_for_all_engines_do_not_wait_for_a_flood_of_calls_for_one(policy) -> None:
    assert max(flooded(policy, [FIRST], ALL, calls=4, engines=4)) == 0.0


def test_a_tenant_that_is_alone_may_fill_the_engines_of_a_part() -> None:
    pool = Pool("fcfs")
    for number in range(20):
        pool.arrive(0.0, replace(call(f"only {number}"), tenant="alone"), FIRST)
    assert len(pool.sent_at_s) == 6
    pool.run(math.inf)
    assert max(pool.sent_at_s.values()) == 3.0 * SERVICE_S


def test_two_tenants_share_the_engines_of_a_part() -> None:
    pool = Pool("fcfs")
    for number in range(40):
        pool.arrive(0.0, replace(call(f"a {number}"), tenant="a"), FIRST)
    for number in range(40):
        pool.arrive(0.1, replace(call(f"b {number}"), tenant="b"), FIRST)
    pool.run(5.5)
    sent = {tenant: sum(name.startswith(tenant) for name in pool.sent_at_s) for tenant in "ab"}
    assert 0.7 <= sent["a"] / sent["b"] <= 1.5, sent


def test_a_flood_for_one_engine_evicts_no_held_call_of_others() -> None:
    gate = Gate("fcfs", max_inflight="auto", engines=4, max_waiting=120)  # type: ignore[arg-type]
    for name in "bc":
        for number in range(30):
            gate.on_arrival(0.0, replace(call(f"{name} {number}"), tenant=name))
    gate.on_arrival(0.0, replace(call("d"), tenant="d"), FIRST)
    refused = [
        (action.call.tenant, action.reason)
        for number in range(200)
        for action in gate.on_arrival(0.2, replace(call(f"a {number}"), tenant="a"), FIRST)
        if isinstance(action, Shed)
    ]
    assert refused == [("a", DropReason.SATURATED)] * len(refused)
    assert len(refused) > 50


class Live(Container[EngineId]):
    """Engines that become others while calls wait for them."""

    def __init__(self, *engines: str) -> None:
        self.engines: set[str] = {*engines}

    def __contains__(self, engine: object) -> bool:
        return engine in self.engines


def test_held_calls_go_to_engines_that_get_their_adapter() -> None:
    gate = taught(Gate("fcfs", max_inflight="auto", engines=4))  # type: ignore[arg-type]
    adapter = Live("e0")
    for number in range(100):
        gate.on_arrival(0.0, replace(call(f"a {number}"), tenant="a"), adapter)
    gate.on_arrival(0.1, replace(call("b"), tenant="b"), adapter)
    adapter.engines |= {"e1", "e2", "e3"}
    gate.on_tick(1.0)
    assert gate.inflight == 24
    assert gate.waiting == 101 - 24


def test_a_tenant_counts_with_its_weight_before_it_has_a_confined_call() -> None:
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 8.0, shared=lambda: 6.0)
    for number in range(6):
        heavy = replace(call(f"heavy {number}"), tenant="heavy", weight=5.0)
        shares.enter(0.0, QueuedRequest(call=heavy, service_s=1.0))
    light = replace(call("light"), tenant="light", weight=1.0)
    shares.competes(0.0, light)
    shares.enter(0.0, QueuedRequest(call=light, service_s=1.0))
    assert shares.bounds(0.0) == pytest.approx({"heavy": 5.0, "light": 1.0})


def test_calls_for_an_adapter_that_all_engines_have_are_in_no_part() -> None:
    gate = Gate(engines=2)
    gate.on_arrival(0.0, call("a"), FIRST_TWO)
    assert not gate.tenants._part_of
    gate.on_arrival(0.0, call("b"), FIRST)
    assert gate.tenants._part_of.keys() == {"b"}
    gate.on_end(1.0, CallId("b"))
    assert not gate.tenants._part_of
