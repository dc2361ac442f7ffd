"""How often does the whole loop switch when it restarts at random points of random histories, with and without memory?"""

import dataclasses
import json
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy.qos import Qos, Tally
from tidegate_policy.steer import guards, steer_memory, steering_loop

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
    "thrashing": dataclasses.replace(CALM, waiting=50, preemptions=200),
}
"""Reports of an engine by the load that it has."""
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
