"""Engines that fail the calls of one tenant and serve all others: this tenant's calls avoid them, and nobody else's."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from test_dispatcher import Gate, call, sent, shed
from test_waiting_groups import Counting

from tidegate_policy.admit import distrust
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.retries import Failure
from tidegate_policy.dispatch.core_actions import Action, Send
from tidegate_policy.model import Call, CallId, DropReason, EngineId

BAD, GOOD = EngineId("e0"), EngineId("e1")
SETTINGS = OutlierSettings()


def of(tenant: str, name: str) -> Call:
    return replace(call(name), tenant=tenant)


def engines(actions: Iterable[Action]) -> list[EngineId]:
    return [action.decision.engine for action in actions if isinstance(action, Send)]


def distrusting(*bad: EngineId, max_inflight: int | None = None, max_waiting: int = 1000) -> Gate:
    """A gate of two engines, where the bad ones have failed three calls of "victim" and serve another tenant."""
    gate = Gate(max_inflight=max_inflight, max_waiting=max_waiting)
    for engine in bad:
        for _ in range(3):
            gate.table.on_attempt(0.0, engine, "other", ok=True)
            assert gate.table.on_attempt(0.0, engine, "victim", ok=False).ejected_s is None, (
                "it serves the other tenant"
            )
    return gate


def test_calls_of_the_tenant_go_elsewhere_and_those_of_others_do_not() -> None:
    gate = distrusting(BAD)
    assert {GOOD} == set(engines(action for n in range(8) for action in gate.on_arrival(0.5, of("victim", f"v{n}"))))
    assert BAD in engines(action for n in range(8) for action in gate.on_arrival(0.5, of("other", f"o{n}")))
    after_s = SETTINGS.base_ejection_s
    assert BAD in engines(action for n in range(8) for action in gate.on_arrival(after_s, of("victim", f"later{n}")))


def test_each_pause_is_twice_as_long_until_the_engine_serves_the_tenant_again() -> None:
    known, now = distrust.Distrust(SETTINGS), 0.0
    pauses = list[float | None]()
    for _ in range(5):
        while (pause_s := known.failed(now, BAD, "victim")) is None:
            pass
        pauses.append(pause_s)
        assert (known.of(now, "victim"), known.of(now, "other")) == ({BAD}, frozenset())
        now += pause_s
        assert known.of(now, "victim") == set()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    for _ in range(2 * distrust.TAKING_BACK):
        known.succeeded(now, BAD, "victim")
    assert [known.failed(now, BAD, "victim") for _ in range(3)] == [None, None, 1.0]


@pytest.mark.parametrize(
    ("pattern", "is_avoided"),
    [("SF", True), ("SSF", True), ("SSSF", True), ("SFFS", True), ("SSSSF", False), (49 * "S" + "F", False)],
)
def test_an_engine_that_fails_more_than_a_fifth_of_the_calls_is_avoided(pattern: str, is_avoided: bool) -> None:
    known = distrust.Distrust(SETTINGS)
    for second, shown in enumerate(pattern * 20):
        if shown == "S":
            known.succeeded(second, BAD, "victim")
        elif known.failed(second, BAD, "victim") is not None:
            break
    assert (known.of(second, "victim") == {BAD}) == is_avoided


def test_answers_that_break_off_are_taken_back_by_more_calls() -> None:
    known = distrust.Distrust(SETTINGS)
    for second in range(3):
        assert known.of(second, "victim") == set()
        known.failed(second, BAD, "victim", lost=True)
        if second < 2:
            for _ in range(distrust.TAKING_BACK_LOST - 1):
                known.succeeded(second, BAD, "victim")
    assert known.of(2, "victim") == {BAD}


def test_a_second_attempt_goes_to_no_engine_that_failed_the_tenant_of_late() -> None:
    gate = Gate(engines=3)
    first, second, honest = EngineId("e0"), EngineId("e1"), EngineId("e2")
    gate.table.on_attempt(0.0, second, "victim", ok=False)
    for _ in range(4 * distrust.TAKING_BACK):
        gate.table.on_attempt(0.0, second, "victim", ok=True)
    assert engines(gate.on_arrival(1.0, of("victim", "call"))) == [first]
    assert engines(gate.on_attempt_failed(1.0, CallId("call"), Failure.FAILED)) == [honest]
    assert gate.table.distrust.failed_late(1.0, "victim") == {second}
    assert gate.table.distrust.failed_late(distrust.LATE_S, "victim") == set()
    only = frozenset({first, second})
    gate.table.on_attempt(100.0, second, "victim", ok=False)
    assert engines(gate.on_arrival(100.0, of("victim", "last"), only)) == [first]
    assert engines(gate.on_attempt_failed(100.0, CallId("last"), Failure.FAILED)) == [second], "better than none"


def test_a_bad_engine_is_better_than_none() -> None:
    gate = distrusting(BAD, GOOD)
    assert len(engines(action for n in range(4) for action in gate.on_arrival(0.5, of("victim", f"v{n}")))) == 4
    gate = distrusting(BAD)
    only = frozenset({BAD})
    assert engines(gate.on_arrival(0.5, of("victim", "adapter"), only)) == [BAD], "no other engine has the adapter"
    (action,) = gate.on_arrival(0.5, of("victim", "failed"))
    assert engines([action]) == [GOOD]
    again = gate.on_attempt_failed(0.5, CallId("failed"), Failure.FAILED)
    assert engines(again) == [BAD], "the good one has failed this call"


def test_calls_wait_for_an_engine_that_serves_them() -> None:
    gate = distrusting(BAD, max_inflight=1, max_waiting=3)
    assert engines(gate.on_arrival(0.5, of("victim", "first"))) == [GOOD]
    actions = [action for n in range(5) for action in gate.on_arrival(0.5, of("victim", f"v{n}"))]
    assert (shed(actions), sent(actions), gate.waiting) == ([DropReason.SATURATED] * 2, [], 3)
    assert engines(gate.on_end(0.6, CallId("first"))) == [GOOD]
    assert engines(gate.on_tick(0.7)) == []
    assert engines(gate.on_tick(1.0)) == [BAD], "the pause is over"


def test_calls_of_others_behind_them_get_the_room_of_the_engine() -> None:
    gate = distrusting(BAD, max_inflight=1)
    gate.on_arrival(0.1, of("other", "o0"), frozenset({BAD}))
    gate.on_arrival(0.1, of("victim", "first"))
    assert sent(action for n in range(6) for action in gate.on_arrival(0.5, of("victim", f"v{n}"))) == []
    assert sent(gate.on_arrival(0.5, of("other", "o1"))) == []
    assert sent(gate.on_end(0.6, CallId("o0"))) == ["o1"]


def test_calls_that_wait_for_a_trusted_engine_are_not_searched_again_and_again() -> None:
    gate = distrusting(BAD, max_inflight=1)
    both = Counting(BAD, GOOD)
    for number in range(500):
        gate.on_arrival(0.5, of("victim", f"v{number}"), both)
    assert both.asked < 500 * 20
    both.asked = 0
    assert sent(gate.on_end(0.6, CallId("v0"))) == ["v1"]
    assert both.asked < 20, "one look shows that nobody else waits"


def test_what_is_remembered_is_bounded() -> None:
    known = distrust.Distrust(SETTINGS)
    for number in range(3 * distrust.MOST_TENANTS):
        known.failed(0.0, BAD, f"t{number}")
    assert len(known._rows) == distrust.MOST_TENANTS
    for number in range(3 * distrust.MOST_TENANTS):
        for _ in range(distrust.TAKING_BACK):
            known.succeeded(distrust.LATE_S, BAD, f"t{number}")
    assert known._rows == {}, "an engine that serves the tenant again is remembered no more"
    known.failed(0.0, BAD, "t")
    known.forget_engine(BAD)
    assert known._rows == {}
