"""Which tenants a gateway forgets for new ones, and that invented names cost no look at all the others."""

import random
from collections import OrderedDict
from typing import Any

import counted_looks
import pytest

from tidegate_policy import policies
from tidegate_policy.admit import known_tenants, tenant_record
from tidegate_policy.admit.known_tenants import MAX_TENANTS
from tidegate_policy.admit.queued_calls import EACH_S
from tidegate_policy.admit.tenant_load import MOST_TOLD, PoolLoad, TenantLoad
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest


def item(name: str, tenant: str) -> QueuedRequest:
    call = Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=10, output_predicted=10, tenant=tenant)
    return QueuedRequest(call=call, service_s=1.0)


def pool() -> TenantShares:
    return TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 8.0)


def sends(shares: TenantShares, now: float, one: QueuedRequest) -> bool:
    """Whether the call enters."""
    shares.competes(now, one.call)
    enters = shares.arrived(now, one)
    if enters is not None:
        shares.enter(now, enters)
    return enters is not None


class Counted(counted_looks.CountedLooks, OrderedDict[str, Any]):
    """Records that count how often all of them are looked at."""


def test_invented_tenants_cost_no_look_at_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tenants, "OrderedDict", Counted)
    shares = pool()
    for number in range(MAX_TENANTS + 100):
        sends(shares, 0.0, item(f"{number}", f"busy-{number}"))
    before = Counted.looks
    for number in range(500):
        shares.competes(0.0, item("next", f"invented-{number}").call)
    assert Counted.looks == before
    assert len(shares._tenants) == MAX_TENANTS + 101, "one record for all invented tenants, and none of a busy one lost"


def test_the_tenant_that_was_not_seen_and_wanted_nothing_for_longest_is_forgotten_first() -> None:
    shares = pool()
    for number in range(MAX_TENANTS):
        shares.competes(0.0, item("call", f"t{number}").call)
    shares.competes(1.0, item("call", "t0").call)
    one = item("one", "t1")
    assert sends(shares, 2.0, one)
    shares.competes(3.0, item("call", "new").call)
    assert {"t0", "t1"} <= shares._tenants.keys()
    assert "t2" not in shares._tenants
    shares.leave(one.call)
    for number in range(MAX_TENANTS - 2):
        shares.competes(4.0, item("call", f"new-{number}").call)
    assert "t0" not in shares._tenants
    assert {"t1", "new"} <= shares._tenants.keys()


@pytest.mark.parametrize("seed", range(5))
def test_those_that_may_be_forgotten_are_those_that_want_nothing(seed: int) -> None:
    rng, shares = random.Random(seed), pool()
    entered: list[Call] = []
    for number in range(400):
        now, one = number * 0.1, item(f"{number}", f"t{rng.randrange(12)}")
        event = rng.choice(["arrives", "arrives", "leaves", "leaves", "gone", "told", "newest"])
        held = [each.call for each in shares]
        if event == "arrives" and sends(shares, now, one):
            entered.append(one.call)
        elif event == "leaves" and entered:
            shares.leave(entered.pop(rng.randrange(len(entered))))
        elif event == "gone" and held:
            shares.remove(now, held[-1].id, held[-1].tenant)
        elif event == "newest" and held:
            shares.take_newest(now, held[0].tenant)
        elif event == "told":
            names = rng.sample([f"t{index}" for index in range(20)], 3)
            shares.on_others(now, PoolLoad({name: TenantLoad(rng.randrange(2), 0, 1.0, 0.1) for name in names}), 2)
        for each in shares.release(now):
            shares.enter(now, each)
            entered.append(each.call)
        idle = {name for name, tenant in shares._tenants.items() if not tenant.wanted}
        assert shares._remembered._idle.keys() == idle


def test_the_exchange_between_gateways_makes_loads_of_the_tenants_alone_that_it_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(*values: Any) -> TenantLoad:
        made.append(1)
        return TenantLoad(*values)

    shares = pool()
    for number in range(500):
        for call in range(1 + number % 7):
            sends(shares, 0.0, item(f"{number}-{call}", f"t{number}"))
    for number in range(100):
        shares.sends(0.0, item(f"{number}", f"quiet-{number}"), 1.0)
    monkeypatch.setattr(tenant_record, "TenantLoad", counted)
    told = shares.load(0.0).tenants
    assert list(told) == [f"t{number}" for number in range(500) if number % 7 == 6][:MOST_TOLD]
    assert len(made) <= MOST_TOLD
    assert all(tenant.told.last == tenant.entered for tenant in shares._tenants.values()), (
        "also where others hear nothing of it"
    )


def test_tenants_that_sent_work_of_late_are_told_of_after_those_that_have_calls() -> None:
    shares = pool()
    for number in range(2 * MOST_TOLD):
        shares.sends(0.0, item(f"{number}", f"quiet-{number}"), 1.0 if number % 2 else 1e-3)
    for number in range(3):
        sends(shares, 0.0, item(f"{number}", f"busy-{number}"))
    told = list(shares.load(0.0).tenants)
    assert told[:3] == ["busy-0", "busy-1", "busy-2"]
    assert told[3:] == [f"quiet-{number}" for number in range(1, 2 * MOST_TOLD, 2)][: MOST_TOLD - 3]


def test_bounds_of_many_tenants_count_for_their_time_although_gateways_tell_each_other_more_often() -> None:
    asked = 0

    def limits() -> float:
        nonlocal asked
        asked += 1
        return 8.0

    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=limits)
    for number in range(1000):
        sends(shares, 0.0, item(f"{number}", f"t{number}"))
    counts_s = 1000 * EACH_S
    shares.bounds(1.0)
    asked = 0
    for step in range(9):
        now = 1.0 + step / 10 * counts_s
        shares.on_others(now, PoolLoad({f"t{step}": TenantLoad(1 + step, 0, 1.0, 0.0)}), 2)
        shares.bounds(now)
    assert not asked
    shares.on_others(1.1 + counts_s, PoolLoad({"other": TenantLoad(5, 0, 1.0, 0.0)}), 2)
    assert "other" in shares.bounds(1.1 + counts_s), "the bounds come when their time is over"
    assert asked
