"""The events of the steering loop, and the metric of an effect: what was expected of a switch, and what followed."""

import dataclasses
import datetime
import pathlib

import pytest
import yaml

from tidegate_operator import operator_metrics, spec, spec_problems, steering_status
from tidegate_policy import policies, qos
from tidegate_policy.steer import guards, steering_loop

NOW = datetime.datetime(2026, 11, 22, 14, 3, 20, tzinfo=datetime.UTC)
STATE = guards.SteerState(
    active="sjf",
    since_at_s=NOW.timestamp() - 60,
    kind=guards.Kind.SWITCH,
    reason="overload: 62% of targets missed in 10 s",
    alternatives=("two-lane", "edf"),
    expected="more targets are met, long calls wait",
)
TRIAL = qos.Qos(window_s=20.0, arrived=40, finished=40, with_target=40, missed=10)


@pytest.fixture
def pool() -> spec.Pool:
    stored = yaml.safe_load((pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text())
    known = spec_problems.Known(
        policies=frozenset(policies.POLICIES),
        rules=frozenset({"least-delay", "score"}),
        profiles=frozenset({"a100-70b-tp8"}),
        selectors=frozenset({"rules"}),
    )
    metadata = {"name": "chat", "namespace": "prod", "uid": "0123", "generation": 3}
    return spec.parse({"metadata": metadata, "spec": stored["spec"]}, known)


def outcome(
    kind: guards.Kind, state: guards.SteerState = STATE, judged: qos.Qos | None = None
) -> steering_loop.Outcome:
    verdict = guards.Verdict(kind=kind, policy=state.active, reason=state.reason)
    return steering_loop.Outcome(state=state, verdict=verdict, window=None, judged=judged)


def test_the_event_of_a_switch_tells_reason_expected_effect_and_alternatives(pool: spec.Pool) -> None:
    (event,) = steering_status.events(pool, outcome(guards.Kind.SWITCH), NOW)
    assert (event.reason, event.warning) == ("PolicySwitched", False)
    assert event.message == (
        "Engines now serve by sjf: overload: 62% of targets missed in 10 s. Expected: more targets are met, long calls "
        "wait. Alternatives: two-lane, edf"
    )


def test_the_message_of_an_event_has_at_most_as_many_characters_as_kubernetes_takes(pool: spec.Pool) -> None:
    long = dataclasses.replace(
        STATE, reason="r" * 5000, expected="e" * 5000, alternatives=("a" * 3000,), effect="f" * 5000
    )
    for found in (outcome(guards.Kind.SWITCH, long), outcome(guards.Kind.KEEP, long, TRIAL)):
        (event,) = steering_status.events(pool, found, NOW)
        assert len(event.message) <= 1024
        assert "Expected: eee" in event.message


def test_a_second_event_tells_the_effect_when_it_is_known(pool: spec.Pool) -> None:
    known = dataclasses.replace(STATE, effect="40 calls finished in 20 s, 75% of 40 targets met")
    (event,) = steering_status.events(pool, outcome(guards.Kind.KEEP, known, TRIAL), NOW)
    assert (event.reason, event.at) == ("PolicyEffect", "2026-11-22T14:03:20.000000Z")
    assert event.message == (
        "After the switch to sjf: 40 calls finished in 20 s, 75% of 40 targets met. Expected: more targets are met, long "
        "calls wait"
    )
    assert steering_status.events(pool, outcome(guards.Kind.KEEP, known), NOW) == []


def test_the_loop_judges_a_switch_in_one_observation_alone() -> None:
    settings = steering_loop.Settings(allow=("urgency", "sjf"), interval_s=10.0, guards=guards.GuardSettings())
    state = dataclasses.replace(STATE, since_at_s=0.0)
    loop = steering_loop.SteeringLoop(state, settings, now=0.0)
    calm = dataclasses.replace(TRIAL, window_s=10.0)
    judged = [loop.observe(10.0 * turn, {"a": [calm]}, silent=()).judged for turn in range(1, 8)]
    found = [each for each in judged if each is not None]
    assert [(each.with_target, each.missed) for each in found] == [(80, 20)]
    assert loop.state.effect.endswith("75% of 80 targets met")


def test_the_metric_has_the_share_of_met_targets_and_leaves_with_the_pool() -> None:
    metrics = operator_metrics.OperatorMetrics()
    labels = {"namespace": "serving", "pool": "chat", "policy": "sjf"}

    def shown() -> float | None:
        return metrics.registry.get_sample_value("tidegate_operator_policy_effect_met_ratio", labels)

    metrics.judged(("serving", "chat"), "sjf", qos.Qos(window_s=20.0, finished=40))
    assert shown() is None, "without targets there is no share"
    metrics.judged(("serving", "chat"), "sjf", TRIAL)
    assert shown() == 0.75
    metrics.forget(("serving", "chat"))
    assert shown() is None


def test_a_proposal_that_the_guards_hold_back_is_named_with_the_time_from_which_they_allow_it(pool: spec.Pool) -> None:
    held = guards.Held(policy="edf", active="sjf", until_at_s=NOW.timestamp() - 0.5, guard=guards.Guard.DWELL)
    waits = dataclasses.replace(outcome(guards.Kind.KEEP), held=held)
    stated = steering_status.of_steering({}, pool, waits, guards.GuardSettings(), None, {}, NOW)
    (told,) = (item for item in stated["conditions"] if item["type"] == "PolicyStable")
    assert told["message"] == (
        "sjf: overload: 62% of targets missed in 10 s; edf is proposed, and the guard dwell keeps sjf until "
        "2026-11-22T14:03:20Z"
    )
