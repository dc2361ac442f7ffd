"""Calls that may go to some engines only, as in a pool with several models."""

from collections.abc import Container

from test_dispatcher import call, dispatcher, sent

from tidegate_policy.dispatch import dispatcher as dispatcher_module
from tidegate_policy.dispatch.core_actions import Shed
from tidegate_policy.model import CallId, DropReason, EngineId


def test_the_bound_on_waiting_calls_holds_for_those_of_a_full_group_too() -> None:
    gate = dispatcher(max_inflight=1, engines=2, max_waiting=3)
    only = frozenset({EngineId("e0")})
    shed = [
        action.reason
        for number in range(9)
        for action in gate.on_arrival(0.0, call(f"a{number}"), only)
        if isinstance(action, Shed)
    ]
    assert (gate.waiting, shed) == (3, [DropReason.SATURATED] * 5), "e1 has room, and none of them may go there"
    assert sent(gate.on_arrival(0.0, call("b"), frozenset({EngineId("e1")}))) == ["b"]


class Counting(Container[EngineId]):
    """The engines of a group, and how often somebody asked whether it has one."""

    def __init__(self, *engines: str) -> None:
        self.engines = engines
        self.asked = 0

    def __contains__(self, engine: object) -> bool:
        self.asked += 1
        return engine in self.engines


def test_calls_that_no_engine_with_room_may_serve_are_not_searched_again_and_again() -> None:
    gate = dispatcher(max_inflight=1, engines=2, max_waiting=1000)
    full, free = Counting("e0"), Counting("e1")
    for number in range(500):
        gate.on_arrival(0.0, call(f"a{number}"), full)
    assert full.asked < 500 * 10, "each arrival looks at one call that waits"
    full.asked = 0
    assert sent(gate.on_arrival(1.0, call("b0"), free)) == ["b0"]
    assert full.asked <= dispatcher_module.MOST_PASSED + 1
    full.asked = 0
    assert gate.on_end(2.0, CallId("b0")) == []
    assert full.asked < 10, "one look shows that nobody else waits"
    assert gate.on_arrival(3.0, call("b1"), free) != []
    assert gate.on_arrival(3.0, call("b2"), free) == []
    assert sent(gate.on_end(4.0, CallId("b1"))) == ["b2"], "it is found behind all the others"
