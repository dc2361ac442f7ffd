"""How often does the whole loop switch when it restarts at random points of random histories, with and without memory?"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy.qos import Histogram, Qos, Tally
from tidegate_policy.steer import guards, steer_memory, steering_loop, switch_regret

ALLOW = ("urgency", "edf", "sjf", "two-lane")
SETTINGS = steering_loop.Settings(allow=ALLOW, interval_s=30.0, guards=guards.GuardSettings())
PERIOD_S, HOUR_S = 10.0, 3600.0
TALLY = Tally()
for _ in range(30):
    TALLY.add(1.0)
TIMES = TALLY.freeze()
CALM = Qos(window_s=PERIOD_S, arrived=30, finished=30, waiting=0, with_target=30, missed=0, ttft=TIMES, service=TIMES)
LOADS = {
    "calm": CALM,
    "misses": dataclasses.replace(CALM, waiting=5, missed=6),
    "overload": dataclasses.replace(CALM, waiting=200, missed=20),
    "collapse": dataclasses.replace(CALM, finished=3, with_target=3, missed=3, waiting=200),
    "late": dataclasses.replace(CALM, waiting=200, missed=30),
    "thrashing": dataclasses.replace(CALM, waiting=50, preemptions=200),
}
"""Reports of an engine by the load that it has."""
LATE = LOADS["late"]
HISTORY = st.lists(
    st.tuples(
        st.sampled_from(sorted(LOADS)),
        st.sampled_from(sorted(LOADS)),
        st.integers(min_value=1, max_value=40),
        st.sampled_from(("goes on", "goes on", "restarts", "forgets")),
    ),
    min_size=1,
    max_size=40,
)
"""The load under the first policy of a pool, and under the others; observations; and what becomes of the loop then."""


def run(history: Sequence[tuple[str, str, int, str]], *, keeps: bool) -> tuple[list[float], list[float]]:
    """The instants of the changes of the policy, and of the losses of the memory. With `keeps` no memory is lost."""
    now, changed, lost = 0.0, [], []
    loop = steering_loop.SteeringLoop(None, SETTINGS, now=now)
    for first, others, observations, end in history:
        for _ in range(observations):
            now += PERIOD_S
            before = loop.state.active
            report = LOADS[first if before == "urgency" else others]
            after = loop.observe(now, {"a": [report], "b": [report]}, silent=()).state.active
            if after != before:
                changed.append(now)
        if end == "goes on":
            continue
        before, kept = loop.state.active, steer_memory.read(json.loads(json.dumps(steer_memory.written(loop.state))))
        forgets = end == "forgets" and not keeps
        loop = steering_loop.SteeringLoop(None if forgets else kept, SETTINGS, now=now)
        if forgets:
            lost.append(now)
        if loop.state.active != before:
            changed.append(now)
    return changed, lost


def of_the_hour(instants: Sequence[float], now: float) -> int:
    return sum(now - HOUR_S < at_s <= now for at_s in instants)


@given(HISTORY)
@settings(max_examples=60, deadline=None)
def test_a_loop_that_restarts_with_its_memory_switches_at_most_five_times_in_any_hour(
    history: list[tuple[str, str, int, str]],
) -> None:
    changed, _ = run(history, keeps=True)
    assert all(of_the_hour(changed, now) <= SETTINGS.guards.per_hour for now in changed)


@given(HISTORY)
@settings(max_examples=60, deadline=None)
def test_each_loss_of_the_memory_adds_at_most_five_switches_and_the_return_to_the_first_policy(
    history: list[tuple[str, str, int, str]],
) -> None:
    changed, lost = run(history, keeps=False)
    most = SETTINGS.guards.per_hour
    assert all(of_the_hour(changed, now) <= most + (most + 1) * of_the_hour(lost, now) for now in changed)


EACH = dataclasses.replace(SETTINGS, interval_s=PERIOD_S)
"""Every observation is a decision, so a restart moves no decision."""


def kept(loop: steering_loop.SteeringLoop) -> guards.SteerState:
    """The memory as the status of a pool holds it."""
    return steer_memory.read(json.loads(json.dumps(steer_memory.written(loop.state))))


@given(st.lists(st.tuples(st.sampled_from(sorted(LOADS)), st.sampled_from(sorted(LOADS)), st.booleans()), max_size=150))
@settings(max_examples=60, deadline=None)
def test_a_loop_that_dies_between_any_two_decisions_decides_as_one_that_lives(
    history: list[tuple[str, str, bool]],
) -> None:
    lives = dies = steering_loop.SteeringLoop(None, EACH, now=0.0)
    for number, (first, others, is_killed) in enumerate(history, 1):
        now = PERIOD_S * number
        if is_killed or dies is lives:
            dies = steering_loop.SteeringLoop(kept(dies), EACH, now=now - PERIOD_S)
        report = LOADS[first if lives.state.active == "urgency" else others]
        verdicts = [loop.observe(now, {"a": [report]}, silent=()).verdict for loop in (lives, dies)]
        assert verdicts[0] == verdicts[1]
        assert lives.state == dies.state


@given(
    kills=st.lists(st.tuples(st.integers(1, 6), st.floats(0.0, 600.0)), min_size=1, max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_a_switch_that_makes_all_calls_late_is_taken_back_whenever_the_loop_dies_in_its_trial(
    kills: list[tuple[int, float]],
) -> None:
    """`kills` are the observations between two deaths, and the seconds until there is a successor."""
    loop, now = steering_loop.SteeringLoop(None, SETTINGS, now=0.0), 0.0

    def observed() -> guards.Kind:
        report = LOADS["overload"] if loop.state.active == "urgency" else LATE
        return loop.observe(now, {"a": [report], "b": [report]}, silent=()).verdict.kind

    while loop.state.active == "urgency":
        now += PERIOD_S
        observed()
    seen: list[guards.Kind] = []
    for observations, pause_s in [*kills, (20, 0.0)]:
        now += pause_s
        loop = steering_loop.SteeringLoop(kept(loop), SETTINGS, now=now)
        for _ in range(observations):
            now += PERIOD_S
            seen.append(observed())
            if guards.Kind.ROLLBACK in seen:
                assert len(seen) <= 6, "observations of the trial"
                return
    raise AssertionError("the switch is permanent")


def test_a_memory_without_a_trial_begins_the_trial_anew() -> None:
    """As an earlier version of the operator left it."""
    loop, now = steering_loop.SteeringLoop(None, SETTINGS, now=0.0), 0.0
    while loop.state.active == "urgency":
        now += PERIOD_S
        loop.observe(now, {"a": [LOADS["overload"]]}, silent=())
    old = {name: value for name, value in steer_memory.written(loop.state).items() if name != "trial"}
    successor = steering_loop.SteeringLoop(steer_memory.read(old), SETTINGS, now=now + 300.0)
    kinds = [successor.observe(now + 300.0 + PERIOD_S * n, {"a": [LATE]}, silent=()).verdict.kind for n in range(1, 7)]
    assert guards.Kind.ROLLBACK in kinds
    late = steering_loop.SteeringLoop(steer_memory.read(old), SETTINGS, now=now + 5000.0)
    kinds = [late.observe(now + 5000.0 + PERIOD_S * n, {"a": [LATE]}, silent=()).verdict.kind for n in range(1, 7)]
    assert guards.Kind.ROLLBACK not in kinds, "after more than an hour the service before the switch tells nothing"


TWO_DAYS_S = 2 * 86_400.0


def served_for_days() -> guards.SteerState:
    """What an earlier version left of a policy that has served for two days: a baseline, and neither trial nor effect."""
    loop, now = steering_loop.SteeringLoop(None, SETTINGS, now=0.0), 0.0
    while loop.state.active == "urgency":
        now += PERIOD_S
        loop.observe(now, {"a": [CALM if now <= PERIOD_S else LOADS["overload"]]}, silent=())
    old = {name: value for name, value in steer_memory.written(loop.state).items() if name not in ("trial", "effect")}
    assert "baseline" in old
    return guards.shifted(steer_memory.read(old), -now)


def test_a_trial_that_no_observation_saw_is_over_once() -> None:
    loop, seen = steering_loop.SteeringLoop(served_for_days(), SETTINGS, now=TWO_DAYS_S), []
    for number in range(1, 4):
        outcome = loop.observe(TWO_DAYS_S + PERIOD_S * number, {"a": [CALM]}, silent=())
        seen.append((outcome.state.effect, outcome.state.trial, outcome.judged))
    assert seen == [(switch_regret.UNSEEN, None, None)] * 3


@pytest.mark.parametrize("quiet", [0, 3], ids=["at the first observation", "later"])
@pytest.mark.parametrize("by", ["an emergency", "a person"])
def test_no_trial_of_a_policy_that_has_served_for_days_begins_anew(by: str, quiet: int) -> None:
    """The loop does what it does after a switch whose effect is known. The end of a bypass is a switch with a baseline of
    its own, and the end of an override is none."""
    old = served_for_days()
    loop, settled = (
        steering_loop.SteeringLoop(dataclasses.replace(old, effect=effect), SETTINGS, now=TWO_DAYS_S)
        for effect in ("", "30 calls finished")
    )
    now, kinds = TWO_DAYS_S, []

    def observed(report: Qos, override: steering_loop.Override | None = None) -> None:
        nonlocal now
        now += PERIOD_S
        verdicts = [
            each.observe(now, {"a": [report]}, silent=(), override=override).verdict for each in (loop, settled)
        ]
        assert verdicts[0] == verdicts[1]
        kinds.append(verdicts[0].kind)

    for _ in range(quiet):
        observed(CALM)
    if by == "an emergency":
        observed(LOADS["thrashing"])
    else:
        observed(CALM, steering_loop.Override(policy="edf", reason="a test"))
    assert loop.state.interrupted is None
    while loop.state.active != old.active:
        observed(CALM)
        assert len(kinds) < 30
    assert loop.state == settled.state
    assert loop.state.baseline != old.baseline
    for _ in range(10):
        observed(CALM if by == "an emergency" else LATE)
    assert guards.Kind.ROLLBACK not in kinds
    if by == "a person":
        assert loop.state.baseline is None


@pytest.mark.parametrize("count", [2**70, 1])
def test_the_memory_of_a_trial_is_small_and_holds_whatever_engines_claim(count: int) -> None:
    huge = dataclasses.replace(CALM, waiting=count, arrived=count, ttft=Histogram(counts=(count,) * 49))
    loop = steering_loop.SteeringLoop(
        guards.SteerState(active="sjf", since_at_s=0.0, kind=guards.Kind.SWITCH), SETTINGS, now=0.0
    )
    loop.observe(PERIOD_S, {"a": [huge]}, silent=())
    text = json.dumps(steer_memory.written(loop.state))
    assert loop.state.trial is not None
    assert len(text) < 2000
    assert kept(loop) == loop.state


@pytest.mark.parametrize(
    "spoilt",
    [
        {"trial": 3}, {"trial": {}}, {"trial": {"seen_at_s": "x"}}, {"trial": {"seen_at_s": 1.0, "unseen_s": -1.0}},
        {"trial": {"seen_at_s": 1.0, "service": 3}}, {"trial": {"seen_at_s": 1.0, "service": {"finished": -1}}},
        {"trial": {"seen_at_s": 1.0, "service": {"ttft": [0.5]}}}, {"trial": {"seen_at_s": 1.0, "later": 1}},
        {"trial": {"seen_at_s": 1.0, "service": {"ttft": [1] * 99}}}, {"trial": {"seen_at_s": 1.0, "service": {"t": 1}}},
        {"interrupted": {}}, {"interrupted": 3}, {"bypass_ended_at_s": "x"},
        {"interrupted": {"policy": "edf", "before": 3, "at_s": 1.0, "baseline": {"ttft_p99_s": 1.0, "miss_ratio": 0}}},
        {"interrupted": {"policy": "edf", "before": "a", "at_s": 1.0, "baseline": {"ttft_p99_s": "x", "miss_ratio": 0}}},
    ],
)  # fmt: skip
def test_a_memory_with_a_spoilt_trial_is_refused(spoilt: dict[str, Any]) -> None:
    fine = steer_memory.written(guards.SteerState(active="sjf", since_at_s=5.0))
    with pytest.raises((KeyError, TypeError, ValueError)):
        steer_memory.read({**fine, **spoilt})


def test_a_restart_with_the_memory_changes_no_switch_of_a_pool_that_is_always_overloaded() -> None:
    steady = [("overload", "overload", 300, "goes on")]
    restarted = [("overload", "overload", 30, "restarts")] * 10
    assert len(run(steady, keeps=True)[0]) == len(run(restarted, keeps=True)[0]) == 1


def test_a_loop_without_its_memory_does_more_than_one_with_it() -> None:
    """The bound of the other test is not met by a loop that never switches."""
    pressed = [("overload", "calm", 12, "forgets")] * 12
    kept, (changed, lost) = run(pressed, keeps=True)[0], run(pressed, keeps=False)
    assert len(kept) <= 2
    assert len(lost) == 12
    assert len(changed) > 12
