"""The pure steering loop: reports and the time in, verdicts out, without engines and without a clock."""

import dataclasses

import pytest

from tidegate_policy import policies
from tidegate_policy.qos import Histogram, Qos, Targets, TenantService
from tidegate_policy.steer import claimed_targets, guards, proposal, selectors, steering_loop

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


def test_why_a_proposal_has_not_taken_effect_is_known_until_the_next_decision() -> None:
    steered = loop(state=guards.SteerState(active="urgency", since_at_s=0.0))
    assert steered.observe(20.0, {"a": [LATE]}, silent=()).held is None
    held = guards.Held(policy="two-lane", active="urgency", until_at_s=60.0, guard=guards.Guard.DWELL)
    assert steered.observe(30.0, {"a": [LATE]}, silent=()).held == held
    assert steered.observe(40.0, {"a": [CALM]}, silent=()).held == held
    outcome = steered.observe(60.0, {"a": [LATE]}, silent=())
    assert (outcome.verdict.policy, outcome.held) == ("edf", None)


def steered_by(report: Qos) -> guards.Verdict:
    """The decision of a pool whose engine reports this for the whole interval."""
    steered = loop(
        dataclasses.replace(SETTINGS, allow=("urgency", "edf", "sjf")),
        guards.SteerState(active="urgency", since_at_s=-100.0),
    )
    for now in (10.0, 20.0):
        steered.observe(now, {"a": [report]}, silent=())
    return steered.observe(30.0, {"a": [report]}, silent=()).verdict


def test_targets_that_one_tenant_claims_switch_no_policy_while_calls_are_served_at_once() -> None:
    """As an attacker with bursts of calls that ask for a first token within 1 ms."""
    at_once, late = Histogram(counts=(0,) * 8 + (330,)), Histogram(counts=(0,) * 20 + (330,))
    missed = {"arrived": 330, "finished": 330, "waiting": 3, "with_target": 320, "missed": 320, "window_s": 10.0}
    claims = {
        "attacker": TenantService(served_tokens=640, waiting=3, with_target=320, missed=320),
        "victim": TenantService(served_tokens=640),
    }
    alone = {"attacker": claims["attacker"]}
    classes = {"": Targets(with_target=320, missed=320)}
    for tenants in (claims, alone):
        report = dataclasses.replace(CALM, ttft=at_once, tenants=tenants, classes=classes, **missed)  # type: ignore[arg-type]
        assert steered_by(report).kind is guards.Kind.KEEP
        verdict = steered_by(dataclasses.replace(report, ttft=late))
        assert (verdict.kind, verdict.policy) == (guards.Kind.SWITCH, "sjf"), "calls wait for seconds"


def test_misses_of_several_tenants_count_also_while_calls_are_served_at_once() -> None:
    one = TenantService(served_tokens=640, waiting=3, with_target=100, missed=60)
    report = dataclasses.replace(
        CALM, finished=200, waiting=6, with_target=200, missed=120, tenants={"ant": one, "bee": one}
    )
    assert steered_by(report).policy == "sjf"
    assert report.ttft.quantile_s(0.9) < claimed_targets.LONG_WAIT_S


def unfair(served: dict[str, int], waiting: dict[str, int]) -> Qos:
    tenants = {name: TenantService(served_tokens=served[name], waiting=waiting[name]) for name in served}
    return dataclasses.replace(CALM, waiting=sum(waiting.values()), tenants=tenants)


def test_the_selector_sees_the_service_of_the_tenants_on_all_engines_in_the_whole_interval() -> None:
    settings = dataclasses.replace(SETTINGS, allow=("wfq",))
    steered = loop(settings, guards.SteerState(active="fcfs", since_at_s=-100.0))
    waiting = {"ant": 5, "bee": 5}
    steered.observe(10.0, {"a": [unfair({"ant": 50, "bee": 0}, waiting)] * 2, "b": []}, silent=())
    steered.observe(20.0, {"a": [], "b": [unfair({"ant": 900, "bee": 100}, waiting)]}, silent=())
    outcome = steered.observe(30.0, {"a": [], "b": []}, silent=())
    assert outcome.verdict.reason == "unfairness: the fairness index of the waiting tenants is 0.60"
    steered = loop(settings, guards.SteerState(active="fcfs", since_at_s=-100.0))
    steered.observe(10.0, {"a": [unfair({"ant": 1000, "bee": 100}, waiting)]}, silent=())
    steered.observe(20.0, {"a": [unfair({"ant": 0, "bee": 0}, {"ant": 5, "bee": 0})]}, silent=())
    assert steered.observe(30.0, {"a": []}, silent=()).verdict.kind is guards.Kind.KEEP


def test_the_tenants_of_an_engine_that_claims_too_many_calls_count_less() -> None:
    honest = unfair({"ant": 100, "bee": 100}, {"ant": 5, "bee": 5})
    liar = dataclasses.replace(
        unfair({"ant": 10**9, "bee": 0}, {"ant": 5, "bee": 5}), arrived=10**8, finished=10**8, with_target=10**8
    )
    steered = loop(dataclasses.replace(SETTINGS, allow=("wfq",)), guards.SteerState(active="fcfs", since_at_s=-100.0))
    outcome = steered.observe(30.0, {**{f"e{n}": [honest] * 4 for n in range(9)}, "liar": [liar]}, silent=())
    assert (outcome.verdict.kind, list(outcome.outliers)) == (guards.Kind.KEEP, ["liar"])


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
