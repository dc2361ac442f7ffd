"""The relQueries of the store: leases, the first result of a row, bounds, and what is left when all is over."""

import asyncio
import collections
import dataclasses
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import asyncio as redis

from tidegate_gateway import gateway_settings
from tidegate_gateway.store import relquery_store, store_contract, valkey_store

STORE = gateway_settings.Store(timeout_s=5.0, lease_s=0.3, retention_s=0.5)


@pytest.fixture
async def stores(valkey_url: str) -> AsyncIterator[list[relquery_store.RelQueryStore]]:
    """The stores of two gateways of one pool."""
    settings = dataclasses.replace(STORE, url=valkey_url, pool=secrets.token_hex(4))
    opened = [valkey_store.Valkey(settings, gateway=name) for name in ("g1", "g2")]
    yield [relquery_store.RelQueryStore(item, settings, gateway_settings.RelQueries()) for item in opened]
    for item in opened:
        await item.close()


EMPTY = relquery_store.Places(own=0, free=256, all=256)
FULL = relquery_store.Places(own=0, free=0, all=256)


async def create(
    store: relquery_store.RelQueryStore, count: int = 3, *, here: Any = EMPTY, row: bytes | None = None, **fields: Any
) -> relquery_store.RelQueryRecord:
    rows = [b'["%d"]' % i if row is None else row for i in range(count)]
    upload = relquery_store.new_id()
    await store.push(upload, rows, by="t")
    given = {"id": relquery_store.new_id(), "tenant": "t", "model": "m", "spec": b"{}", "lasts_ms": 60_000} | fields
    new = relquery_store.NewRelQuery(upload=upload, total=count, rows_bytes=sum(map(len, rows)), **given)
    return await store.create(new, here)


async def test_the_first_result_of_a_row_counts(stores: Any) -> None:
    one, two = stores
    name = (await create(one)).id
    assert (await one.finish(name, 1, b'{"a":1}', ok=True)).completed == 1
    again = await two.finish(name, 1, b'{"b":2}', ok=False)
    assert (again.completed, again.failed, again.owner) == (1, 0, "g1")
    assert (await two.results(name, 0, most=9))[1] == [b'{"a":1}']
    assert await two.finished(name, by="t") == b"\x40"
    await one.finish(name, 0, b"{}", ok=False)
    last = await one.finish(name, 2, b"{}", ok=True)
    assert (last.status, last.completed, last.failed, last.owner) == ("completed", 2, 1, "")
    assert await one.rows(name, 0, 9, by="t") == [], "rows are removed at the end"
    late = await two.finish(name, 2, b"{}", ok=True)
    assert late.completed == 2


def new_relquery(upload: str, *, total: int) -> relquery_store.NewRelQuery:
    return relquery_store.NewRelQuery(
        id=relquery_store.new_id(),
        tenant="t",
        model="m",
        spec=b"{}",
        lasts_ms=60_000,
        upload=upload,
        total=total,
        rows_bytes=5 * total,
    )


async def test_rows_that_a_broken_connection_made_its_client_push_twice_become_no_relquery(stores: Any) -> None:
    """Rows are numbered by their place, so each later one would have the result of another one."""
    one, _ = stores
    upload = relquery_store.new_id()
    await one.push(upload, [b'["a"]'], by="t")
    await one.push(upload, [b'["a"]'], by="t")
    await one.push(upload, [b'["b"]'], by="t")
    new = new_relquery(upload, total=2)
    with pytest.raises(store_contract.Rejected, match="rows_lapsed"):
        await one.create(new, EMPTY)


async def test_a_creation_that_a_broken_connection_made_its_client_send_twice_counts_once(stores: Any) -> None:
    one, two = stores
    upload = relquery_store.new_id()
    await one.push(upload, [b'["a"]'], by="t")
    new = new_relquery(upload, total=1)
    created = await one.create(new, EMPTY)
    again = await one.create(new, EMPTY)
    assert dataclasses.replace(again, now_ms=created.now_ms) == created
    assert await one.rows(new.id, 0, 9, by="t") == [b'["a"]']
    with pytest.raises(store_contract.Rejected, match="relquery_exists"):
        await create(two, id=new.id)


async def test_a_lapsed_lease_is_taken_over_once(stores: Any, until: Any) -> None:
    one, two = stores
    name = (await create(one, spec=b'{"x": 1}')).id
    assert (await two.hold([], 99)).taken == ()
    for _ in range(8):
        assert name not in (await one.hold([name], 99)).lost
        await asyncio.sleep(0.06)
    assert (await two.hold([], 99)).taken == ()
    (taken,) = await until(lambda: _taken(two))
    assert (taken.id, taken.owner) == (name, "g2")
    assert await two.spec(name, by="t") == b'{"x": 1}'
    held = await one.hold([name], 99)
    assert (held.lost, held.taken) == ({name}, ())
    await two.release([name])
    assert [item.id for item in (await one.hold([], 99)).taken] == [name], "a released lease is free at once"


async def _taken(store: relquery_store.RelQueryStore) -> Any:
    return (await store.hold([], 99)).taken


async def test_a_relquery_that_no_gateway_had_room_for_waits_without_an_owner(stores: Any) -> None:
    one, two = stores
    created = await create(one, here=FULL)
    assert created.owner == ""
    assert [item.id for item in (await two.hold([], 99)).taken] == [created.id]


@pytest.mark.parametrize(
    ("own", "free", "runs"), [(15, 256, True), (7, 128, True), (8, 128, False), (0, 1, True), (1, 1, False)]
)
async def test_a_tenant_has_the_part_of_its_places_that_is_free_of_all(
    stores: Any, own: int, free: int, runs: bool
) -> None:
    one, _ = stores
    assert (await create(one, here=relquery_store.Places(own=own, free=free, all=256))).owner == ("g1" if runs else "")


async def test_pages_are_bounded_by_bytes_and_number(stores: Any) -> None:
    one, _ = stores
    name = (await create(one, 200)).id
    for row in range(150):
        await one.finish(name, row, b'"%d"' % row, ok=True)
    _, page = await one.results(name, 0, most=70)
    assert page == [b'"%d"' % row for row in range(70)]
    large = b"%100000d" % 0
    for row in range(150, 155):
        await one.finish(name, row, large, ok=True)
    _, page = await one.results(name, 149, most=500)
    assert page == [b'"149"', large, large]
    await one.finish(name, 155, 5 * large, ok=True)
    _, page = await one.results(name, 155, most=500)
    assert page == [5 * large], "a page has at least one result"
    name = (await create(one, 7, row=large)).id
    assert [len(await one.rows(name, first, 64, by="t")) for first in (0, 2, 6, 7)] == [2, 2, 1, 0]
    assert len(await one.rows(name, 0, 1, by="t")) == 1


async def test_tenants_with_many_relqueries_do_not_take_all_places(stores: Any) -> None:
    """Twenty tenants with sixteen relQueries each, and one with one, whose id is the last; a gateway has 256 places."""
    one, _ = stores
    for number in range(320):
        await create(one, 1, here=FULL, id=f"a{number:03}", tenant=f"t{number // 16:02}")
    await create(one, 1, here=FULL, id="z", tenant="another")
    taken = (await one.hold([], 256)).taken
    assert "z" in {item.id for item in taken}
    of_one = collections.Counter(item.tenant for item in taken)
    assert len(of_one) == 21
    assert 150 < len(taken) < 256
    late = await create(one, 1, here=FULL, id="zz", tenant="late")
    held = [item.id for item in taken]
    assert late.id in {item.id for item in (await one.hold(held, 256 - len(held))).taken}


async def test_what_rows_have_in_common_is_not_in_every_answer(stores: Any, valkey_url: str) -> None:
    one, two = stores
    names = [(await create(one, spec=b"x" * 500_000)).id for _ in range(8)]
    client = redis.Redis.from_url(valkey_url)

    async def sent() -> int:
        return int((await client.info("stats"))["total_net_output_bytes"])

    before = await sent()
    await one.hold(names, 99)
    await one.release(names)
    assert len((await two.hold([], 99)).taken) == 8
    for name in names:
        await two.get(name)
        await two.finish(name, 0, b"{}", ok=True)
    assert await sent() - before < 500_000
    assert await two.spec(names[0], by="t") == b"x" * 500_000
    await client.aclose()


async def test_nothing_is_left_when_the_retention_is_over(stores: Any, valkey_url: str, until: Any) -> None:
    one, two = stores
    done, expired, cancelled = await create(one, 1), await create(one, lasts_ms=50), await create(two)
    await one.finish(done.id, 0, b"{}", ok=True)
    await two.cancel(cancelled.id)
    await until(lambda: _has_status(one, expired.id, "expired"))
    client = redis.Redis.from_url(valkey_url)
    pattern = one._valkey.key("*")
    for key in await client.keys(pattern):
        assert await client.pttl(key) > 0, key

    async def gone() -> bool:
        await one.hold([], 0)
        keys = {key.decode().removeprefix(one._valkey.key("relquery:")) for key in await client.keys(pattern)}
        return keys <= {"totals"}

    await until(gone)
    assert await client.hgetall(one._valkey.key("relquery:totals")) in ({}, {b"bytes": b"0"})
    await client.aclose()


async def test_the_record_outlives_the_totals_in_which_it_counts(stores: Any, valkey_url: str) -> None:
    one, _ = stores
    created = await create(one, lasts_ms=50)
    client = redis.Redis.from_url(valkey_url)
    record, totals = [one._valkey.key(f"relquery:{name}") for name in (f"record:{created.id}", "totals")]
    assert await client.pttl(record) > await client.pttl(totals), "no gateway may run for days"
    await client.aclose()


async def _has_status(store: relquery_store.RelQueryStore, name: str, status: str) -> bool:
    return (await store.get(name)).status == status


async def test_another_tenant_does_not_see_it(stores: Any) -> None:
    one, _ = stores
    name = (await create(one)).id
    assert (await one.get(name, by="t")).id == name
    for step in (one.get, one.cancel):
        with pytest.raises(store_contract.Rejected, match="relquery_not_found"):
            await step(name, by="other")
