"""Calls that an engine has failed: another engine is tried, or they are shed, and nothing of them stays behind."""

from dataclasses import replace

import pytest
from test_dispatcher import call, dispatcher, shed

from tidegate_policy.admit.retries import Failure
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.model import NO_BACKLOG, Call, CallId, DropReason


def test_a_failed_call_goes_to_another_engine_once_each() -> None:
    gate = dispatcher()
    (first,) = gate.on_arrival(0.0, call("a"))
    (second,) = gate.on_attempt_failed(0.1, CallId("a"), Failure.GONE)
    assert isinstance(first, Send)
    assert isinstance(second, Send)
    assert (second.attempt, second.decision.engine != first.decision.engine) == (2, True)


def test_a_call_that_every_engine_refused_is_shed() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    assert shed(gate.on_attempt_failed(0.1, CallId("a"), Failure.GONE)) == [DropReason.NO_ENGINES]
    assert gate.owes("e0") == NO_BACKLOG


def test_a_call_that_waits_for_its_last_untried_engine_is_shed_when_the_engine_leaves() -> None:
    gate = dispatcher(max_inflight=1)
    gate.on_arrival(0.0, call("a"))
    (other,) = gate.on_arrival(0.0, call("b"))
    assert isinstance(other, Send)
    assert gate.on_attempt_failed(0.1, CallId("a"), Failure.GONE) == []
    assert shed(gate.on_engine_gone(0.2, other.decision.engine)) == [DropReason.NO_ENGINES]
    assert (gate.waiting, gate.next_expiry_at_s()) == (0, None)


def test_a_call_that_ends_while_it_waits_for_another_engine_waits_no_more() -> None:
    """The first engine's rejection stands, because the client has cancelled the workflow meanwhile."""
    gate = dispatcher(max_inflight=1)
    gate.on_arrival(0.0, call("a"))
    gate.on_arrival(0.0, call("b"))
    assert gate.on_attempt_failed(0.1, CallId("a"), Failure.GONE) == []
    assert gate.on_end(0.2, CallId("a"), ok=False) == []
    assert gate.on_end(0.3, CallId("b")) == []
    assert (gate.waiting, gate.next_expiry_at_s(), gate.owes("e0"), gate.owes("e1")) == (0, None, *2 * [NO_BACKLOG])


@pytest.mark.parametrize("failure", Failure)
def test_only_a_failure_that_blames_the_engine_shakes_the_belief_in_its_cache(failure: Failure) -> None:
    gate = dispatcher()

    def prefixed(name: str) -> Call:
        return replace(call(name), blocks=(1, 2), block_tokens=50.0)

    (first,) = gate.on_arrival(0.0, prefixed("a"))
    assert isinstance(first, Send)
    gate.on_first_token(0.1, CallId("a"))
    gate.on_end(0.2, CallId("a"))
    gate.on_arrival(1.0, prefixed("b"))
    engine = gate._out[CallId("b")].engine
    assert engine == first.decision.engine, "it holds the prefix"
    gate.on_attempt_failed(1.1, CallId("b"), failure)
    holds = engine in gate.prefixes.cached_tokens(prefixed("c"))
    assert holds == (failure not in (Failure.GONE, Failure.FAILED, Failure.LATE))
