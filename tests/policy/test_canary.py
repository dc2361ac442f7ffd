"""A new revision goes forward only while it serves as well as the old one, and it can go back at any time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.rollout import canary, side_by_side
from tidegate_policy.rollout.canary import CanarySettings, Observation, Phase, Step
from tidegate_policy.rollout.side_by_side import Limits, Service, Targets, Times

SETTINGS = CanarySettings(
    steps=(Step(weight=5, duration_s=60), Step(weight=25, duration_s=120)), limits=Limits(min_calls=50), start_s=600
)


def times(count, seconds):
    return Times(count=count, log_sum=count * math.log(seconds))


def service(calls=100, *, errors=0, ttft_s=0.2, tpot_s=0.03, missed=0):
    return Service(
        calls=calls,
        errors=errors,
        ttft=times(calls - errors, ttft_s),
        tpot=times(calls - errors, tpot_s),
        targets={"chat": Targets(with_target=calls, missed=missed)},
    )


GOOD = Observation(serves=True, new=service(), old=service(1000))


def weight(state, *, new=1, old=3):
    return canary.weight(state, SETTINGS, new=new, old=old)


def under_test(now=0.0):
    return canary.step(now, canary.begin(now, "r2"), Observation(serves=True), SETTINGS)


def test_a_good_revision_goes_through_all_steps_and_is_promoted():
    state = canary.begin(0, "r2")
    assert weight(state) == 0
    seen = [(state.phase, weight(state))]
    for now in range(1, 300):
        state = canary.step(now, state, GOOD, SETTINGS)
        if seen[-1] != (state.phase, weight(state)):
            seen.append((state.phase, weight(state)))
    assert seen == [(Phase.STARTING, 0), (Phase.TESTING, 5), (Phase.TESTING, 25), (Phase.PROMOTED, None)]
    assert "served as well" in state.reason


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        (service(100, errors=5), "5 of 100 calls failed at the new engines, and 0 of 1000 at the old ones"),
        (service(2, errors=2), "2 of 2 calls failed"),
        (
            service(100, ttft_s=0.6),
            "the time to the first token is 600 ms at the new engines and 200 ms at the old ones",
        ),
        (service(100, tpot_s=0.06), "the time for each token is 60 ms"),
        (service(100, missed=30), "30 of 100 calls of class chat missed their target at the new engines"),
    ],
)
def test_a_revision_that_serves_worse_goes_back_and_the_sentence_says_why(new, sentence):
    state = canary.step(1, under_test(), replace(GOOD, new=new), SETTINGS)
    assert state.phase is Phase.FAILED
    assert sentence in state.reason
    assert "step 1 of 2" in state.reason


@pytest.mark.parametrize(
    "old", [service(1000, errors=50), service(1000, errors=50, ttft_s=0.6, tpot_s=0.1, missed=300)]
)
def test_trouble_that_the_old_engines_have_too_is_no_fault_of_the_new_ones(old):
    new = service(100, errors=5, ttft_s=min(old.ttft.mean_s, 0.6), tpot_s=min(old.tpot.mean_s, 0.1))
    assert side_by_side.fault(new, old, SETTINGS.limits) is None


def test_one_engine_gets_no_more_than_the_share_of_one_engine():
    state = canary.step(61, under_test(), GOOD, SETTINGS)
    assert [weight(state, old=old) for old in (0, 1, 3, 9, 400)] == [25, 25, 25, 10, 1]
    assert weight(state, new=2, old=8) == 20


def test_times_of_few_calls_are_not_compared():
    assert side_by_side.fault(service(10, ttft_s=9), service(1000), SETTINGS.limits) is None
    assert side_by_side.fault(service(100, ttft_s=9), service(10), SETTINGS.limits) is None


@pytest.mark.parametrize("seen", [replace(GOOD, new=service(49)), replace(GOOD, old=service(49))])
def test_a_step_lasts_until_both_sides_have_had_enough_calls(seen):
    state = under_test()
    assert canary.step(10_000, state, seen, SETTINGS) == state


def test_a_pool_without_another_old_engine_is_tested_without_a_comparison():
    seen = replace(GOOD, old=Service(), old_serves=False)
    assert canary.step(61, under_test(), seen, SETTINGS).step == 1


@pytest.mark.parametrize("state", [canary.begin(0, "r2"), under_test()])
def test_a_crash_goes_back_at_once(state):
    after = canary.step(1, state, replace(GOOD, crash="chat-engine-a-1 restarted"), SETTINGS)
    assert (after.phase, after.reason) == (Phase.FAILED, "chat-engine-a-1 restarted")


def test_an_engine_that_does_not_start_in_time_goes_back():
    state = canary.begin(0, "r2")
    waiting = Observation(serves=False)
    assert canary.step(599, state, waiting, SETTINGS).phase is Phase.STARTING
    assert "did not serve within 600 s" in canary.step(600, state, waiting, SETTINGS).reason


def test_an_engine_that_stops_to_serve_gets_no_calls_and_begins_its_step_again():
    state = canary.step(61, under_test(), GOOD, SETTINGS)
    lost = canary.step(70, state, replace(GOOD, serves=False), SETTINGS)
    assert (lost.phase, lost.step, weight(lost)) == (Phase.STARTING, 1, 0)
    back = canary.step(100, lost, GOOD, SETTINGS)
    assert (back.phase, back.step, back.since_s) == (Phase.TESTING, 1, 100)


def test_an_engine_that_stops_serving_again_and_again_goes_back_and_each_step_counts_anew():
    few = replace(GOOD, new=service(10))

    def flapping(now, state, times):
        for _ in range(times):
            state = canary.step(now, state, replace(few, serves=False), SETTINGS)
            if state.phase is Phase.STARTING:
                state = canary.step(now, state, few, SETTINGS)
        return state

    state = flapping(10, under_test(), canary.MOST_STOPS - 1)
    assert (state.phase, state.step, state.stops) == (Phase.TESTING, 0, canary.MOST_STOPS - 1)
    state = canary.step(71, state, GOOD, SETTINGS)
    assert (state.phase, state.step, state.stops) == (Phase.TESTING, 1, 0)
    state = flapping(80, state, canary.MOST_STOPS)
    assert state.phase is Phase.FAILED
    assert state.reason == "its engine stopped serving 5 times (step 2 of 2)"


def test_while_paused_nothing_goes_forward_and_a_bad_revision_goes_back():
    for state in (canary.begin(0, "r2"), under_test()):
        assert canary.step(599, state, replace(GOOD, paused=True), SETTINGS) == state
    bad = replace(GOOD, paused=True, new=service(errors=50))
    assert canary.step(10, under_test(), bad, SETTINGS).phase is Phase.FAILED


services = st.builds(
    service,
    st.integers(0, 200),
    ttft_s=st.sampled_from([0.1, 0.2, 0.5]),
    tpot_s=st.sampled_from([0.01, 0.03, 0.09]),
    missed=st.just(0),
)
observations = st.builds(
    Observation,
    serves=st.booleans(),
    crash=st.sampled_from([None, None, None, "crash"]),
    old_serves=st.booleans(),
    paused=st.booleans(),
    new=services,
    old=services,
)


@given(st.lists(st.tuples(st.floats(0, 100), observations), max_size=60))
def test_whatever_is_observed_steps_are_earned_and_ends_are_final(history):
    now, state = 0.0, canary.begin(0, "r2")
    for passed_s, seen in history:
        now += passed_s
        before, state = state, canary.step(now, state, seen, SETTINGS)
        assert state.revision == "r2"
        assert weight(state) in (0, 5, 25, None)
        if before.phase in (Phase.PROMOTED, Phase.FAILED):
            assert state == before
            continue
        if seen.crash:
            assert state.phase is Phase.FAILED
        forward = state.phase is Phase.PROMOTED or state.step > before.step
        if forward:
            assert not seen.paused
            assert seen.serves
            assert before.phase is Phase.TESTING
            assert now - before.since_s >= SETTINGS.steps[before.step].duration_s
            assert seen.new.calls >= SETTINGS.limits.min_calls
            assert side_by_side.fault(seen.new, seen.old, SETTINGS.limits) is None
        if seen.paused:
            assert state == before or state.phase in (Phase.FAILED, Phase.STARTING)
        gone_back = canary.step(now, state, replace(seen, crash="now"), SETTINGS)
        assert gone_back.phase is (Phase.PROMOTED if state.phase is Phase.PROMOTED else Phase.FAILED)


def test_a_sum_of_services_less_one_of_them_is_the_other():
    one, other = service(10, errors=1, missed=2), replace(service(5), targets={"batch": Targets(with_target=5)})
    left = (one + other) - other
    assert (left.calls, left.errors, left.targets["chat"]) == (10, 1, one.targets["chat"])
    assert left.targets["batch"] == Targets()
    assert left.ttft.mean_s == pytest.approx(one.ttft.mean_s)
