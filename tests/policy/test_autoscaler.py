"""The autoscaler's decisions: enough engines, in time, the cheapest, and never back and forth."""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scaled_pool import ONE, PERIOD_S, SLOW, Pool, assert_few, load, node_pool

from tidegate_policy.scale import autoscaler, slo_headroom
from tidegate_policy.scale.autoscaler import ScaleSettings


def test_the_wanted_engines_carry_the_predicted_work_with_room_and_no_more():
    pool = Pool(wanted={"fast": 1})
    wanted = pool.observe(load(5.0), times=30)["fast"]
    assert 5.5 < wanted <= 8
    (_, _, reason), *more = pool.changes
    assert "5.00 engines of fast" in reason, reason
    assert "1 " not in more, "one change is enough for one step of the load"
    assert len(pool.changes) <= 2


def test_a_lower_load_lowers_the_engines_after_the_stabilisation_window_and_in_few_steps():
    pool = Pool(wanted={"fast": 8})
    pool.observe(load(5.0), times=40)
    before, at_s = dict(pool.state.wanted), pool.now
    pool.observe(load(1.0), times=80)
    assert pool.state.wanted["fast"] <= 3
    downs = [(at, wanted) for at, wanted, _ in pool.changes if at > at_s]
    assert len(downs) <= 2
    assert downs[0][0] - at_s >= pool.settings.stabilisation_s
    assert before["fast"] > downs[0][1]["fast"]
    assert "have been enough for 300 s" in pool.changes[-1][2]


def test_bursts_that_come_again_stop_moving_the_engines():
    pool = Pool(wanted={"fast": 1})
    for _ in range(8):
        pool.observe(load(6.0), times=18)
        pool.observe(load(0.5), times=72)
    last = pool.changes[-1][0]
    assert pool.now - last >= 4 * 900, "the window has become longer than the time between two bursts"
    assert pool.state.wanted["fast"] >= 7
    pool.observe(load(0.5), times=400)
    assert pool.state.wanted["fast"] <= 2, "it does not wait for ever"


def test_growth_starts_engines_before_they_are_needed():
    steady, growing = Pool(), Pool()
    steady.observe(load(11.0), times=100)
    for index in range(100):
        growing.observe(load(1.0 + 10 * index / 99))  # both have the same rate now
    assert growing.state.wanted["fast"] > steady.state.wanted["fast"]
    assert any("times as many are expected in 120 s" in reason for *_, reason in growing.changes)


def test_work_that_waits_starts_engines_even_when_no_call_arrives():
    pool = Pool(wanted={"fast": 1})
    pool.observe(load(0.5), times=30)
    assert pool.state.wanted == {"fast": 1}
    pool.observe(load(0.5), waiting=ONE.times(load(400.0)))
    assert pool.state.wanted["fast"] >= 3
    assert "calls wait, 400.0 s of work" in pool.decision.reason


def test_calls_in_the_queues_of_engines_count_as_waiting():
    pool = Pool(wanted={"fast": 1})
    pool.observe(load(0.5), times=30)
    pool.observe(load(0.5), queued=round(load(400.0)))
    assert pool.state.wanted["fast"] >= 3


def test_a_pool_without_calls_goes_to_zero_and_the_first_waiting_call_brings_an_engine_back():
    pool = Pool(wanted={"fast": 2})
    pool.observe(load(0.5), times=60)
    pool.observe(0.0, times=70)
    assert pool.state.wanted == {"fast": 0}
    assert pool.decision.reason.startswith("no call for 600 s")
    assert pool.observe(0.0, times=100) == {"fast": 0}
    assert pool.observe(0.1, waiting=ONE) == {"fast": 1}


def test_a_long_call_at_an_engine_keeps_the_pool():
    pool = Pool(wanted={"fast": 1})
    pool.observe(0.0, times=500, running=1)
    assert pool.state.wanted == {"fast": 1}


def test_the_cheapest_kinds_of_engines_are_started_first_and_stopped_last():
    dear = node_pool("dear", price=4.0)
    cheap = node_pool("cheap", cost=SLOW, price=1.0, high=3)
    pool = Pool(dear, cheap)
    assert pool.observe(load(0.5), times=5, waiting=ONE) == {"dear": 0, "cheap": 2}
    pool.observe(load(4.0), times=40)
    assert pool.state.wanted["cheap"] == 3, "the cheap kind is used up"
    assert pool.state.wanted["dear"] >= 3
    pool.observe(load(0.5), times=200)
    assert pool.state.wanted == {"dear": 0, "cheap": 2}


def test_dear_engines_are_replaced_when_cheap_ones_have_room_again():
    pool = Pool(node_pool("dear", price=4.0), node_pool("cheap", price=1.0), wanted={"dear": 3, "cheap": 0})
    pool.observe(load(1.5), times=200)
    assert pool.state.wanted["dear"] == 0
    assert pool.state.wanted["cheap"] >= 2
    raised, lowered = (wanted for _, wanted, _ in pool.changes)
    assert raised["dear"] == 3, "the dear engines stay until the cheap ones are there"
    assert lowered["dear"] == 0


def test_a_kind_that_cannot_meet_the_target_is_the_last_choice():
    pool = Pool(node_pool("dear", price=4.0, high=2), node_pool("cheap", cost=SLOW, price=0.1))
    assert pool.observe(load(0.4), times=5, tpot_s=0.03) == {"dear": 2, "cheap": 0}
    assert "cannot meet the tightest target" in pool.decision.node_pools["cheap"]
    assert pool.observe(load(4.0), times=30, tpot_s=0.03)["cheap"] > 0, "late answers are better than none"


def test_missed_targets_raise_the_headroom_and_many_met_ones_lower_it():
    pool = Pool(wanted={"fast": 7})
    pool.observe(load(5.0), times=40)
    before = pool.state.wanted["fast"]
    missed = {"chat": slo_headroom.Targets(objective=0.95, with_target=50, missed=10)}
    pool.observe(load(5.0), times=60, targets=missed)
    assert pool.state.wanted["fast"] > before
    assert pool.state.headroom.factor <= slo_headroom.MOST
    met = {"chat": slo_headroom.Targets(objective=0.95, with_target=50, missed=0)}
    pool.observe(load(5.0), times=600, targets=met)
    assert pool.state.headroom.factor == slo_headroom.LEAST
    assert pool.state.wanted["fast"] <= before


def test_misses_of_an_idle_pool_start_no_engines():
    pool = Pool(wanted={"fast": 1})
    missed = {"chat": slo_headroom.Targets(objective=0.95, with_target=50, missed=50)}
    pool.observe(load(0.1), times=200, targets=missed)
    assert pool.state.wanted == {"fast": 1}


def test_a_node_pool_without_room_gets_no_more_and_another_one_takes_over():
    cheap, dear = node_pool("cheap", price=1.0), node_pool("dear", price=3.0)
    pool = Pool(cheap, dear)
    pool.observe(load(3.0), times=5, waiting=ONE)
    assert pool.state.wanted["dear"] == 0
    wanted = pool.state.wanted["cheap"]
    full = [dataclasses.replace(cheap, unschedulable=wanted - 1), dear]
    pool.observe(load(3.0), node_pools=full)
    assert pool.state.wanted["cheap"] == 1
    assert pool.state.wanted["dear"] >= 2
    assert "no room" in pool.decision.node_pools["cheap"]
    count = len(pool.changes)
    pool.observe(load(3.0), times=50)
    assert len(pool.changes) == count, "the pool does not try again before its time"
    assert pool.state.wanted["cheap"] == 1


def test_the_first_decision_of_a_new_operator_lowers_nothing():
    pool = Pool(wanted={"fast": 9})
    pool.observe(load(1.0), times=29)
    assert pool.state.wanted == {"fast": 9}


def test_while_a_part_of_the_load_is_unknown_engines_only_come_and_the_window_begins_anew():
    pool = Pool(wanted={"fast": 8})
    pool.observe(load(5.0), times=40)
    before = pool.state.wanted["fast"]
    pool.observe(load(1.0), times=200, is_whole=False)
    assert pool.state.wanted["fast"] == before
    pool.observe(0.0, times=200, is_whole=False)
    assert pool.state.wanted["fast"] == before, "calls may come to the gateway that does not answer"
    pool.observe(load(1.0), times=29)
    assert pool.state.wanted["fast"] == before
    pool.observe(load(1.0), times=30)
    assert pool.state.wanted["fast"] < before
    pool.observe(load(9.0), times=30, is_whole=False)
    assert pool.state.wanted["fast"] > before


def test_without_room_in_any_node_pool_one_engine_stays_wanted_and_starts_the_others_when_it_finds_room():
    pool = Pool(node_pool("cheap", price=1.0), node_pool("dear", price=3.0))
    pool.observe(load(3.0), times=5, waiting=ONE)
    cheap, dear = pool.node_pools

    def stuck():
        """No engine of any node pool has found a node."""
        wanted = pool.state.wanted
        return [dataclasses.replace(each, unschedulable=wanted[each.name]) for each in (cheap, dear)]

    for _ in range(150):
        wanted = pool.observe(load(3.0), node_pools=stuck(), waiting=ONE)
        assert sum(wanted.values()) >= 1
    assert sum(wanted.values()) == 1
    (name,) = [name for name, count in wanted.items() if count]
    assert "no room for 1 of its engines" in pool.decision.node_pools[name]
    assert autoscaler.without_room(pool.now, pool.state).keys() >= {name}
    pool.observe(load(3.0), times=3, waiting=ONE)
    assert sum(pool.state.wanted.values()) > 3
    assert name not in autoscaler.without_room(pool.now, pool.state)


def test_a_lack_of_room_is_remembered_until_it_is_tried_again_and_no_engine_that_serves_goes():
    fast = node_pool(high=6)
    pool = Pool(fast, wanted={"fast": 1})
    pool.observe(load(3.0), times=5)
    wanted = pool.state.wanted["fast"]
    pool.observe(load(3.0), node_pools=[dataclasses.replace(fast, ready=wanted, unschedulable=2)])
    assert pool.state.wanted["fast"] == wanted
    assert autoscaler.without_room(pool.now, pool.state) == {"fast": wanted}
    pool.observe(load(3.0), times=50)
    assert pool.decision.node_pools["fast"] == f"the cluster had room for {wanted} of its engines"
    pool.observe(load(3.0), times=11)
    assert autoscaler.without_room(pool.now, pool.state) == {}


def test_edited_bounds_hold_at_once():
    pool = Pool(wanted={"fast": 5})
    pool.observe(load(4.0), times=5)
    pool.node_pools = (node_pool(high=2),)
    assert pool.observe(load(4.0)) == {"fast": 2}
    pool.node_pools = (node_pool(low=3),)
    assert pool.observe(0.0)["fast"] >= 3


STEPS = st.lists(st.tuples(st.floats(0.0, 15.0), st.integers(1, 60)), min_size=1, max_size=40)
"""(load in engines, observations)"""


@settings(max_examples=30, deadline=None)
@example(steps=[(0.0, 1), (2.2e-311, 31)], seed=7, budget=6, bounds=(0, 3))
@given(
    steps=STEPS,
    seed=st.integers(0, 1000),
    budget=st.integers(6, 20),
    bounds=st.tuples(st.integers(0, 3), st.integers(3, 12)),
)
def test_under_any_load_the_bounds_hold_and_changes_are_few(steps, seed, budget, bounds):
    low, high = bounds
    rng = random.Random(seed)
    kinds = node_pool("a", low=low, high=high), node_pool("b", cost=SLOW, price=0.4, high=5)
    pool = Pool(*kinds, settings=ScaleSettings(changes_an_hour=budget))
    for engines, times in steps:
        for _ in range(times):
            waiting = ONE.times(rng.choice((0, 0, 0, 5, 200)))
            wanted = pool.observe(load(engines) * rng.uniform(0.5, 1.5), waiting=waiting, queued=rng.choice((0, 3)))
            assert low <= wanted["a"] <= high
            assert 0 <= wanted["b"] <= 5
    assert_few(pool, budget)


@pytest.mark.parametrize("period_s", [60.0, 300.0, 600.0, 900.0, 1800.0])
def test_a_load_that_swings_makes_no_more_changes_than_swings(period_s):
    pool = Pool()
    for index in range(round(6 * 3600 / PERIOD_S)):
        pool.observe(load(6.0 if index * PERIOD_S % period_s < period_s / 2 else 0.5))
    assert_few(pool, pool.settings.changes_an_hour)
    swings = 6 * 3600 / period_s
    assert len(pool.changes) <= 3 * swings + 3
    if period_s / 2 < pool.settings.stabilisation_s:
        assert len(pool.changes) <= 4, "swings shorter than the window change nothing"


def test_the_last_change_of_an_hour_starts_all_engines_so_that_the_bound_starves_no_load():
    pool = Pool(settings=ScaleSettings(changes_an_hour=6))
    for engines in range(1, 13):
        pool.observe(load(float(engines)), times=12)
    assert pool.state.wanted == {"fast": 20}
    assert "the last of 6 changes of an hour" in pool.state.reason
    assert len(pool.changes) == 6


@pytest.mark.parametrize(("ends_s", "went_s"), [(1800.0, 2400.0), (None, 4210.0)])
def test_an_engine_that_starts_for_longer_than_its_call_waits_serves_before_the_pool_goes_to_zero(ends_s, went_s):
    """And one that never serves does not stay wanted."""
    pool = Pool(wanted={"fast": 0})
    pool.observe(0.0, waiting=ONE)
    assert pool.state.wanted == {"fast": 1}
    while pool.state.wanted["fast"]:
        serves = ends_s is not None and pool.now >= ends_s
        pool.observe(0.0, node_pools=[node_pool(ready=int(serves))])
    assert pool.now == pytest.approx(went_s, abs=20.0)
