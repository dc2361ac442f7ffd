"""A tenant whose calls come by way of several gateways has no more than its share of the pool together."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.admit import tenant_load
from tidegate_policy.admit.max_min_places import FLOODS_PART
from tidegate_policy.admit.pool_places import FIRST_CALLS
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest

PLACES = 40
SERVICE_S = 100.0
"""Of a call, which stays longer than a test looks."""
SYNC_S, STEP_S = 1.0, 0.1


class Pool:
    """Some gateways that tell each other what tenants have. `taught` of them know from answers what saturates the pool; to
    the others the engines seem to have twice the places."""

    def __init__(self, gateways: int, rng: random.Random, *, taught: int) -> None:
        self.now, self.calls = 0.0, 0
        self.rng = rng
        self.gateways = [
            TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 2.0 * PLACES) for _ in range(gateways)
        ]
        for shares in self.gateways[:taught]:
            for _ in range(FIRST_CALLS):
                shares.observe(SERVICE_S, SERVICE_S / PLACES)
        self.has: Counter[str] = Counter()
        """The calls of each tenant that have entered, at all gateways."""
        self.running: list[list[Call]] = [[] for _ in range(gateways)]
        self.told: dict[int, tenant_load.PoolLoad] = {}
        self.next_s = [rng.uniform(0.0, SYNC_S) for _ in range(gateways)]

    def arrive(self, gateway: int, tenant: str, count: int) -> None:
        shares = self.gateways[gateway]
        for _ in range(count):
            self.calls += 1
            call = Call(
                id=CallId(str(self.calls)), arrived_at_s=self.now, prompt_tokens=1, output_predicted=1, tenant=tenant
            )
            item = QueuedRequest(call=call, service_s=SERVICE_S)
            shares.competes(self.now, call)
            if shares.arrived(self.now, item):
                self.enter(shares, item)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for gateway in self.rng.sample(range(len(self.gateways)), len(self.gateways)):
                if self.next_s[gateway] <= self.now:
                    self.exchange(gateway)
                    self.next_s[gateway] = self.now + SYNC_S * self.rng.uniform(0.8, 1.2)
                for item in self.gateways[gateway].release(self.now):
                    self.enter(self.gateways[gateway], item)

    def enter(self, shares: TenantShares, item: QueuedRequest) -> None:
        shares.enter(self.now, item)
        self.has[item.call.tenant] += 1
        self.running[self.gateways.index(shares)].append(item.call)

    def end_all(self, tenant: str) -> None:
        """All calls of a tenant that have entered end, and as many come in their place."""
        for gateway, calls in enumerate(self.running):
            ended = [call for call in calls if call.tenant == tenant]
            self.running[gateway] = [call for call in calls if call.tenant != tenant]
            for call in ended:
                self.gateways[gateway].leave(call)
                self.has[tenant] -= 1
                self.arrive(gateway, tenant, 1)

    def exchange(self, gateway: int) -> None:
        self.told[gateway] = self.gateways[gateway].load(self.now)
        others = tenant_load.merged(load for other, load in self.told.items() if other != gateway)
        self.gateways[gateway].on_others(self.now, others, len(self.gateways))


@given(st.integers(2, 8), st.integers(0, 2**32))
def test_a_flood_by_way_of_all_gateways_gets_the_share_of_one_tenant(gateways: int, seed: int) -> None:
    pool = Pool(gateways, random.Random(seed), taught=1)
    most = 1.25 * PLACES + gateways  # exact but for two exchanges of one gateway between two of another
    pool.arrive(0, "honest", 2)
    pool.run(3 * SYNC_S)  # they tell each other what saturates the pool
    for _ in range(5):
        for gateway in range(gateways):
            pool.arrive(gateway, "flood", 30)
        pool.run(pool.rng.uniform(0.0, 1.0))
        assert pool.has["flood"] <= most
    pool.run(20.0)
    for _ in range(5):
        pool.end_all("flood")
        for _ in range(20):
            pool.run(STEP_S)
            assert pool.has["flood"] <= most
    assert pool.has["honest"] == 2


@pytest.mark.parametrize("gateways", [2, 4, 8])
def test_a_flood_by_way_of_one_gateway_gets_its_whole_share_in_time(gateways: int) -> None:
    pool = Pool(gateways, random.Random(gateways), taught=gateways)
    pool.arrive(0, "honest", 2)
    pool.run(3 * SYNC_S)
    pool.arrive(1, "flood", 400)
    assert pool.has["flood"] <= PLACES // gateways + 1
    pool.run(6.0 * gateways)
    share = FLOODS_PART * (PLACES - 2)
    assert share - gateways <= pool.has["flood"] <= share + 1


def test_a_burst_of_a_tenant_that_keeps_to_its_part_waits_for_two_exchanges() -> None:
    pool = Pool(4, random.Random(4), taught=4)
    pool.arrive(1, "flood", 400)
    pool.run(10.0)
    pool.arrive(0, "honest", 10)  # of 20 places, and 72 for a tenant that sends little
    assert 3 <= pool.has["honest"] < 10
    pool.run(2.5 * SYNC_S)
    assert pool.has["honest"] == 10


def test_work_that_a_tenant_sends_to_other_gateways_counts() -> None:
    """At each of two gateways the tenant sends no more than its part, and together twice that."""
    pool = Pool(2, random.Random(0), taught=2)
    quiet, other = pool.gateways
    for shares in pool.gateways:
        pool.arrive(pool.gateways.index(shares), "other", 1)
    pool.arrive(0, "both", 3)
    pool.arrive(1, "both", 3)
    assert quiet.bounds(0.0)["both"] > PLACES
    pool.exchange(1)
    pool.exchange(0)
    assert quiet.bounds(0.1)["both"] < PLACES
    assert other.load(0.1).tenants["both"].rate == pytest.approx(3 * SERVICE_S / PLACES / 20, rel=0.01)
