"""What every store must hold to; run over real servers. Sequences of operations are random, the rules are not."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import asyncio as valkey

from tidegate_gateway import gateway_settings, stage_declaration
from tidegate_gateway.store import store_contract, valkey_store
from tidegate_policy.model import Backlog, EngineId

STAGES = (
    stage_declaration.StageDeclaration(name="a", parallel=2),
    stage_declaration.StageDeclaration(name="b", after=("a",)),
    stage_declaration.StageDeclaration(name="c", after=("b",)),
)
ENGINE = EngineId("e1")


def store_settings(url: str, **options: Any) -> gateway_settings.Store:
    return gateway_settings.Store(**({"url": url, "pool": secrets.token_hex(4), "timeout_s": 5.0} | options))


@pytest.fixture
async def two(valkey_url: str) -> AsyncIterator[tuple[store_contract.Store, store_contract.Store]]:
    """The store as two gateways of one pool see it."""
    shared = store_settings(valkey_url, lease_s=0.5)
    both = valkey_store.Valkey(shared, gateway="g1"), valkey_store.Valkey(shared, gateway="g2")
    yield both
    for one in both:
        await one.close()


def flow(**fields: Any) -> store_contract.NewWorkflow:
    return store_contract.NewWorkflow(**({"id": "w", "deadline_ms": 60_000, "stages": STAGES} | fields))


async def test_both_gateways_see_one_workflow(two: tuple[store_contract.Store, store_contract.Store]) -> None:
    one, other = two
    created = await one.create(flow())
    assert (created.state, created.deadline_ms - created.created_ms) == ("running", 60_000)
    await one.join("w", "a", "c1", deadline_ms=None, tenant="")
    seen = await other.join("w", "a", "c2", deadline_ms=None, tenant="")
    assert seen.stages[0].running == 2
    await other.finish("w", "c1", ok=True)
    ended = await one.finish("w", "c2", ok=True)
    assert (ended.stages[0].over, ended.stages[0].done, ended.state) == (True, 2, "running")


async def test_an_end_that_is_reported_twice_counts_once(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(flow())
    await one.join("w", "a", "c1", deadline_ms=None, tenant="")
    for gateway in (one, other, one):
        assert (await gateway.finish("w", "c1", ok=True)).stages[0].done == 1


async def test_two_joins_at_once_create_one_workflow_with_one_deadline(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    joins = [
        gateway.join("w", "a", f"c{i}", deadline_ms=10_000 + i, tenant="")
        for i, gateway in enumerate((one, other, one, other))
    ]
    records = await asyncio.gather(*joins)
    assert len({record.deadline_ms for record in records}) == 1
    assert (await one.get("w")).stages[0].running == 4


async def test_backlogs_are_shared_and_lapse_with_the_lease(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    owed = Backlog(calls=2, work_us=123_456_789, output_tokens=77)
    await one.exchange({ENGINE: owed})
    assert (await other.exchange({})).others == {ENGINE: owed}
    assert (await one.exchange({ENGINE: owed})).others == {}
    async with asyncio.timeout(10):
        while (await other.exchange({})).others:
            await asyncio.sleep(0.02)
        while (await other.exchange({})).dead != ("g1",):
            await asyncio.sleep(0.02)


async def test_leaving_takes_backlogs_away_at_once(two: tuple[store_contract.Store, store_contract.Store]) -> None:
    one, other = two
    await one.exchange({ENGINE: Backlog(calls=1, work_us=1, output_tokens=1)})
    await one.leave()
    assert (await other.exchange({})).others == {}


async def test_a_dead_gateways_calls_are_forgotten_and_its_stage_can_end(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="only"),)))
    await one.join("w", "only", "lost", deadline_ms=None, tenant="")
    await other.join("w", "only", "retry", deadline_ms=None, tenant="")
    assert (await other.finish("w", "retry", ok=True)).state == "running", "the lost call may still come"
    assert await other.forget("g1", 100)
    assert (await other.get("w")).state == "done"


async def test_a_good_end_of_a_forgotten_call_still_counts_once(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="wide", parallel=3),)))
    for call in ("well", "badly"):
        await one.join("w", "wide", call, deadline_ms=None, tenant="")
    await other.forget("g1", 100)
    assert (await other.get("w")).stages[0].running == 0
    for gateway in (one, other):
        await gateway.finish("w", "badly", ok=False)
        ended = await gateway.finish("w", "well", ok=True)
        assert (ended.state, ended.stages[0].running, ended.stages[0].done) == ("running", 0, 1)


async def test_the_last_stage_of_a_workflow_ends_by_a_forgotten_call(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="only"),)))
    await one.join("w", "only", "c", deadline_ms=None, tenant="")
    await other.forget("g1", 100)
    assert (await one.finish("w", "c", ok=True)).state == "done"


async def test_a_join_that_is_sent_again_after_its_call_was_forgotten_counts_once(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="wide", parallel=3),)))
    await one.join("w", "wide", "c", deadline_ms=None, tenant="")
    await other.forget("g1", 100)
    await one.join("w", "wide", "c", deadline_ms=None, tenant="")
    for _ in range(2):
        stage = (await one.finish("w", "c", ok=True)).stages[0]
        assert (stage.running, stage.done) == (0, 1)


@pytest.mark.parametrize("forgotten", [True, False])
@pytest.mark.parametrize("order", [("first", "again"), ("again", "first")])
async def test_a_call_and_its_retry_through_another_gateway_count_once(
    two: tuple[store_contract.Store, store_contract.Store], order: tuple[str, str], forgotten: bool
) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="wide", parallel=2),)))
    await one.join("w", "wide", "first", deadline_ms=None, tenant="", key="k")
    if forgotten:
        await other.forget("g1", 100)
    await other.join("w", "wide", "again", deadline_ms=None, tenant="", key="k")
    for call in (*order, *order):
        ended = await one.finish("w", call, ok=True)
    assert (ended.state, ended.stages[0].running, ended.stages[0].done) == ("running", 0, 1)


async def test_after_a_silence_no_gateway_is_dead_for_another_lease(valkey_url: str) -> None:
    shared = store_settings(valkey_url, lease_s=0.5)
    one, other = valkey_store.Valkey(shared, gateway="g1"), valkey_store.Valkey(shared, gateway="g2")
    server, leases = valkey.Redis.from_url(valkey_url), f"tidegate:v1:{{{shared.pool}}}:leases"
    for gateway in (one, other):
        await gateway.exchange({})
    async with asyncio.timeout(10):
        ends_ms = max(instant_ms for _, instant_ms in await server.zrange(leases, 0, -1, withscores=True))
        while (await server.time())[0] * 1000 <= ends_ms:
            await asyncio.sleep(0.02)
        began_s = time.monotonic()
        while not (found := await other.exchange({})).dead:
            await asyncio.sleep(0.02)
    assert found.dead == ("g1",)
    assert time.monotonic() - began_s >= shared.lease_s
    for each in (one, other):
        await each.close()
    await server.aclose()


async def test_a_gateway_that_leaves_is_gone_unless_it_leaves_calls_behind(valkey_url: str) -> None:
    shared = store_settings(valkey_url, lease_s=0.5)
    one, other = valkey_store.Valkey(shared, gateway="g1"), valkey_store.Valkey(shared, gateway="g2")
    server, leases = valkey.Redis.from_url(valkey_url), f"tidegate:v1:{{{shared.pool}}}:leases"
    await one.exchange({})
    await one.leave()
    assert await server.zscore(leases, "g1") is None
    await one.exchange({})
    await one.join("w", "a", "c", deadline_ms=60_000, tenant="")
    await one.leave()
    async with asyncio.timeout(10):
        while (await other.exchange({})).dead != ("g1",):
            await asyncio.sleep(0.02)
    for each in (one, other):
        await each.close()
    await server.aclose()


async def test_very_many_calls_of_one_workflow_are_forgotten_in_steps(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.create(store_contract.NewWorkflow(id="w", deadline_ms=60_000, stages=()))
    await asyncio.gather(*(one.join("w", "a", f"c{i}", deadline_ms=None, tenant="") for i in range(1200)))
    steps = []
    while not await other.forget("g1", 100):
        (stage,) = (await other.get("w")).stages
        steps.append(stage.running)
    assert steps == [700, 200]
    assert (await other.get("w")).stages[0].running == 0
    await one.finish("w", "c7", ok=True)
    assert (await other.get("w")).stages[0].done == 1, "it was forgotten, and its end counts"


async def test_forgetting_goes_in_batches(two: tuple[store_contract.Store, store_contract.Store]) -> None:
    one, other = two
    for i in range(7):
        await one.join(f"w{i}", "a", f"c{i}", deadline_ms=60_000, tenant="")
    rounds = 1
    while not await other.forget("g1", 3):
        rounds += 1
    assert rounds == 3
    assert [record.stages[0].running for record in (await other.listed(None, 100))[0]] == [0] * 7


async def test_an_idempotency_key_repeats_the_answer_and_rejects_another_body(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    once = store_contract.Idempotency(key="k", scope="create", print="body")
    first = await one.create(flow(id="w1"), once=once)
    assert await other.create(flow(id="w2"), once=once) == first
    with pytest.raises(store_contract.Rejected, match="idempotency_key_reused"):
        await one.create(flow(id="w3"), once=store_contract.Idempotency(key="k", scope="create", print="another"))
    assert len((await one.listed(None, 10))[0]) == 1


async def test_a_workflow_is_bounded(two: tuple[store_contract.Store, store_contract.Store]) -> None:
    one, _ = two
    await one.create(flow())
    for i in range(stage_declaration.MOST_STAGES - len(STAGES)):
        await one.join("w", f"s{i}", "same", deadline_ms=None, tenant="")
    with pytest.raises(store_contract.Rejected, match="too_many_stages"):
        await one.join("w", "one more", "other", deadline_ms=None, tenant="")


async def test_a_thousand_calls_at_once_are_one_stage(two: tuple[store_contract.Store, store_contract.Store]) -> None:
    one, other = two
    await one.create(flow(stages=(stage_declaration.StageDeclaration(name="wide", parallel=1000),)))
    names = [f"c{i}" for i in range(1000)]
    await asyncio.gather(*(one.join("w", "wide", name, deadline_ms=None, tenant="") for name in names))
    assert (await other.get("w")).stages[0].running == 1000
    await asyncio.gather(*(other.finish("w", name, ok=True) for name in names))
    ended = await one.get("w")
    assert (ended.state, ended.stages[0].running, ended.stages[0].done) == ("done", 0, 1000)


async def test_policies_are_shared_ranked_by_kind_and_lapse(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await one.choose_policy(
        "steered", "edf", "misses", None, alternatives=("urgency", "sjf"), expected="fewer targets are missed"
    )
    await one.choose_policy("override", "fcfs", "by hand", 0.2)
    found = await other.exchange({})
    assert found.steered == store_contract.Chosen(
        policy="edf",
        reason="misses",
        left_s=None,
        alternatives=("urgency", "sjf"),
        expected="fewer targets are missed",
    )
    assert found.override is not None
    assert found.override.policy == "fcfs"
    async with asyncio.timeout(10):
        while (await other.exchange({})).override is not None:
            await asyncio.sleep(0.02)
    await other.choose_policy("steered", None, "", None)
    assert (await one.exchange({})).steered is None


async def test_cancelled_workflows_are_announced_once_around(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    await other.exchange({})
    await one.create(flow())
    await one.cancel("w")
    assert "w" in (await other.exchange({})).cancelled


async def test_more_cancelled_workflows_than_fit_are_announced_in_turn(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    names = [f"w{i}" for i in range(valkey_store.MOST_CANCELLED + 100)]
    await asyncio.gather(*(one.create(flow(id=name)) for name in names))
    await asyncio.gather(*(one.cancel(name) for name in names))
    reported = [set((await other.exchange({})).cancelled) for _ in range(2)]
    assert len(reported[0]) == valkey_store.MOST_CANCELLED
    assert reported[0] | reported[1] == set(names)


async def test_every_end_is_reported_once_by_whichever_operation(valkey_url: str) -> None:
    shared = store_settings(valkey_url)
    one, late = (
        valkey_store.Valkey(shared, gateway="g1"),
        valkey_store.Valkey(dataclasses.replace(shared, grace_s=0.0), gateway="g2"),
    )
    found: list[Callable[[], Awaitable[object]]] = [
        lambda: late.finish("w0", "c", ok=True),
        lambda: late.forget("g1", 100),
        lambda: late.join("w2", "b", "c", deadline_ms=None, tenant=""),
        lambda: late.complete_stage("w3", "a"),
        lambda: late.complete("w4"),
        lambda: late.cancel("w5"),
        lambda: late.get("w6"),
        lambda: late.listed(None, 100),
        lambda: late.expire(100),
    ]
    async with contextlib.AsyncExitStack() as stack:
        for each in (one, late):
            stack.push_async_callback(each.close)
        for i, find in enumerate(found):
            await late.create(flow(id=f"w{i}", deadline_ms=1))
            if i < 2:
                await one.join(f"w{i}", "a", "c", deadline_ms=None, tenant="")
            await asyncio.sleep(0.01)
            for _ in range(2):
                with contextlib.suppress(store_contract.Rejected):
                    await find()
            assert await one.ends(10) == [store_contract.End(template="", outcome="expired")], i
        once = store_contract.Idempotency(key="k", scope="complete")
        await one.create(flow(id="done"))
        assert await one.complete("done", once=once) == await one.complete("done", once=once)
        assert await late.ends(10) == [store_contract.End(template="", outcome="met")]
        assert await one.ends(10) == []


@contextlib.asynccontextmanager
async def lossy(url: str) -> AsyncIterator[tuple[str, list[bool]]]:
    """A way to the server that loses the next answer, and its connection, for each True in the list."""
    port, lose = int(url.rpartition(":")[2].partition("/")[0]), list[bool]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer), contextlib.closing(far_writer):
            while asked := await reader.read(1 << 20):
                far_writer.write(asked)
                answer = await far_reader.read(1 << 20)
                if lose and b"EVALSHA" in asked:
                    lose.pop()
                    return
                writer.write(answer)

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", lose


async def test_a_command_whose_answer_is_lost_counts_once(valkey_url: str) -> None:
    async with lossy(valkey_url) as (url, lose):
        one = valkey_store.Valkey(store_settings(url), gateway="g1")
        await one.create(flow(id="first"))
        await one.spend("t", 1, 60_000)
        lose.append(True)
        assert (await one.create(flow(id="second"))).id == "second"
        lose.append(True)
        assert await one.spend("u", 300, 600) == 0.0
        assert await one.spend("u", 300, 600) == 0.0, "the first was booked once"
        assert await one.spend("u", 300, 600) > 0
        assert lose == []
        await one.close()


async def test_tokens_a_minute_leak_and_large_calls_get_in(
    two: tuple[store_contract.Store, store_contract.Store],
) -> None:
    one, other = two
    assert await one.spend("t", 10_000, 600) == 0.0, "an empty bucket takes any call"
    assert await other.spend("t", 1, 600) > 0
    assert await one.spend("u", 300, 600) == 0.0
    assert await other.spend("u", 300, 600) == 0.0
    assert 0 < await one.spend("u", 300, 600) <= 60


async def test_a_server_that_is_not_there_is_unavailable_quickly() -> None:
    absent = valkey_store.Valkey(store_settings("redis://127.0.0.1:1/0", timeout_s=0.5), gateway="g1")
    async with asyncio.timeout(5):
        with pytest.raises(store_contract.Unavailable):
            await absent.get("w")
    await absent.close()


async def test_everything_has_a_time_to_live(valkey_url: str) -> None:
    shared = store_settings(valkey_url)
    one, server = valkey_store.Valkey(shared, gateway="g1"), valkey.Redis.from_url(valkey_url)
    await one.create(flow(tenant="t"), once=store_contract.Idempotency(key="k", scope="s"))
    await one.create(flow(id="w2"))
    for workflow in ("w", "w2"):
        await one.join(workflow, "a", f"c-{workflow}", deadline_ms=None, tenant="", key="k")
    await one.forget("g1", 100)
    await one.join("w2", "a", "another", deadline_ms=None, tenant="")
    await one.choose_policy("steered", "edf", "misses", None)
    await one.exchange({ENGINE: Backlog(calls=1, work_us=1, output_tokens=1)})
    await one.complete("w")
    await one.spend("t", 1, 10)
    names = [key.decode() for key in await server.keys(f"*{shared.pool}*")]
    permanent = [name for name in names if await server.ttl(name) < 0]
    assert len(names) > 15
    assert permanent == []
    await one.close()
    await server.aclose()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["join", "finish", "fail", "complete_stage", "complete", "cancel", "forget"]),
        st.integers(0, 1),
        st.sampled_from(["a", "b", "c", "extra"]),
        st.integers(0, 5),
    ),
    max_size=25,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_under_any_sequence_a_workflow_ends_at_most_once_and_counts_only_grow(valkey_url: str, operations: Any) -> None:
    asyncio.run(_walk(valkey_url, operations))


async def _walk(url: str, operations: list[tuple[str, int, str, int]]) -> None:
    shared = store_settings(url)
    gateways = [valkey_store.Valkey(shared, gateway=f"g{i}") for i in range(2)]
    before = await gateways[0].create(flow())
    for operation, which, stage, call in operations:
        gateway = gateways[which]
        try:
            match operation:
                case "join":
                    await gateway.join("w", stage, f"c{call}", deadline_ms=None, tenant="")
                case "finish" | "fail":
                    await gateway.finish("w", f"c{call}", ok=operation == "finish")
                case "complete_stage":
                    await gateway.complete_stage("w", stage)
                case "complete" | "cancel":
                    await getattr(gateway, operation)("w")
                case _:
                    await gateway.forget(f"g{1 - which}", 100)
        except store_contract.Rejected:
            pass
        after = await gateway.get("w")
        _check(before, after)
        before = after
    for gateway in gateways:
        await gateway.close()


def _check(before: store_contract.Record, after: store_contract.Record) -> None:
    assert after.deadline_ms == before.deadline_ms
    old = {stage.name: stage for stage in before.stages}
    new = {stage.name: stage for stage in after.stages}
    assert set(old) <= set(new)
    for name, stage in old.items():
        assert new[name].done >= stage.done
        assert new[name].over >= stage.over
    if before.state != "running":
        assert after.state == before.state, "a terminal state is written once"
        assert after.stages == before.stages
    elif after.state == "done":
        assert all(stage.over for stage in after.stages)
    if after.state == "running":
        assert not all(stage.over for stage in after.stages)


async def test_a_store_that_does_not_answer_is_named_without_its_password() -> None:
    settings = gateway_settings.Store(url="redis://user:secret@127.0.0.1:1/0?password=secret", timeout_s=1.0)
    store = valkey_store.Valkey(settings, gateway="g")
    with pytest.raises(store_contract.Unavailable) as raised:
        await store.ping()
    await store.close()
    assert str(raised.value) == "the store at redis://127.0.0.1:1/0 does not answer (ConnectionError)"
