"""The share of each tenant while several compete, and that no call is lost when it waits for it."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.admit.known_tenants import MAX_TENANTS
from tidegate_policy.admit.max_min_places import FLOODS_PART
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.pool_places import FIRST_CALLS
from tidegate_policy.admit.prompt_window import YIELDING_TIMES, PoolPrompts, PromptCosts, PromptSeconds
from tidegate_policy.admit.queued_calls import EACH_S, FEW
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad, TenantLoad
from tidegate_policy.admit.tenant_shares import (
    ACTIVE_S,
    HEADROOM,
    KEEPS,
    LEAST_PLACES,
    TenantShares,
)
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.engine_table import EngineTable, max_inflight
from tidegate_policy.dispatch.pool_shares import PoolShares
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest


def item(name: str, tenant: str, weight: float = 1.0, service_s: float = 100.0) -> QueuedRequest:
    call = Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=10, output_predicted=10, tenant=tenant, weight=weight)
    return QueuedRequest(call=call, service_s=service_s)


def taught(places: float, policy: str = "fcfs") -> TenantShares:
    shares = TenantShares(policies.create(policy), bounded=True)
    for _ in range(FIRST_CALLS):
        shares.observe(100.0, 100.0 / places)
    return shares


def in_pool(shares: TenantShares) -> PoolShares:
    """The shares of a pool without engines."""
    pool = PoolShares(policies.create("fcfs"), bounded=True, engines=EngineTable("auto", OutlierSettings()))
    pool._whole, pool._holders = shares, shares._holders
    return pool


def entered(
    shares: TenantShares, now: float, tenant: str, count: int, weight: float = 1.0, service_s: float = 100.0
) -> int:
    """Sends `count` calls of the tenant and returns how many of them entered; engines have these. Ten calls of 100 s are
    more work than any tenant may send in a short time."""
    found = 0
    for index in range(count):
        one = item(f"{tenant}{now}-{index}", tenant, weight, service_s)
        shares.competes(now, one.call)
        if shares.arrived(now, one):
            shares.enter(0.0, one)
            shares.queue.remove(one.call)
            found += 1
    return found


def entering(shares: TenantShares, now: float, *, engines: int = 1000, prompt_s: float = 1.0) -> list[QueuedRequest]:
    """The calls that enter now."""
    costs = PromptCosts(seconds=lambda call: PromptSeconds(prompt_s, prompt_s), engines=lambda now: engines)
    shares.prompts = PoolPrompts(costs)
    return shares.release(now)


def left(shares: TenantShares, tenant: str, sequences: int = 1) -> None:
    """Calls of the tenant with so many sequences left."""
    shares.leave(replace(item("left", tenant).call, sequences=sequences))


def test_a_tenant_that_is_alone_has_no_bound() -> None:
    assert entered(taught(8), 0.0, "one", 100) == 100


def test_places_are_shared_by_weight_and_what_one_leaves_goes_to_the_others() -> None:
    shares = taught(40)
    for tenant in ("a", "b", "c", "d", "e", "f", "g"):
        entered(shares, 0.0, tenant, 1)
    assert entered(shares, 0.0, "large", 100) == 33, "the seven others want seven of forty places"
    weighted = taught(40)
    entered(weighted, 0.0, "light", 60)
    assert entered(weighted, 0.0, "heavy", 200, weight=3.0) == 54, "three quarters of 1.8 times the places"


def test_a_tenant_that_floods_has_no_headroom_beside_tenants_that_keep_to_their_parts() -> None:
    shares = taught(40)
    entered(shares, 0.0, "quiet", 10)
    flooded = entered(shares, 0.0, "flood", 36)
    assert flooded == 36, "1.8 times half of the places, and the burst is not twice that"
    held = entered(shares, 0.0, "flood", 60)
    assert held == 0
    for _ in range(18):
        left(shares, "flood")
        assert entering(shares, 1.0) == [], "it has 0.6 of the 30 places that are its max-min share"
    left(shares, "flood")
    assert [one.call.tenant for one in entering(shares, 1.0)] == ["flood"]


def test_tenants_that_send_no_more_work_than_their_parts_do_not_wait_for_each_other() -> None:
    shares = taught(40)
    for turn, tenant in itertools.product(range(3), ("a", "b", "c", "d")):
        entered(shares, turn / 100, tenant, 1, service_s=0.1)
    for tenant in ("a", "b", "c", "d"):
        assert entered(shares, 1.0, tenant, 50, service_s=0.1) == KEEPS * HEADROOM * 10 - 3
    assert entered(shares, 2.0, "a", 1, service_s=10_000.0) == 0
    assert shares._bounds(3.0)[0]["a"] == FLOODS_PART * 10, "it sent much work, and wants more than twice 18 places"
    assert shares._bounds(300.0)[0]["a"] == KEEPS * HEADROOM * 10, "the work of long ago does not count"


@given(busy=st.integers(0, 200), floods=st.integers(20, 200), count=st.integers(1, 4))
def test_what_others_want_raises_no_bound_of_a_tenant_that_sends_much_work(busy: int, floods: int, count: int) -> None:
    shares = taught(40)
    entered(shares, 0.0, "other", busy, service_s=0.1)
    for number in range(count):
        entered(shares, 0.0, f"flood{number}", floods)
    tenants = count + bool(busy)
    most = math.inf if tenants == 1 else max(HEADROOM * 40 / tenants, 40 - busy if count == 1 else 0)
    for number in range(count):
        assert shares._bounds(0.1)[0][f"flood{number}"] <= most


def test_while_all_tenants_flood_the_pool_all_have_headroom() -> None:
    shares = taught(40)
    entered(shares, 0.0, "one", 1)
    entered(shares, 0.0, "other", 1)
    for tenant in ("one", "other"):
        entered(shares, 0.0, tenant, 200)
    for one in entering(shares, 1.0):
        shares.enter(0.0, one)
    assert min(shares._tenants[tenant].entered for tenant in ("one", "other")) == 36


def test_before_the_places_are_measured_they_are_those_of_the_engines() -> None:
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 8.0)
    entered(shares, 0.0, "quiet", 1)
    assert entered(shares, 0.0, "flood", 100) == 8, "1.8 times half of the places"


def test_calls_that_entered_while_their_tenant_was_alone_are_to_be_held_again_when_another_tenant_comes() -> None:
    shares = taught(8)
    entered(shares, 0.0, "flood", 50)
    assert shares.surplus(0.1) == {}
    assert not shares.is_owed(0.1, "flood")
    shares.competes(0.2, item("first", "quiet").call)
    assert shares.surplus(0.2) == {"flood": 45}, "0.6 of what the other one does not want is left to it"
    assert shares.surplus(0.2) == {}, "not again at once"
    entered(shares, 0.2, "quiet", 1)
    assert shares.is_owed(0.2, "quiet")
    assert not shares.is_owed(0.2, "flood")


BATCH = 64
"""Sequences of the engine of `one_engine`."""


def one_engine(*, bounded: bool = True, part: bool = False) -> TenantShares:
    limit = max_inflight("auto", CostModel(step_s=0.02, prefill_s=1e-4, max_batch=BATCH))
    assert limit is not None
    shared = (lambda: 20.0) if part else None
    shares = TenantShares(policies.create("fcfs"), bounded=bounded, limits=lambda: float(limit), shared=shared)
    for _ in range(FIRST_CALLS):
        shares.observe(100.0, 2.0)
    return shares


@pytest.mark.parametrize("part", [False, True])
def test_a_tenant_that_is_alone_for_now_leaves_places_of_each_batch_to_the_others(part: bool) -> None:
    shares = one_engine(part=part)
    assert entered(shares, 0.0, "flood", 3 * BATCH) == 3 * BATCH, "it is the only one that is known"
    left(shares, "flood", 3 * BATCH)
    assert entered(shares, 1.0, "quiet", 1) == 1
    left(shares, "quiet")
    alone_s = 2.0 + ACTIVE_S
    assert entered(shares, alone_s, "flood", 3 * BATCH) == BATCH - BATCH // 16
    assert shares.surplus(alone_s) == {}, "no call has to be held again"
    left(shares, "flood", 3)
    assert len(entering(shares, alone_s)) == 3


def test_the_first_tenant_that_comes_leaves_places_to_the_others_that_the_settings_name() -> None:
    shares = one_engine()
    shares.on_settings(several=True)
    assert entered(shares, 0.0, "flood", 3 * BATCH) == BATCH - BATCH // 16


def test_a_tenant_that_is_alone_for_now_has_no_bound_where_tenants_share_nothing() -> None:
    shares = one_engine(bounded=False)
    entered(shares, 0.0, "quiet", 1)
    left(shares, "quiet")
    assert entered(shares, 2.0 + ACTIVE_S, "flood", 3 * BATCH) == 3 * BATCH


def test_the_weight_of_a_tenant_is_that_of_its_calls_of_late_and_not_of_the_newest_one() -> None:
    shares = taught(100)
    entered(shares, 0.0, "a", 90, weight=4.0)
    entered(shares, 0.0, "b", 60, weight=4.0)
    before = shares._bounds(0.1)[0]["b"]
    entered(shares, 0.1, "a", 1, weight=1.0)
    assert abs(shares._bounds(0.1)[0]["b"] - before) < 0.05 * before


def test_there_may_be_more_busy_tenants_than_are_remembered() -> None:
    shares = taught(8)
    for index in range(MAX_TENANTS + 5):
        entered(shares, 0.0, f"tenant-{index}", 1)
    assert shares._sequences + len(shares) == MAX_TENANTS + 5


def held_under(policy: str) -> TenantShares:
    """Twelve calls of a tenant are held. The one that arrived last has the least work."""
    shares = taught(8, policy)
    entered(shares, 0.0, "quiet", 4)
    entered(shares, 0.0, "busy", 8)
    for index in range(12):
        assert not shares.arrived(1.0 + index, item(f"held-{index}", "busy", service_s=1200.0 - 100 * index))
    return shares


def released(shares: TenantShares) -> list[str]:
    left(shares, "busy", 6)
    found = entering(shares, 20.0)
    for one in found:
        shares.enter(0.0, one)
    return [str(one.call.id) for one in found]


def test_held_calls_of_a_tenant_enter_in_the_order_of_the_scheduling_policy() -> None:
    assert released(held_under("fcfs"))[:2] == ["held-0", "held-1"]
    assert released(held_under("sjf"))[:2] == ["held-11", "held-10"]


def test_a_switch_of_the_policy_orders_the_held_calls_anew() -> None:
    shares = held_under("fcfs")
    shares.on_policy(15.0, policies.create("sjf"))
    assert released(shares)[:2] == ["held-11", "held-10"]
    assert len(list(shares)) == len(shares) == 6


def test_a_full_queue_loses_the_newest_held_call_under_every_policy() -> None:
    for policy in policies.POLICIES:
        evicted = in_pool(held_under(policy)).largest(20.0, "quiet")
        assert evicted is not None
        assert evicted.call.id == "held-11"


def test_a_tenant_always_has_a_few_places() -> None:
    shares = taught(0.1)
    entered(shares, 0.0, "flood", 50)
    assert entered(shares, 0.0, "late", 10) == LEAST_PLACES


def test_held_calls_enter_in_order_as_others_leave() -> None:
    shares = taught(2.2)
    entered(shares, 0.0, "other", 2)
    entered(shares, 0.0, "flood", 5)
    assert [one.call.id for one in shares] == ["flood0.0-2", "flood0.0-3", "flood0.0-4"]
    assert entering(shares, 1.0) == []
    left(shares, "flood")
    assert [one.call.id for one in entering(shares, 1.0)] == ["flood0.0-2"]


def test_the_newest_call_of_the_tenant_with_the_most_held_calls_makes_room() -> None:
    shares = taught(2.2)
    entered(shares, 0.0, "other", 2)
    entered(shares, 0.0, "flood", 6)
    evicted = in_pool(shares).largest(0.0, "other")
    assert evicted is not None
    assert evicted.call.id == "flood0.0-5"
    assert in_pool(shares).largest(0.0, "flood") is None, "a tenant does not evict its own calls"


@given(seed=st.integers(0, 10**6))
def test_no_call_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    shares = taught(rng.choice([0.8, 3.2]))
    held: set[str] = set()
    inside: list[str] = []
    for step in range(80):
        tenant = rng.choice(["a", "b", "b", "b"])
        if rng.random() < 0.6:
            one = item(str(step), tenant)
            if shares.arrived(float(step), one):
                shares.enter(0.0, one)
                inside.append(tenant)
            else:
                held.add(str(step))
        elif inside:
            left(shares, inside.pop(rng.randrange(len(inside))))
        elif held and rng.random() < 0.5:
            gone = rng.choice(sorted(held))
            found = shares.remove(CallId(gone), "a") or shares.remove(CallId(gone), "b")
            assert found is not None
            held.remove(gone)
        for one in entering(shares, float(step)):
            held.remove(one.call.id)
            shares.enter(0.0, one)
            inside.append(one.call.tenant)
        assert {one.call.id for one in shares} == held
        assert len(shares) == len(held)
    for tenant in inside:
        left(shares, tenant)
    while held:
        for one in entering(shares, 100.0):
            held.remove(one.call.id)
            shares.enter(0.0, one)
            left(shares, one.call.tenant)


def flooded() -> TenantShares:
    """One tenant floods forty places while another keeps to its part. Calls of the flood have left since."""
    shares = taught(40)
    entered(shares, 0.0, "quiet", 10)
    entered(shares, 0.0, "flood", 120)
    left(shares, "flood", 24)
    return shares


def test_each_engine_computes_one_prompt_of_a_flood_at_a_time() -> None:
    shares = flooded()
    first = entering(shares, 1.0, engines=2)
    assert len(first) == 2
    assert all(one.call.yields for one in first), "engines compute these prompts in small parts"
    assert entering(shares, 1.0, engines=2) == []
    assert shares.on_first_token(first[0].call), "calls waited for this first token"
    assert len(entering(shares, 1.0, engines=2)) == 1
    shares.leave(first[1].call)
    assert len(entering(shares, 1.0, engines=2)) == 1


def test_a_prompt_of_a_flood_without_a_first_token_blocks_the_next_one_for_a_bounded_time() -> None:
    shares = flooded()
    assert len(entering(shares, 1.0, engines=1)) == 1
    assert entering(shares, 1.0 + 0.9 * YIELDING_TIMES, engines=1) == []
    assert len(entering(shares, 1.0 + YIELDING_TIMES, engines=1)) == 1, "the first token of a whole answer is not seen"


def test_held_calls_of_a_tenant_that_does_not_flood_the_pool_enter_unmarked_and_together() -> None:
    shares = taught(40)
    entered(shares, 0.0, "quiet", 10)
    entered(shares, 0.0, "busy", 60)
    left(shares, "busy", 16)
    found = entering(shares, 1.0, engines=1, prompt_s=0.01)
    assert len(found) > 1
    assert not any(one.call.yields for one in found)


def test_the_bounds_of_many_tenants_are_found_once_in_a_while() -> None:
    asked = 0

    def limits() -> float:
        nonlocal asked
        asked += 1
        return 0.0

    def found(now: float, numbers: range) -> int:
        """How often the bounds are found while each tenant sends a call. That asks for the limits twice, and each call
        itself once."""
        before = asked
        for number in numbers:
            entered(shares, now, f"t{number}", 1)
        return (asked - before - len(numbers)) // 2

    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=limits)
    assert found(0.0, range(FEW)) >= FEW - 2, "those of few tenants are found for each call"
    assert found(0.0, range(FEW, 1000)) <= 2, "all at the same instant"
    assert found(1000 * EACH_S, range(1000, 1001)) == 1


def test_a_flood_finds_no_bounds_from_the_time_before_it() -> None:
    shares = taught(40)
    for number in range(1000):
        entered(shares, 0.0, f"t{number}", 1)
    for number in range(1000):
        left(shares, f"t{number}")
    later = 1000.0
    entered(shares, later, "old", 1)
    fresh = taught(40)
    entered(fresh, later, "old", 1)
    for tenant in ("new", "old"):
        # The bounds of a thousand tenants count for 50 ms, so they may not know yet how much work a tenant sends.
        assert entered(fresh, later + 0.001, tenant, 500) < 1 + KEEPS * HEADROOM * 20
        assert entered(shares, later + 0.001, tenant, 500) < 1 + KEEPS * HEADROOM * 20


def test_calls_at_other_gateways_count() -> None:
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 8.0)
    assert entered(shares, 0.0, "flood", 20) == 20, "alone"
    shares.on_others(1.0, PoolLoad({"quiet": TenantLoad(1, 0, 1.0, 0.0), "flood": TenantLoad(10, 90, 1.0, 0.0)}), 2)
    assert shares.surplus(1.0) == {"flood": 17}, "its part of 30 - 0.6 * 7"
    assert not shares.is_owed(1.0, "flood")
    one = item("late", "quiet")
    shares.competes(1.1, one.call)
    assert shares.arrived(1.1, one)
    shares.enter(0.0, one)
    assert shares.is_owed(1.1, "quiet")
    shares.on_others(2.0, PoolLoad({"waits": TenantLoad(0, 5, 1.0, 0.0)}), 2)
    assert "waits" in shares.bounds(40.0)
    shares.on_others(3.0, NO_LOAD, 2)
    assert "waits" not in shares.bounds(40.0)
    assert shares.load(3.0).tenants == {"flood": TenantLoad(20, 0, 1.0, 0.0), "quiet": TenantLoad(1, 0, 1.0, 0.0)}


def test_a_new_gateway_counts_on_what_its_calls_are_predicted_to_need() -> None:
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 64.0)
    assert shares.places == 64, "nothing is known"
    shares.expect(100.0, 5.0)
    assert shares.places == pytest.approx(20)
    shares.on_others(0.0, PoolLoad(places=30.0), 2)
    assert shares.places == 30, "others have had answers"
    assert shares.load(0.0).places is None, "this one has not"
    for _ in range(FIRST_CALLS):
        shares.observe(100.0, 1.0)
    assert shares.places == shares.load(0.0).places == 48, "a quarter of the places is left free, whatever was learned"
