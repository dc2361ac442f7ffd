"""Ends of calls that the store could not take: they wait, the ones that clients were told of longest."""

import asyncio
import contextlib
import pathlib
import secrets
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tidegate_gateway import gateway_settings
from tidegate_gateway.observe import background_loop, prometheus_metrics
from tidegate_gateway.openai import completions, error_table, http_headers, parsed_request
from tidegate_gateway.store import store_contract, store_link, valkey_store
from tidegate_gateway.workflows import call_ends, workflow_service


@dataclass(slots=True)
class Notebook:
    """As much of a store as the outbox needs."""

    ends: list[tuple[str, bool]] = field(default_factory=list)
    turns: set[str | None] = field(default_factory=set)
    """The tenants whose turns the ends took; None = they waited for none."""
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def finish(
        self, workflow: str, call: str, *, ok: bool, share_ms: int | None = None, tenant: str | None = None
    ) -> store_contract.Record:
        await self.answers.wait()
        self.ends.append((call, ok))
        self.turns.add(tenant)
        return store_contract.Record(
            id=workflow, state="running", template="", tenant="", created_ms=0, deadline_ms=1, now_ms=0, stages=()
        )


def over(store: Any) -> tuple[workflow_service.Workflows, store_link.StoreLink]:
    link = store_link.StoreLink(cast("store_contract.Store", store))
    return workflow_service.Workflows(link, prometheus_metrics.Metrics()), link


def member(call: str) -> workflow_service.Membership:
    record = store_contract.Record(
        id="w", state="running", template="", tenant="", created_ms=0, deadline_ms=1000, now_ms=0, stages=()
    )
    return workflow_service.Membership(stage="a", call=call, record=record)


async def test_ends_that_waited_take_no_turn_of_their_tenant() -> None:
    """Else those of a tenant with many commands would keep the ends of all others waiting: a few are recorded at a time."""
    notebook = Notebook()
    notebook.answers.set()
    flows, link = over(notebook)
    link.up = True
    flows.cut(member("c0"))
    await flows.flush()
    assert (notebook.ends, notebook.turns) == ([("c0", False)], {None})


async def test_a_call_that_never_reached_the_store_needs_no_end() -> None:
    settings = gateway_settings.Store(url="redis://127.0.0.1:1/0", pool=secrets.token_hex(4))
    absent = valkey_store.Valkey(settings, gateway="g1")
    flows, _ = over(absent)
    headers = {"x-tidegate-workflow": "w", "x-tidegate-stage": "a", "x-tidegate-deadline-ms": "60000"}
    body = {"model": "fake", "prompt": "x"}
    request = parsed_request.from_body(completions.ENDPOINT, body, http_headers.read(headers))
    for number in range(20):
        with pytest.raises(error_table.Shed):
            await flows.join(request, f"c{number}")
    assert flows.unrecorded == 1, "only the first was asked for"
    await absent.close()


@pytest.mark.parametrize(("trouble", "ends"), [(store_contract.Unavailable, 1), (store_contract.NotSent, 0)])
async def test_a_call_whose_command_was_not_sent_needs_no_end(
    trouble: type[store_contract.Unavailable], ends: int
) -> None:
    class Hanging(Notebook):
        async def join(self, *_: object, **__: object) -> store_contract.Record:
            raise trouble("the store does not answer")

    flows, _ = over(Hanging())
    headers = {"x-tidegate-workflow": "w", "x-tidegate-stage": "a", "x-tidegate-deadline-ms": "60000"}
    request = parsed_request.from_body(
        completions.ENDPOINT, {"model": "fake", "prompt": "x"}, http_headers.read(headers)
    )
    with pytest.raises(error_table.Shed):
        await flows.join(request, "c")
    assert flows.unrecorded == ends


async def test_when_too_many_ends_wait_those_that_no_client_has_seen_are_dropped_first() -> None:
    store = Notebook()
    flows, link = over(store)
    link.up = False
    for number in range(call_ends.MOST):
        flows.cut(member(f"cut{number}"))
    for number in range(5):
        await flows.ended(member(f"told{number}"), ok=True, share_s=None)
    assert flows.unrecorded == call_ends.MOST
    link.up = True
    store.answers.set()
    await flows.flush()
    assert [call for call, ok in store.ends if ok] == [f"told{number}" for number in range(5)]
    assert len(store.ends) == call_ends.MOST
    assert flows.unrecorded == 0


async def test_an_end_is_kept_until_the_store_has_said_that_it_has_it() -> None:
    store = Notebook()
    flows, _ = over(store)
    flows.cut(member("c"))
    flushing = asyncio.create_task(flows.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await flushing
    store.answers.set()
    await flows.flush()
    assert store.ends == [("c", False)]


async def test_an_end_whose_client_went_away_is_still_recorded_as_it_was() -> None:
    store = Notebook()
    flows, _ = over(store)
    ending = asyncio.create_task(flows.ended(member("served"), ok=True, share_s=None))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    assert (flows.unrecorded, store.ends) == (1, [])
    store.answers.set()
    await flows.flush()
    assert store.ends == [("served", True)]


async def test_overdue_workflows_end_while_the_ends_of_calls_take_long(until: Any) -> None:
    class Busy:
        def __init__(self) -> None:
            self.expired = 0
            self.answers = asyncio.Event()

        async def finish(self, *subject: str, **options: object) -> store_contract.Record:
            await self.answers.wait()
            return member("c").record

        async def expire(self, limit: int) -> bool:
            self.expired += 1
            return self.expired != 1

        async def ends(self, limit: int) -> list[store_contract.End]:
            rounds.append(self.expired)
            return []

    rounds = list[int]()
    store, metrics = Busy(), prometheus_metrics.Metrics()
    flows, _ = over(store)
    flows.cut(member("c"))
    running = asyncio.create_task(flows.run(background_loop.BackgroundLoops(metrics)))
    await until(lambda: store.expired > 1, 10.0)
    await until(lambda: rounds)
    assert rounds[0] == 2, "a full batch is followed by another one in the same round"
    assert flows.unrecorded == 1
    store.answers.set()
    await until(lambda: flows.unrecorded == 0)
    running.cancel()


async def test_a_connection_that_breaks_in_a_write_is_a_store_that_does_not_answer() -> None:
    async def write() -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    store = valkey_store.Valkey(gateway_settings.Store(url="redis://127.0.0.1:1/0", pool="p"), gateway="g1")
    with pytest.raises(store_contract.Unavailable, match="does not answer"):
        await store.guard(write())
    await store.close()


async def test_a_store_in_cluster_mode_has_its_own_error() -> None:
    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while await reader.read(65536):
                writer.write(b"-MOVED 1 127.0.0.1:1\r\n")

    async with await asyncio.start_server(moved, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = valkey_store.Valkey(gateway_settings.Store(url=f"redis://127.0.0.1:{port}/0", pool="p"), gateway="g1")
        with pytest.raises(store_contract.Unavailable, match="cluster mode, which is not supported"):
            await store.get("w")
        await store.close()


@pytest.mark.parametrize(("store", "journal", "warned"), [(True, False, 1), (True, True, 0), (False, False, 0)])
async def test_a_gateway_that_would_forget_ends_says_so_once_at_its_start(
    up: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, store: bool, journal: bool, warned: int
) -> None:
    options = {"journal": str(tmp_path / "ends.jsonl")} if journal else {}
    async with up(store=store, store_options=options):
        pass
    lines = [record for record in caplog.records if "Set store.journal to a file" in record.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"] * warned
