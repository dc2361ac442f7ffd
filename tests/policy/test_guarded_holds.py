"""The engine core's ledger of held contexts: a fault in it frees everything that is held, and nothing is held any more."""

import pytest
from regulated_engine import COST, World

from tidegate_policy.engine import guarded_holds, guarded_policy, session_hold
from tidegate_policy.model import CallId

SLOW = session_hold.Settings(max_share=0.9)


def holding(failures: guarded_policy.Failures) -> guarded_holds.GuardedHolds:
    """A ledger that holds the context of one call."""
    world = World()
    world.runs("first", prompt=400, done=5, session="s", tool="search", tool_s=0.1)
    world.free = 10
    holds = guarded_holds.GuardedHolds(0.0, settings=SLOW, capacity_tokens=10_000, probe=world, failures=failures)
    holds.on_step(1.0, (), allocated=1_000_000)
    assert holds.hold(1.0, world.core._calls[CallId("first")], context_tokens=400, cost=COST)
    assert (holds.tokens, holds.active) == (400, True)
    return holds


@pytest.mark.parametrize("method", ["on_used", "expired", "clear", "release_one", "on_arrival"])
def test_a_fault_frees_what_is_held(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = guarded_policy.Failures()
    holds = holding(failures)

    def fault(*facts: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(session_hold.SessionHolds, method, fault)
    world = World()
    world.waits("again", session="s")
    acts = {
        "on_used": lambda: holds.on_used([CallId("first")]),
        "expired": lambda: None,
        "clear": lambda: None,
        "release_one": holds.release_one,
        "on_arrival": lambda: holds.on_arrival(2.0, world.core.item(CallId("again")).call),
    }
    acts[method]()
    released = holds.release_all() if method == "clear" else holds.take_released(3.0)
    assert released == ["first"]
    assert (holds.tokens, holds.active, failures.counts) == (0, False, {"hold": 1})
    assert holds.take_released(1000.0) == []


def test_without_a_fault_a_hold_ends_once() -> None:
    holds = holding(guarded_policy.Failures())
    assert holds.take_released(2.0) == []
    assert holds.take_released(1000.0) == ["first"]
    assert holds.take_released(2000.0) == []
