"""What the guards of the steering loop do over long times, with clocks that are set, and with memories that are spoilt."""

import dataclasses
import itertools
from typing import Any

import pytest

from tidegate_policy import policies
from tidegate_policy.qos import Qos, Tally
from tidegate_policy.steer import guards, proposal, rules, steer_memory, steering_loop

ALLOW = ("urgency", "edf", "sjf", "two-lane")
SETTINGS = steering_loop.Settings(allow=ALLOW, interval_s=30.0, guards=guards.GuardSettings())
HOUR_S, DAY_S = 3600.0, 86_400.0


def delivered(calls: int, *, window_s: float = 10.0, missed: int = 0, waiting: int = 1, **rest: Any) -> Qos:
    tally = Tally()
    for _ in range(calls):
        tally.add(1.0)
    times = tally.freeze()
    return Qos(window_s=window_s, arrived=calls, finished=calls, with_target=calls, missed=missed, waiting=waiting,
               ttft=times, service=times, **rest)  # fmt: skip


CALM = delivered(30, waiting=0)
OVERLOAD = delivered(30, missed=20, waiting=200)
EDF = proposal.Proposal(policy="edf", reason="misses")
THRASHING = delivered(30, preemptions=200)


def loop(state: guards.SteerState | None = None, now: float = 0.0, **changes: Any) -> steering_loop.SteeringLoop:
    return steering_loop.SteeringLoop(state, dataclasses.replace(SETTINGS, **changes), now=now)


def switches(
    steered: steering_loop.SteeringLoop, reports: Any, until_s: float, *, since_s: float = 0.0, period_s: float = 10.0
) -> list[tuple[float, str, str]]:
    """What the loop decides while two engines report the same; `reports` gives it for an instant and the active policy."""
    found, now = [], since_s
    while now < until_s:
        now += period_s
        each = [reports(now, steered.state.active)]
        verdict = steered.observe(now, {"a": each, "b": each}, silent=()).verdict
        if verdict.kind is not guards.Kind.KEEP:
            found.append((now, verdict.kind.value, verdict.policy))
    return found


def test_the_policy_from_before_an_emergency_comes_back_after_it() -> None:
    steered = loop(guards.SteerState(active="edf", since_at_s=0.0))
    seen = switches(steered, lambda now, active: THRASHING if now <= 20 else CALM, DAY_S)
    assert seen == [(10.0, "bypass", policies.SAFE), (90.0, "switch", "edf")]


@pytest.mark.parametrize("allow", [("edf",), ("edf", policies.SAFE)])
def test_an_emergency_under_the_safe_policy_begins_and_ends_a_bypass(allow: tuple[str, ...]) -> None:
    steered = loop(guards.SteerState(active=policies.SAFE, since_at_s=0.0), allow=allow)
    seen = switches(steered, lambda now, active: THRASHING if now <= 20 else CALM, HOUR_S)
    assert seen == [(10.0, "bypass", policies.SAFE), (90.0, "switch", policies.SAFE)]
    assert steered.state.reason == "the emergency is over"


def test_a_bypass_ends_also_when_the_policy_from_before_it_is_not_allowed_any_more() -> None:
    steered = loop(guards.SteerState(active="edf", since_at_s=0.0))
    switches(steered, lambda now, active: THRASHING, 20.0)
    steered.settings = dataclasses.replace(SETTINGS, allow=("urgency", "sjf"))
    seen = switches(steered, lambda now, active: CALM, HOUR_S, since_s=20.0)
    assert seen == [(90.0, "switch", policies.SAFE)]


def test_the_safe_policy_stays_while_the_emergency_lasts_and_longer_each_time_that_it_returns() -> None:
    assert switches(loop(), lambda now, active: THRASHING, 6 * HOUR_S) == [(10.0, "bypass", policies.SAFE)]
    steered = loop()
    seen = switches(steered, lambda now, active: CALM if active == policies.SAFE else THRASHING, 6 * HOUR_S)
    bypasses = [now for now, kind, _ in seen if kind == "bypass"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(bypasses)]
    assert pauses[0] < 120
    assert pauses[1] > pauses[0] + 50
    assert len(seen) < 6 * 5
    assert steered.state.bypasses == guards.MAX_RETURNS
    calm = switches(steered, lambda now, active: CALM, 12 * HOUR_S, since_s=6 * HOUR_S)
    assert calm[-1][1:] == ("switch", "urgency")


def test_the_effect_of_a_bypass_and_of_a_rollback_is_told_too() -> None:
    steered = loop()
    switches(steered, lambda now, active: THRASHING, 40.0)
    assert steered.state.expected == guards.AFTER_BYPASS
    assert steered.state.effect.startswith("120 calls finished in 20 s")
    steered = loop(
        dataclasses.replace(rolled_back(guards.SteerState(active="urgency", since_at_s=0.0)), since_at_s=0.0)
    )
    assert steered.state.expected == guards.AFTER_ROLLBACK
    switches(steered, lambda now, active: CALM, 40.0)
    assert steered.state.effect.startswith("120 calls finished in 20 s, 100% of 120 targets met")


def test_a_cure_that_is_banned_gives_way_to_the_second_best() -> None:
    state = guards.SteerState(active="urgency", since_at_s=0.0, banned_until_at_s={"sjf": DAY_S})
    assert switches(loop(state), lambda now, active: OVERLOAD, 200.0) == [(60.0, "switch", "two-lane")]


def rolled_back(state: guards.SteerState, **unknown: Any) -> guards.SteerState:
    """The state after a switch to `sjf` that the loop took back."""
    steered = loop(dataclasses.replace(state, kind=guards.Kind.KEEP), state.since_at_s)
    now = state.since_at_s
    while steered.state.kind is not guards.Kind.ROLLBACK:
        now += 10.0
        worse = delivered(30, missed=30 if steered.state.active == "sjf" else 5, waiting=200)
        report = dataclasses.replace(worse, arrived=60) if steered.state.active == "urgency" else worse
        answers = unknown if steered.state.active == "sjf" else {}
        steered.observe(now, {"a": [report], "b": [report]}, silent=(), unfit=answers)
    return steered.state


def test_strikes_are_forgotten_after_a_good_day_and_an_engine_that_does_not_know_a_policy_adds_none() -> None:
    first = rolled_back(guards.SteerState(active="urgency", since_at_s=0.0))
    assert first.strikes == {"sjf": 1}
    second = rolled_back(dataclasses.replace(first, since_at_s=HOUR_S))
    assert second.strikes == {"sjf": 2}
    assert second.banned_until_at_s["sjf"] - second.since_at_s == 600.0
    later = second.banned_until_at_s["sjf"] + DAY_S + 1
    again = rolled_back(dataclasses.replace(second, since_at_s=later))
    assert again.strikes == {"sjf": 1}
    assert again.banned_until_at_s["sjf"] - again.since_at_s == 300.0
    vetoed = rolled_back(dataclasses.replace(first, since_at_s=HOUR_S), a="unknown policy")
    assert vetoed.strikes == {"sjf": 1}


@pytest.mark.parametrize("period_s", [10.0, 10.3, 12.0, 13.0, 15.0])
@pytest.mark.parametrize("rate", [1.0, 1.5, 2.5])
def test_a_switch_that_makes_all_calls_late_is_taken_back_whatever_the_period_of_observations(
    period_s: float, rate: float
) -> None:
    calls = round(rate * period_s)

    def reports(now: float, active: str) -> Qos:
        missed = calls if active == "sjf" else calls // 4
        waiting = 40 if active == "urgency" else 10
        return dataclasses.replace(delivered(calls, window_s=period_s, missed=missed, waiting=waiting), arrived=calls)

    seen = switches(loop(), reports, 100.0, period_s=period_s)
    assert [kind for _, kind, _ in seen[:2]] == ["switch", "rollback"]


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S, -600.0])
def test_a_wall_clock_that_is_set_changes_no_decision(step_s: float) -> None:
    def run(step_s: float) -> list[tuple[float, str, str]]:
        steered, found = loop(), []
        for passed in range(10, 7200, 10):
            now = passed + (step_s if passed >= 45 else 0.0)
            report = OVERLOAD if steered.state.active == "urgency" else delivered(30, missed=30, waiting=100)
            verdict = steered.observe(now, {"a": [report]}, silent=(), monotonic_s=passed).verdict
            if verdict.kind is not guards.Kind.KEEP:
                found.append((passed, verdict.kind.value, verdict.policy))
        return found

    assert len(run(0.0)) > 3
    assert run(step_s) == run(0.0)


def test_a_predecessor_whose_clock_was_ahead_delays_nothing() -> None:
    ahead = guards.SteerState(
        active="urgency",
        since_at_s=9e9,
        switched_at_s=(9e9,) * 5,
        banned_until_at_s={"sjf": 9e9},
        left_at_s={"edf": 9e9},
    )
    steered = loop(ahead)
    assert steered.state.since_at_s == 0.0
    assert steered.state.banned_until_at_s["sjf"] <= DAY_S
    assert switches(steered, lambda now, active: OVERLOAD, 600.0) == [], "five switches count as those of this hour"
    assert switches(steered, lambda now, active: OVERLOAD, 2 * HOUR_S, since_s=600.0)


KEPT = steer_memory.written(
    guards.SteerState(active="sjf", since_at_s=5.0, before="edf", strikes={"edf": 2}, switched_at_s=(1.0, 2.0))
)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"active": 5}, {"since_at_s": "x"}, {"since_at_s": 1e300}, {"since_at_s": float("nan")}, {"returns": 100_000},
        {"returns": 1.5}, {"bypasses": -1}, {"banned_until_at_s": [1]}, {"banned_until_at_s": {"sjf": "x"}},
        {"switched_at_s": ["a"]}, {"switched_at_s": 3}, {"left_at_s": 3}, {"strikes": {"sjf": 10**9}}, {"memory": 3},
        {"memory": {"Rules": [1]}}, {"kind": "dance"}, {"baseline": {"ttft_p99_s": "a", "miss_ratio": 0}},
        {"baseline": 3}, {"alternatives": [1]}, {"future": 1},
    ],
)  # fmt: skip
def test_a_spoilt_memory_is_refused_as_a_whole(spoilt: dict[str, Any]) -> None:
    assert steer_memory.written(steer_memory.read(KEPT)) == KEPT
    with pytest.raises((KeyError, TypeError, ValueError)):
        steer_memory.read({**KEPT, **spoilt})


def test_a_selector_forgets_a_memory_that_it_cannot_read() -> None:
    class Remembering:
        def propose(self, qos: Qos, active: str, allow: Any, memory: dict[str, Any]) -> Any:
            memory["seen"] = memory.get("seen", 0) + 1
            return rules.Rules().propose(qos, active, allow)

    state = guards.SteerState(active="urgency", since_at_s=-100.0, memory={"Remembering": {"seen": "x"}})
    steered = loop(state, selector=Remembering())
    assert steered.observe(30.0, {"a": [OVERLOAD]}, silent=()).verdict.policy == "sjf"
    assert steered.state.memory == {"Remembering": {"seen": 1}}


@pytest.mark.parametrize(
    ("kept", "until_at_s", "guard"),
    [
        pytest.param({"banned_until_at_s": {"edf": 7000.0}}, 7000.0, guards.Guard.BAN, id="a ban"),
        pytest.param({"switched_at_s": (3000.0, 3100.0, 3200.0)}, 6600.0, guards.Guard.RATE, id="three switches"),
        pytest.param(
            {"since_at_s": 4990.0, "switched_at_s": (3000.0, 3100.0, 4990.0), "banned_until_at_s": {"edf": 5040.0}},
            6600.0,
            guards.Guard.RATE,
            id="the last of all guards",
        ),
    ],
)
def test_a_proposal_that_the_guards_hold_back_takes_effect_when_they_say(
    kept: dict[str, object], until_at_s: float, guard: guards.Guard
) -> None:
    held = guards.SteerState(active="fcfs", **{"since_at_s": 0.0, **kept})  # type: ignore[arg-type]
    for now in (5000.0, until_at_s - 1):
        after, verdict = guards.step(now, held, CALM, EDF, SETTINGS.guards)
        assert (after, verdict.kind) == (held, guards.Kind.KEEP)
        assert verdict.held == guards.Held(policy="edf", active="fcfs", until_at_s=until_at_s, guard=guard)
    assert guards.step(until_at_s, held, CALM, EDF, SETTINGS.guards)[1].policy == "edf"
