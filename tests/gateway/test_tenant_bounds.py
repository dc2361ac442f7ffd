"""What one tenant may take of the gateway at a time: bytes of bodies, and bytes of what it reads."""

import asyncio
import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import tenant_budget, tenant_pace, tenant_places

MANY = 900


def test_a_tenant_that_fills_the_memory_leaves_room_for_the_others() -> None:
    budget = tenant_budget.TenantBudget(MANY)
    flood, honest = budget.hold("flood"), budget.hold("honest")
    while flood.fits:
        flood.add(1)
    assert flood.units == MANY * 2 // 3 + 1
    honest.add(MANY // 6 - 1)
    assert honest.fits
    assert not flood.fits
    flood.release()
    assert flood.fits
    assert budget.used == MANY // 6 - 1


def test_tenants_that_fill_the_memory_one_after_the_other_leave_room_for_another() -> None:
    """Seven tenants left a part in two thousand when each could have twice what was free."""
    budget = tenant_budget.TenantBudget(100_000)
    for number in range(7):
        flood = budget.hold(f"flood {number}")
        while flood.fits:
            flood.add(10)
    honest = budget.hold("honest")
    honest.add(250)
    assert honest.fits


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 50)), max_size=50))
def test_the_bytes_of_a_budget_are_those_of_its_bodies(steps: list[tuple[int, str, int]]) -> None:
    budget = tenant_budget.TenantBudget(1000)
    held = [budget.hold() for _ in range(4)]
    for index, tenant, size in steps:
        held[index].count_for(tenant)
        held[index].add(size)
        assert budget.used == sum(bodies.units for bodies in held)
    for bodies in held:
        bodies.release()
    assert (budget.used, dict(budget._of_tenant)) == (0, {})


def test_what_a_lost_connection_has_released_is_not_given_back_again() -> None:
    budget = tenant_budget.TenantBudget(1000)
    lost, other = budget.hold("a"), budget.hold("a")
    lost.add(60)
    other.add(30)
    lost.release()
    lost.add(-60)
    assert (budget.used, lost.units, other.units) == (30, 0, 30)


async def test_many_tenants_together_spend_as_much_as_a_few() -> None:
    """Twenty tenants, whose pace together is that of two, and one that comes later and spends little."""
    pace = tenant_pace.TenantPace(1000.0, tenants=2)
    loop, done = asyncio.get_running_loop(), collections.Counter[str]()

    async def spend(tenant: str) -> None:
        while True:
            await pace.spend(tenant, 10.0)
            done[tenant] += 1

    tasks = [asyncio.create_task(spend(f"flood {number}")) for number in range(20)]
    began_s = loop.time()
    await asyncio.sleep(0.5)
    took_s = loop.time() - began_s
    assert 20 < done.total() < 20 * 5 + 300 * took_s, "alone each could spend 100 times a second"
    with pytest.raises(StopIteration):  # it ends without a wait
        pace.spend("late", 10.0).send(None)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not pace._waiting


async def test_a_tenant_that_spends_much_waits_and_the_others_do_not() -> None:
    pace = tenant_pace.TenantPace(100.0, burst_s=1.0)
    order: list[str] = []

    async def spend(tenant: str, units: float) -> None:
        await pace.spend(tenant, units)
        order.append(tenant)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(spend("flood", 60.0))  # 0, 0.6, 1.2 and 1.8 s, the first second of them at once
        group.create_task(spend("honest", 60.0))
    assert order == ["flood", "flood", "honest", "flood", "flood"]


async def test_what_waited_in_vain_is_not_spent() -> None:
    pace = tenant_pace.TenantPace(1.0)
    waiting = [asyncio.create_task(pace.spend("t", 1000.0)) for _ in range(5)]
    await asyncio.sleep(0.01)
    for task in waiting[1:]:
        task.cancel()
    await asyncio.wait(waiting)
    assert pace._paid_at_s["t"] - asyncio.get_running_loop().time() < 1001.0


async def test_a_tenant_has_a_few_places_and_one_is_given_back_once() -> None:
    places = tenant_places.TenantPlaces(2)
    first, second, third = (places.of("t") for _ in range(3))
    await first.take()
    await first.take()
    await second.take()
    waits = asyncio.create_task(third.take())
    await asyncio.sleep(0)
    assert not waits.done()
    await places.of("u").take()
    first.give_back()
    first.give_back()
    await asyncio.wait_for(waits, 10)
    fourth = asyncio.create_task(first.take())
    await asyncio.sleep(0.01)
    assert not fourth.done()
    fourth.cancel()
