"""Whether a switch made the service worse than the load explains."""

import dataclasses
import itertools

import qos_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.qos import Histogram, Qos
from tidegate_policy.steer import claimed_targets, guards, steer_memory, switch_regret
from tidegate_policy.steer.proposal import Proposal

RHO, ENOUGH = 1.2, 20


def regret(before: Qos, trial: Qos, age_s: float = 30.0) -> str | None:
    return switch_regret.found(switch_regret.baseline(before), trial, age_s, rho=RHO, enough=ENOUGH)


def test_more_misses_under_a_steady_load_are_a_mistake() -> None:
    found = regret(qos_windows.window(), qos_windows.window(missed=20))
    assert found is not None
    assert found.startswith("33% of targets are missed")


def test_a_long_tail_is_no_mistake_while_targets_are_met() -> None:
    assert regret(qos_windows.window(missed=20), qos_windows.window(missed=10, ttft_s=60.0)) is None


def test_the_same_share_of_misses_with_more_completions_is_no_mistake() -> None:
    assert regret(qos_windows.window(finished=60, missed=10), qos_windows.window(finished=90, missed=30)) is None


def test_misses_that_the_growth_of_the_load_explains_are_no_mistake() -> None:
    assert regret(qos_windows.window(), qos_windows.window(missed=30)) is not None
    assert regret(qos_windows.window(), qos_windows.window(arrived=240, missed=30, waiting=100)) is None
    assert regret(qos_windows.window(arrived=120), qos_windows.window(missed=30, waiting=60)) is None


def test_a_policy_that_finishes_fewer_calls_does_not_excuse_itself_by_its_queue() -> None:
    rising = {"arrived": 240, "waiting": 200}
    found = regret(qos_windows.window(), qos_windows.window(finished=30, missed=10, **rising))
    assert found is not None
    assert found.startswith("30 calls finished in 30 s, expected 50")
    assert regret(qos_windows.window(), qos_windows.window(finished=20, missed=0, **rising)) is not None
    assert regret(qos_windows.window(), qos_windows.window(finished=60, missed=20, **rising)) is None


AT_ONCE = {"ttft_s": 0.1, "waiting": 1}


def test_targets_that_one_tenant_claims_take_no_switch_back_while_calls_are_served_at_once() -> None:
    """As a tenant that asks for first tokens within 1 ms once the policy has changed."""
    before = qos_windows.window(**AT_ONCE)
    claims = qos_windows.window(missed=40, **AT_ONCE)
    assert regret(before, claims) is None
    assert regret(before, dataclasses.replace(claims, ttft=qos_windows.histogram(0.5, 60))) is not None


def test_a_switch_that_delays_a_few_calls_is_taken_back_also_in_a_pool_that_serves_most_of_them_at_once() -> None:
    before = qos_windows.window(arrived=300, finished=300, **AT_ONCE)
    starved = dataclasses.replace(
        before,
        missed=20,
        ttft=Histogram(
            counts=tuple(
                [
                    fast + slow
                    for fast, slow in itertools.zip_longest(
                        qos_windows.histogram(0.1, 280).counts, qos_windows.histogram(60.0, 20).counts, fillvalue=0
                    )
                ]
            )
        ),
    )
    assert starved.ttft.quantile_s(0.9) < claimed_targets.LONG_WAIT_S
    assert regret(before, starved) is not None
    slow = dataclasses.replace(before, tpot=qos_windows.histogram(0.05, 300))
    late = dataclasses.replace(slow, missed=60, tpot=qos_windows.histogram(0.5, 300))
    assert regret(slow, late) is not None, "tokens that come later are measured too"


def test_a_tenant_that_sends_less_after_a_switch_takes_it_back_by_no_fewer_completions() -> None:
    before = qos_windows.window(arrived=300, finished=300)
    assert regret(before, qos_windows.window(arrived=30, finished=30, waiting=2)) is None
    found = regret(before, qos_windows.window(arrived=30, finished=30, waiting=270))
    assert found is not None
    assert found.startswith("30 calls finished in 30 s, expected 250")


def test_longer_calls_may_finish_more_slowly() -> None:
    assert regret(qos_windows.window(work_s=2.0), qos_windows.window(finished=20, missed=0, work_s=2.0)) is not None
    assert regret(qos_windows.window(work_s=2.0), qos_windows.window(finished=20, missed=0, work_s=8.0)) is None


def test_a_call_that_counts_only_when_it_ends_is_not_judged_before_calls_could_end() -> None:
    assert switch_regret.baseline(qos_windows.window(work_s=8.0)).settle_s > 5.0
    assert switch_regret.baseline(qos_windows.window(work_s=900.0)).settle_s == switch_regret.LONGEST_SETTLE_S


def test_a_pool_that_finishes_few_calls_is_judged_by_targets_alone_after_a_longer_trial() -> None:
    before = dataclasses.replace(qos_windows.window(finished=15), tpot=qos_windows.histogram(0.05, 30))
    slow_tokens = dataclasses.replace(before, tpot=qos_windows.histogram(0.5, 30))
    assert regret(before, slow_tokens) is None
    assert switch_regret.window_s(switch_regret.baseline(before), 20.0, enough=ENOUGH) == 40.0
    assert switch_regret.window_s(switch_regret.baseline(qos_windows.window()), 20.0, enough=ENOUGH) == 20.0
    idle = qos_windows.window(finished=1)
    assert switch_regret.window_s(switch_regret.baseline(idle), 20.0, enough=ENOUGH) == switch_regret.LONGEST_WINDOW_S


def test_few_calls_are_no_evidence() -> None:
    assert (
        regret(
            qos_windows.window(),
            dataclasses.replace(qos_windows.window(finished=10, arrived=10, missed=10), window_s=5.0),
        )
        is None
    )


@settings(max_examples=200)
@given(
    before=st.builds(
        qos_windows.window,
        arrived=st.integers(0, 300),
        finished=st.integers(0, 300),
        waiting=st.integers(0, 300),
        ttft_s=st.floats(0, 100),
        work_s=st.floats(0, 100),
    ),
    share=st.floats(0, 1),
    age_s=st.floats(0.1, 60),
)
def test_a_pool_that_delivers_exactly_what_it_delivered_before_never_regrets_a_switch(
    before: Qos, share: float, age_s: float
) -> None:
    same = dataclasses.replace(before, missed=int(share * before.with_target))
    assert regret(same, same, age_s) is None


@settings(max_examples=200)
@given(
    arrived=st.integers(0, 300),
    finished=st.integers(0, 300),
    missed=st.integers(0, 300),
    waiting=st.integers(0, 300),
    fewer=st.integers(0, 300),
)
def test_fewer_misses_are_never_a_mistake_where_more_misses_are_none(
    arrived: int, finished: int, missed: int, waiting: int, fewer: int
) -> None:
    missed = min(missed, finished)
    trial = qos_windows.window(arrived=arrived, finished=finished, missed=missed, waiting=waiting)
    better = dataclasses.replace(trial, missed=min(fewer, missed))
    if regret(qos_windows.window(), trial) is None:
        assert regret(qos_windows.window(), better) is None


def test_the_state_survives_json_between_any_two_decisions() -> None:
    state = guards.SteerState(active=policies.DEFAULT, since_at_s=0.0)
    wanted = Proposal(policy="sjf", reason="overload", alternatives=("two-lane",), expected="more targets are met")
    for now, qos, proposed in (
        (60.0, qos_windows.window(), wanted),
        (70.0, qos_windows.window(), None),
        (80.0, qos_windows.window(missed=40), None),
    ):
        state, _ = guards.step(now, state, qos, proposed, guards.GuardSettings())
        state = dataclasses.replace(state, memory={"seen": {"1": {"sjf": [1.0, 0.5]}}})
        assert steer_memory.read(steer_memory.written(state)) == state
    assert state.active == policies.DEFAULT
    assert state.strikes == {"sjf": 1}
