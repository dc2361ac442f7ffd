"""Which tenant holds the most calls for its weight, and that no arrival at a full queue looks at all tenants."""

import random
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import counted_looks
import pytest
from test_dispatcher import call
from test_tenant_shares import in_pool

from tidegate_policy import policies
from tidegate_policy.admit import known_tenants
from tidegate_policy.admit.held_tenants import SLACK_ENTRIES, HeldTenants
from tidegate_policy.admit.tenant_load import PoolLoad, TenantLoad
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.policies import QueuedRequest


class World:
    """Tenants with weights, and the same counts in a plain mapping."""

    def __init__(self) -> None:
        self.asked = 0
        self.weights: dict[str, float] = {}
        self.seen: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.held = HeldTenants(self.standing)

    def standing(self, name: str) -> tuple[float, int]:
        self.asked += 1
        return self.weights[name], self.seen[name]

    def arrives(self, name: str, weight: float) -> None:
        self.weights[name] = weight
        self.held.changed(name)
        self.seen[name] = sum(self.seen.values()) + 1  # a tenant that is seen later is less likely to be the first

    def count(self, name: str, more: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + more
        if not self.calls[name]:
            del self.calls[name]
        self.held.count(name, more)

    def plain(self, arriving: str) -> str | None:
        """The answer by a look at all tenants."""
        for_weight = {name: count / self.weights[name] for name, count in self.calls.items()}
        most = min(self.calls, key=lambda name: (-for_weight[name], self.seen[name]), default=None)
        return None if most is None or for_weight.get(arriving, 0.0) >= for_weight[most] else most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tenants", [2, 5, 40])
def test_the_answer_is_that_of_a_look_at_all_tenants(tenants: int, seed: int) -> None:
    rng, world = random.Random(seed), World()
    names = [f"t{number}" for number in range(tenants)]
    found: set[str | None] = set()
    for _ in range(600):
        name = rng.choice(names)
        event = rng.random()
        if event < 0.55 or name not in world.weights:
            world.arrives(name, rng.choice([0.1, 1.0, 1.0, 2.0, 10.0]))
            if rng.random() < 0.7:
                world.count(name, 1)
        elif world.calls.get(name):
            world.count(name, -1 if rng.random() < 0.8 else -world.calls[name])
        if rng.random() < 0.5:
            arriving = rng.choice([*names, "new"])
            assert world.held.with_more_than(arriving) == world.plain(arriving)
            found.add(world.plain(arriving))
    assert len(found) > min(tenants, 5) // 2, "the answers differ"


def visits(tenants: int) -> int:
    """How often 2,000 arrivals at a full queue look at a tenant."""
    world = World()
    for number in range(tenants):
        world.arrives(f"t{number}", 1.0)
        world.count(f"t{number}", 1 + number % 3)
    world.asked = 0
    for number in range(2000):
        name = f"t{number * 7 % tenants}"
        world.arrives(name, 1.0 + number % 5 / 10)
        most = world.held.with_more_than(name)
        if most is not None:
            world.count(most, -1)
            world.count(name, 1)
    return world.asked


def test_an_arrival_looks_at_a_few_tenants_however_many_there_are() -> None:
    assert max(visits(100), visits(1700), visits(5000)) <= 10 * 2000


def test_entries_that_count_no_more_are_removed() -> None:
    world = World()
    for number in range(20):
        world.arrives(f"t{number}", 1.0)
        world.count(f"t{number}", 1)
    for number in range(5000):
        world.count(f"t{number % 20}", 1)
        assert len(world.held._entries) <= 2 * 20 + SLACK_ENTRIES
    for number in range(20):
        world.count(f"t{number}", -251)
        assert world.held.with_more_than("new") == world.plain("new")
    assert not world.held._entry_of


def held(name: str, tenant: str) -> QueuedRequest:
    return QueuedRequest(call=replace(call(name), tenant=tenant), service_s=1.0)


class Counted(counted_looks.CountedLooks, OrderedDict[str, Any]):
    """Records that count how often all of them are looked at."""


def test_an_arrival_at_a_full_queue_costs_no_look_at_all_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tenants, "OrderedDict", Counted)
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 8.0)
    pool = in_pool(shares)
    for number in range(900):
        for each in range(1 + number % 3):
            shares.hold(0.0, held(f"{number}-{each}", f"t{number}"))
    before = Counted.looks
    for number in range(300):
        evicted = pool.largest(0.0, f"invented-{number}")
        assert evicted is not None
        assert evicted.call.id == f"{3 * number + 2}-2", "of several the tenant that was not seen for longest"
    assert Counted.looks == before


@pytest.mark.parametrize("most_known", [6, 1000])
@pytest.mark.parametrize("seed", range(15))
def test_the_weights_are_those_in_the_whole_pool(monkeypatch: pytest.MonkeyPatch, most_known: int, seed: int) -> None:
    """Calls are held for the whole pool or a part of it. Gateways tell of tenants, and forget some."""
    monkeypatch.setattr(known_tenants, "MAX_TENANTS", most_known)
    rng, fcfs = random.Random(seed), policies.create("fcfs")
    holders = HeldTenants(lambda name: whole.standing(name))
    whole = TenantShares(fcfs, bounded=True, limits=lambda: 8.0, holders=holders)
    part = TenantShares(fcfs, bounded=True, limits=lambda: 4.0, shared=lambda: 3.0, holders=holders)
    names = [f"t{number}" for number in range(12)]
    answers: set[str | None] = set()
    for number in range(400):
        now, shares, one = (
            number * rng.choice([0.1, 0.2]),
            rng.choice([whole, part]),
            held(f"{number}", rng.choice(names)),
        )
        one = replace(one, call=replace(one.call, weight=rng.choice([0.1, 1.0, 1.0, 10.0])))
        present = list(shares)
        event = rng.choice(["arrives", "arrives", "arrives", "enters", "gone", "gone", "told", "newest"])
        if event == "arrives":
            whole.competes(now, one.call)
            shares.competes(now, one.call)
            shares.hold(now, one)
        elif event == "enters":
            shares.enter(now, one)
            shares.leave(one.call)
        elif event == "gone" and present:
            gone = rng.choice(present).call
            assert shares.remove(now, gone.id, gone.tenant) is not None
        elif event == "newest" and present:
            shares.take_newest(now, present[0].call.tenant)
        elif event == "told":
            told = rng.sample(names, 3)
            weight = rng.choice([0.2, 5.0])
            whole.on_others(now, PoolLoad({name: TenantLoad(rng.randrange(2), 0, weight, 0.1) for name in told}), 2)
        counts = Counter(item.call.tenant for item in (*whole, *part))
        places = {
            name: (-count / whole.standing(name)[0], whole.standing(name)[1], name) for name, count in counts.items()
        }
        most = min(places, key=places.__getitem__, default=None)
        arriving = rng.choice(names)
        if most is not None and places.get(arriving, (0.0,))[0] <= places[most][0]:
            most = None
        assert holders.with_more_than(arriving) == most
        answers.add(most)
    assert len(answers) > 4, "the answers differ"
