"""Which relQuery starts its next row: floors and shares of tenants, and the bound on the work of rows under way."""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.admit import row_window

LIMITS = row_window.RowLimits(window=256, in_flight=1024, floor=4, waiting=4)


def window(*tenants: str, busy: float | None = None) -> row_window.RowWindow:
    """One relQuery of each tenant that is named, called by its place. Each asks."""
    rows = row_window.RowWindow()
    for i, tenant in enumerate(tenants):
        rows.add(str(i), tenant)
        if busy is not None:
            rows.observe(str(i), busy)
        rows.ask(str(i))
    return rows


def started(
    rows: row_window.RowWindow,
    limits: row_window.RowLimits = LIMITS,
    *,
    waiting: int = 0,
    engines: int = 2,
    room: bool = True,
) -> list[str]:
    """Starts rows until none may start; each relQuery asks again at once."""
    found: list[str] = []
    while (name := rows.next(limits, waiting=waiting, engines=engines, room=room)) is not None:
        rows.start(name)
        rows.ask(name)
        found.append(name)
    return found


@pytest.mark.parametrize(("waiting", "room"), [(5, True), (0, False)])
def test_the_relqueries_of_a_tenant_share_one_floor(waiting: int, room: bool) -> None:
    rows = window(*["flood"] * 16, busy=0.001)
    assert len(started(rows, waiting=waiting, room=room)) == LIMITS.floor


def test_each_tenant_has_a_floor() -> None:
    rows = window("flood", "flood", "flood", "small", busy=0.001)
    assert Counter(started(rows, waiting=5))["3"] == LIMITS.floor
    assert rows.rows == 2 * LIMITS.floor


def test_rows_whose_work_fills_the_pool_are_few_and_rows_that_wait_for_tokens_are_many() -> None:
    assert len(started(window("a", busy=1.0))) == 2 * row_window.LEAST_BUSY
    assert len(started(window("a", busy=0.25))) == 2 * row_window.SHARED * (1 - 0.25) / 0.25
    assert len(started(window("a", busy=0.0001))) == LIMITS.window
    assert len(started(window("a", "a", busy=0.25))) == 2 * row_window.SHARED * (1 - 0.25) / 0.25


def test_a_row_counts_as_a_busy_engine_before_one_was_answered() -> None:
    assert len(started(window("a"), engines=8)) == row_window.LEAST_BUSY * 8


def test_one_long_row_behind_short_ones_is_noticed_at_once_and_forgotten_slowly() -> None:
    rows = window("a", busy=0.001)
    rows.observe("0", 1.0)
    assert len(started(rows)) == 2 * row_window.LEAST_BUSY
    rows = window("a", busy=1.0)
    rows.observe("0", 0.001)
    assert len(started(rows)) == 2 * row_window.LEAST_BUSY
    for _ in range(200):
        rows.observe("0", 0.001)
    assert len(started(rows)) > 200


def test_rows_of_a_removed_relquery_count_until_they_end() -> None:
    rows = window("a", "a", busy=1.0)
    begun = started(rows)
    rows.remove("0")
    assert rows.rows == len(begun)
    assert started(rows, waiting=5) == []
    for name in begun:
        rows.end(name, "a")
    assert (rows.rows, started(rows, waiting=5)) == (0, ["1"] * LIMITS.floor)


def test_rows_of_ended_relqueries_count_in_the_bound_on_all_rows() -> None:
    rows = window("a", busy=0.0001)
    limits = dataclasses.replace(LIMITS, in_flight=100)
    assert len(started(rows, limits)) == 100
    rows.remove("0")
    rows.add("1", "b")
    rows.observe("1", 0.0001)
    rows.ask("1")
    assert len(started(rows, limits)) == limits.floor


def test_rows_leave_places_free_at_each_engine() -> None:
    assert [row_window.places(limit) for limit in (1, 2, 4, 8, 288)] == [1, 1, 3, 7, 252]


@given(seed=st.integers(0, 10**6))
def test_no_tenant_gets_rows_beyond_the_floor_while_another_one_that_asks_has_fewer(seed: int) -> None:
    rng = random.Random(seed)
    names = [rng.choice("abc") for _ in range(rng.randint(1, 8))]
    rows = window(*names, busy=rng.choice([None, 0.001, 0.05, 0.6]))
    under_way: list[str] = []
    for _ in range(200):
        if under_way and rng.random() < 0.4:
            name = under_way.pop(rng.randrange(len(under_way)))
            rows.end(name, names[int(name)])
            continue
        waiting, room = rng.choice([0, 5]), rng.random() < 0.8
        before = Counter(names[int(name)] for name in under_way)
        found = rows.next(LIMITS, waiting=waiting, engines=2, room=room)
        fewest = min(before[tenant] for tenant in names)
        if found is None:
            assert fewest >= LIMITS.floor, "a tenant below its floor starts a row whatever waits"
            continue
        mine = before[names[int(found)]]
        assert mine == fewest
        assert mine < LIMITS.floor or (waiting <= LIMITS.waiting and room)
        rows.start(found)
        rows.ask(found)
        under_way.append(found)
    assert rows.rows == len(under_way)


def test_rows_of_a_relquery_that_comes_back_count_until_they_end() -> None:
    """Else a gateway that drains would give its lease back while they run."""
    rows = window("acme")
    rows.start("0")
    rows.remove("0")
    rows.add("0", "acme")
    assert rows.rows_of("0") == 1
    rows.start("0")
    rows.end("0", "acme")
    assert rows.rows_of("0") == 1
    rows.end("0", "acme")
    assert (rows.rows_of("0"), rows.rows) == (0, 0)
