"""The pure steering loop: reports and the time in, verdicts out, without engines and without a clock."""

import dataclasses

import pytest

from tidegate_policy import policies
from tidegate_policy.qos import Histogram, Qos
from tidegate_policy.steer import guards, proposal, selectors, steering_loop

SETTINGS = steering_loop.Settings(
    allow=("urgency", "edf", "two-lane"),
    interval_s=30.0,
    guards=guards.GuardSettings(dwell_s=60.0, window_s=20.0),
)
CALM = Qos(arrived=30, finished=30, with_target=30, ttft=Histogram(counts=(0,) * 8 + (30,)))
LATE = dataclasses.replace(CALM, waiting=20, missed=15)


def loop(settings: steering_loop.Settings = SETTINGS, state: guards.SteerState | None = None):  # type: ignore[no-untyped-def]
    return steering_loop.SteeringLoop(state, settings, now=0.0)


def test_a_pool_starts_with_the_default_policy() -> None:
    assert loop().state.active == policies.DEFAULT
    assert loop(dataclasses.replace(SETTINGS, allow=("edf",))).state.active == policies.SAFE


def test_the_selector_decides_about_the_whole_interval_and_only_then() -> None:
    steered = loop(state=guards.SteerState(active="two-lane", since_at_s=-100.0))
    for now in (10.0, 20.0):
        outcome = steered.observe(now, {"a": [LATE]}, silent=())
        assert (outcome.verdict.kind, outcome.window) == (guards.Kind.KEEP, None)
    outcome = steered.observe(30.0, {"a": [], "b": [CALM]}, silent=())
    assert (outcome.verdict.kind, outcome.verdict.policy) == (guards.Kind.SWITCH, "edf")
    assert outcome.window is not None
    assert outcome.window["a"].missed == 30
    assert outcome.window["b"].missed == 0


def test_an_emergency_does_not_wait_for_the_end_of_the_interval() -> None:
    outcome = loop().observe(1.0, {"a": [CALM], "b": [], "c": []}, silent={"b", "c"})
    assert (outcome.verdict.kind, outcome.verdict.policy) == (guards.Kind.BYPASS, policies.SAFE)
    assert outcome.verdict.reason == "silence: 2 of 3 engines do not report"


def test_an_override_carries_its_reason_and_its_end() -> None:
    steered = loop()
    chosen = steering_loop.Override(policy="edf", reason="by me", ends_at_s=100.0)
    outcome = steered.observe(1.0, {}, silent=(), override=chosen)
    assert (outcome.verdict.kind, outcome.verdict.reason) == (guards.Kind.OVERRIDE, "by me")
    assert steered.active_override(99.0) == chosen
    assert steered.active_override(100.0) is None
    outcome = steered.observe(2.0, {}, silent=())
    assert (outcome.verdict.policy, outcome.verdict.reason) == (policies.DEFAULT, "the override has ended")


@pytest.mark.parametrize(("ends_at_s", "stored_s"), [(101.0, 100.0), (103.0, 103.0), (None, None)])
def test_an_end_that_moves_by_less_than_two_seconds_is_the_same_end(
    ends_at_s: float | None, stored_s: float | None
) -> None:
    steered = loop()
    for end in (100.0, ends_at_s):
        steered.observe(1.0, {}, silent=(), override=steering_loop.Override(policy="edf", reason="x", ends_at_s=end))
    assert steered.state.ends_at_s == stored_s


def test_every_selector_proposes_only_what_is_allowed() -> None:
    for make in selectors.SELECTORS.values():
        selector: proposal.Selector = make()
        proposed = selector.propose(LATE, "two-lane", ("urgency",), {})
        assert proposed is None or proposed.policy in ("urgency", policies.SAFE)
