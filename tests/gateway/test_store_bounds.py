"""How much do workflows take in the store? What has ended makes room before its time; what runs is never removed."""

import asyncio
import collections
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import asyncio as valkey
from workflow_requests import member

import fake_engine
from tidegate_gateway import gateway_settings, stage_declaration
from tidegate_gateway.store import store_contract, valkey_store

KIB = 1024
LARGE = tuple(stage_declaration.StageDeclaration(name=f"{'s' * 200}{i}") for i in range(40))
"""Stages of a record of about 16 KiB."""


class Pool:
    """A store, and what its server counts for the workflows."""

    def __init__(self, store: valkey_store.Valkey, server: valkey.Redis, prefix: str) -> None:
        self.store, self.server, self.prefix = store, server, prefix

    async def totals(self) -> dict[str, int]:
        return {key.decode(): int(value) for key, value in (await self.server.hgetall(f"{self.prefix}totals")).items()}

    async def counted(self) -> dict[str, int]:
        """The totals as the entries of single workflows make them."""
        sums: dict[str, int] = {}
        for entry in (await self.server.hgetall(f"{self.prefix}sizes")).values():
            record, kept, _, tenant = entry.decode().split(" ", 3)
            for name in ("bytes", f"bytes:{tenant}"):
                sums[name] = sums.get(name, 0) + int(record) + int(kept)
        return sums

    async def known(self) -> list[str]:
        records, _ = await self.store.listed(None, 1000)
        return sorted(record.id for record in records)


@contextlib.asynccontextmanager
async def pool(url: str, **options: Any) -> AsyncIterator[Pool]:
    shared = gateway_settings.Store(**({"url": url, "pool": secrets.token_hex(4), "timeout_s": 5.0} | options))
    store, server = valkey_store.Valkey(shared, gateway="g1"), valkey.Redis.from_url(url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.aclose)
        stack.push_async_callback(store.close)
        yield Pool(store, server, f"tidegate:v1:{{{shared.pool}}}:")


def flow(name: str, **fields: Any) -> store_contract.NewWorkflow:
    return store_contract.NewWorkflow(**({"id": name, "deadline_ms": 60_000, "tenant": name[0]} | fields))


async def test_the_workflows_of_a_tenant_that_ended_first_make_room_for_its_new_ones(valkey_url: str) -> None:
    async with pool(valkey_url, tenant_bytes=4 * 1400) as at:
        await at.store.create(flow("b0"))
        await at.store.complete("b0")
        for number in range(12):
            await asyncio.sleep(0.003)  # instants are whole milliseconds
            await at.store.create(flow(f"a{number}"))
            await (at.store.cancel if number % 2 else at.store.complete)(f"a{number}")
        known = await at.known()
        assert known[-1] == "b0", "the other tenant's is still there"
        assert 3 <= len(known) - 1 <= 5
        assert known[:-1] == sorted(f"a{number}" for number in range(12 - (len(known) - 1), 12))
        assert await at.totals() == await at.counted()
        left = await at.server.keys(f"{at.prefix}*:a0")
        assert left == [], "nothing of a removed workflow stays"


async def test_workflows_that_run_are_not_removed_and_new_ones_are_shed(valkey_url: str) -> None:
    async with pool(valkey_url, tenant_bytes=3 * 1400) as at:
        running: list[str] = []
        refused = ""
        while not refused:
            name = f"a{len(running)}"
            try:
                await at.store.join(name, "one", "call", deadline_ms=60_000, tenant="a")
            except store_contract.Rejected as error:
                refused = error.code
            else:
                running.append(name)
        assert refused == "tenant-limit"
        assert 2 <= len(running) <= 5
        with pytest.raises(store_contract.Rejected, match="tenant-limit"):
            await at.store.create(flow("a9"))
        with pytest.raises(store_contract.Rejected, match="tenant-limit"):
            await at.store.join("a0", "two", "another", deadline_ms=None, tenant="a")  # the record would grow
        assert (await at.store.join("a0", "one", "more", deadline_ms=None, tenant="a")).stages[0].running == 2
        await at.store.create(flow("b0"))
        await at.store.complete("a1")
        await at.store.create(flow("a9"))
        assert await at.known() == sorted([*(name for name in running if name != "a1"), "a9", "b0"])


async def test_all_tenants_together_are_bounded(valkey_url: str) -> None:
    async with pool(valkey_url, total_bytes=4 * 1400) as at:
        await at.store.create(flow("a0"))
        await at.store.complete("a0")
        names = [f"{tenant}1" for tenant in "bcdefgh"]
        refused = []
        for name in names:
            try:
                await at.store.create(flow(name))
            except store_contract.Rejected as error:
                refused.append((name, error.code))
        known = await at.known()
        assert "a0" not in known, "what had ended made room"
        assert 3 <= len(known) <= 5
        assert (known, refused) == (names[: len(known)], [(name, "saturated") for name in names[len(known) :]])


@pytest.mark.parametrize("in_turn", [True, False], ids=["one after the other", "together"])
async def test_tenants_that_take_all_they_can_leave_room_for_another(valkey_url: str, *, in_turn: bool) -> None:
    """Twenty tenants, whose own bounds together are more than the store has."""
    async with pool(valkey_url, tenant_bytes=128 * KIB, total_bytes=1024 * KIB) as at:
        refused: collections.Counter[str] = collections.Counter()
        tries = [(tenant, number) for number in range(100) for tenant in "bcdefghijklmnopqrstu"]
        for tenant, number in sorted(tries) if in_turn else tries:
            try:
                await at.store.create(flow(f"{tenant}{number}"))
            except store_contract.Rejected as error:
                refused[error.code] += 1
        assert refused["saturated"] > 500
        before = await at.totals()
        assert 0.65 * 1024 * KIB < before["bytes"] < 0.95 * 1024 * KIB
        for number in range(4):
            await at.store.create(flow(f"a{number}"))


async def test_a_full_store_makes_room_of_the_ended_workflows_of_its_own_tenant_first(valkey_url: str) -> None:
    async with pool(valkey_url, total_bytes=40 * KIB) as at:
        await at.store.create(flow("b0"))
        await at.store.complete("b0")
        for number in range(60):
            await at.store.create(flow(f"a{number}"))
            await at.store.complete(f"a{number}")
        assert "b0" in await at.known()
        assert (await at.totals())["bytes:a"] <= 22 * KIB


async def test_one_large_workflow_has_room_where_many_small_ones_have_ended(valkey_url: str) -> None:
    async with pool(valkey_url, tenant_bytes=150 * KIB) as at:
        for number in range(200):
            await at.store.create(flow(f"a{number}"))
            await at.store.complete(f"a{number}")
        for number in range(30):
            await at.store.create(flow(f"large{number}", stages=LARGE))
            await at.store.complete(f"large{number}")


async def test_a_tenant_that_creates_without_end_takes_no_more_memory_than_its_bound(valkey_url: str) -> None:
    """Records of about 16 KiB, each with the answers to two keys: 600 of them would be about 30 MB."""
    async with pool(valkey_url, tenant_bytes=2048 * KIB) as at:
        used = []
        for number in range(600):
            once = store_contract.Idempotency(key=f"k{number}", scope="create a")
            await at.store.create(flow(f"a{number}", stages=LARGE), once=once)
            await at.store.complete(f"a{number}", once=store_contract.Idempotency(key=f"k{number}", scope="complete a"))
            if number % 200 == 199:
                used.append(await _memory(at))
        print(f"bytes in the store after 200, 400 and 600 workflows: {used}; the bound is {2048 * KIB}")
        assert max(used) < 1.25 * 2048 * KIB
        assert await at.totals() == await at.counted()


async def test_small_workflows_are_counted_for_what_they_take(valkey_url: str) -> None:
    async with pool(valkey_url) as at:
        for number in range(500):
            name = f"a{number:030}"
            await at.store.join(name, "plan", "call", deadline_ms=60_000, tenant="a", key=f"key {number:030}")
            await at.store.finish(name, "call", ok=True)
            await at.store.complete(name)
        used, counted = await _memory(at), (await at.totals())["bytes"]
        print(f"500 small workflows take {used} bytes and count as {counted}")
        assert 0.8 * used < counted < 2.5 * used


async def test_the_answer_to_a_key_is_not_kept_when_there_is_no_room(valkey_url: str) -> None:
    async with pool(valkey_url, tenant_bytes=40 * KIB) as at:
        await at.store.create(flow("a0", stages=LARGE))
        await at.store.create(flow("a1", stages=LARGE))
        await at.store.create(flow("a2", stages=LARGE))
        once = store_contract.Idempotency(key="k", scope="stage")
        first = await at.store.complete_stage("a0", LARGE[0].name, once=once)
        again = await at.store.complete_stage("a0", LARGE[0].name, once=once)
        assert again.stages == first.stages, "the request counted once, and the record is the answer"
        with pytest.raises(store_contract.Rejected, match="idempotency_key_reused"):
            await at.store.complete_stage(
                "a0", LARGE[0].name, once=store_contract.Idempotency(key="k", scope="stage", print="another body")
            )
        assert await _memory(at) < 80 * KIB


async def test_workflows_that_lapsed_count_no_more(valkey_url: str) -> None:
    async with pool(valkey_url, retention_s=0.02) as at:
        for number in range(5):
            await at.store.create(flow(f"a{number}"))
            await at.store.complete(f"a{number}")
        await lapsed(at)
        await at.store.create(flow("b0"))
        await at.store.complete("b0")
        totals = await at.totals()
        assert "bytes:a" not in totals
        assert totals == await at.counted()


async def test_an_id_that_is_used_again_is_not_taken_for_the_workflow_that_had_it(valkey_url: str) -> None:
    async with pool(valkey_url, retention_s=0.05, tenant_bytes=4000) as at:
        await at.store.create(flow("a0"))
        await at.store.complete("a0")
        await lapsed(at)
        await at.store.create(flow("a0"))
        with contextlib.suppress(store_contract.Rejected):
            for number in range(1, 20):
                await at.store.create(flow(f"a{number}"))
        await at.store.create(flow("b0"))
        await at.store.complete("b0")
        assert (await at.store.get("a0")).state == "running"
        assert await at.totals() == await at.counted()


async def test_entries_whose_records_have_lapsed_do_not_stand_before_workflows_that_can_leave(valkey_url: str) -> None:
    async with pool(valkey_url, retention_s=0.05, tenant_bytes=5000) as at:
        await at.store.create(flow("a0"))
        await at.store.cancel("a0")
        await lapsed(at)
        await at.store.create(flow("b0"))
        await at.store.cancel("b0")
        await at.server.zadd(
            f"{at.prefix}done:a", {f"old{number}": number for number in range(50)}
        )  # of an earlier version
        for number in range(1, 30):
            try:
                await at.store.create(flow(f"a{number}"))
            except store_contract.Rejected:
                await at.store.create(flow(f"a{number}"))  # a request removes twenty at most
            await at.store.complete(f"a{number}")


async def test_a_request_that_ends_a_workflow_does_not_remove_it(valkey_url: str) -> None:
    async with pool(valkey_url, tenant_bytes=3000) as at:
        with contextlib.suppress(store_contract.Rejected):
            for number in range(20):
                await at.store.create(flow(f"a{number}"))
        once = store_contract.Idempotency(key="k", scope="complete a0")
        assert (await at.store.complete("a0", once=once)).state == "done"
        assert (await at.store.complete("a0", once=once)).state == "done"
        assert (await at.store.get("a0")).state == "done"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "join", "finish", "stage", "complete", "cancel"]),
        st.sampled_from("ab"),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_after_any_operations_the_sums_are_those_of_the_workflows(valkey_url: str, steps: Any) -> None:
    asyncio.run(_sums_hold(valkey_url, steps))


async def _sums_hold(valkey_url: str, steps: Any) -> None:
    async with pool(valkey_url, tenant_bytes=6 * KIB, total_bytes=10 * KIB) as at:
        for i, (operation, tenant, number) in enumerate(steps):
            name = f"{tenant}{number}"
            once = store_contract.Idempotency(key=f"k{i % 7}", scope=f"{operation} {name}")
            with contextlib.suppress(store_contract.Rejected):
                match operation:
                    case "create":
                        await at.store.create(flow(name), once=once)
                    case "join":
                        await at.store.join(
                            name, f"s{i % 3}", f"c{i % 5}", deadline_ms=60_000, tenant=tenant, key=f"k{i % 2}"
                        )
                    case "finish":
                        await at.store.finish(name, f"c{i % 5}", ok=bool(i % 4))
                    case "stage":
                        await at.store.complete_stage(name, f"s{i % 3}", by=tenant, once=once)
                    case "complete":
                        await at.store.complete(name, by=tenant, once=once)
                    case _:
                        await at.store.cancel(name, by=tenant)
            totals, counted = await at.totals(), await at.counted()
            assert {key: value for key, value in totals.items() if value} == counted
            records = {key.decode().rsplit(":", 1)[1] for key in await at.server.keys(f"{at.prefix}workflow:*")}
            assert records == {key.decode() for key in await at.server.hkeys(f"{at.prefix}sizes")}


async def test_a_call_of_a_workflow_beyond_the_bound_is_shed_with_its_reason(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store_options={"tenantBytes": 2048}) as client:
        statuses = []
        for number in range(5):
            mine = member(f"w{number}", "s", **{"x-tidegate-tenant": "t", "x-tidegate-deadline-ms": "60000"})
            status, answer, headers = await client.ask(headers=mine)
            statuses.append(status)
        assert statuses[0] == 200
        assert (statuses[-1], headers["x-tidegate-reason"]) == (429, "tenant-limit")
        assert "too many bytes in the store" in answer["error"]["message"]
        assert client.gateway.workflows.unrecorded == 0, "the call did not enter its workflow"
        status, _, _ = await client.send("POST", "/v1/workflows/w0/complete", headers={"x-tidegate-tenant": "t"})
        assert status == 200


async def lapsed(at: Pool) -> None:
    """Returns when no record is left."""
    async with asyncio.timeout(30):
        while await at.server.keys(f"{at.prefix}workflow:*"):
            await asyncio.sleep(0.005)


async def _memory(at: Pool) -> int:
    """Bytes that the pool's keys take in the server."""
    names = await at.server.keys(f"{at.prefix}*")
    return sum([await at.server.memory_usage(name, samples=0) for name in names])
