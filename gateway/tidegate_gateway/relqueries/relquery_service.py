"""RelQueries as the gateway serves them: submitted, shown, followed and cancelled, through the store.

A relQuery is acknowledged when the store has all its rows. Results are read from the store, whichever gateway makes
them, so a client can go on at any gateway with the number of results that it has.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tidegate_gateway import gateway_settings, loop_steps, tenant_pace, tenant_places
from tidegate_gateway.lifecycle import engine_directory
from tidegate_gateway.openai import engine_fields, error_table, parsed_request, request_fields
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import relquery_runner, relquery_submission, row_tables
from tidegate_gateway.store import relquery_store, store_contract, store_link, tenant_ids
from tidegate_gateway.workflows import store_requests, workflow_service
from tidegate_policy.model import DropReason

T = TypeVar("T")

PAGE_ROWS = 512
"""Results of one page."""
FIRST_LOOK_S, MOST_LOOK_S = 0.05, 1.0
"""Between two looks at the results of a relQuery: at least, and without results. A result that this gateway records ends
the wait."""
PUSH_BYTES = 512 * 1024
"""Bytes of rows that one command stores."""
RESULTS_BYTES_PER_S = 32 * 1024 * 1024
"""Of results that the clients of one tenant read."""
PAGES_AT_ONCE = 8
"""Pages that one tenant reads at a time; one above `LONG_BYTES` counts until its client has it, for `PLACE_S` at most."""
LONG_BYTES, PLACE_S = 64 * 1024, 10.0
FETCHES_AT_ONCE = 2
"""Tables that one tenant has fetched at a time, until their rows are in the store."""
FETCHERS = "the tenant's relQueries fetch too many tables at the same time; submit fewer at once"
READERS = "the tenant's clients read too many results at the same time; read fewer at once"
RETRY_S = 60.0
"""When a tenant with too many relQueries may try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Results of a relQuery in the order of their ends."""

    record: relquery_store.RelQueryRecord
    results: list[bytes]
    """Each as JSON."""
    after: int
    """Results before this page."""

    @property
    def bytes(self) -> int:
        return sum(map(len, self.results))

    @property
    def last(self) -> int:
        """Results up to the end of this page."""
        return self.after + len(self.results)

    @property
    def more(self) -> bool:
        """The store has further results already."""
        return self.last < self.record.completed + self.record.failed

    @property
    def final(self) -> bool:
        return self.record.ended and not self.more


class RelQueries:
    """All relQueries, through the store."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        link: store_link.StoreLink,
        store: relquery_store.RelQueryStore | None,
        runner: relquery_runner.RelQueryRunner,
        directory: engine_directory.EngineDirectory,
        fields: engine_fields.EngineFields,
        ids: tenant_ids.TenantIds,
    ) -> None:
        self._ids = ids
        self.bounds = settings.relqueries
        self._pace = tenant_pace.TenantPace(RESULTS_BYTES_PER_S, burst_s=1.0)
        self._places = tenant_places.TenantPlaces(PAGES_AT_ONCE)
        self._fetches = tenant_places.TenantPlaces(FETCHES_AT_ONCE)
        self.steps = loop_steps.LoopSteps()
        """Of the readers of rows."""
        self._link = link
        self._store = store
        self._runner = runner
        self._directory = directory
        self._fields = fields

    def check(self, spec: relquery_submission.RelQuerySpec) -> None:
        """Checks what depends on this gateway before the rows are read. Raises `GatewayError`."""
        if self._store is None:
            raise error_table.no_store()
        models, slo_class = self._directory.models, spec.fields.slo_class
        if models and spec.model not in models:
            raise parsed_request.unknown_model(spec.model, models)
        classes = self._fields.classes
        if slo_class is not None and classes and slo_class not in classes:
            name = spec.fields.names.slo_class
            raise BadRequest(f"{name} must be one of {', '.join(sorted(classes))}", param=name)
        self._fields.check(spec.kind, spec.body, slo_class)

    def fetching(self, spec: relquery_submission.RelQuerySpec) -> contextlib.AbstractAsyncContextManager[None]:
        """The tenant fetches one table more meanwhile. Raises `Shed` when it fetches too many."""
        return self._fetches.taken(spec.fields.tenant, PLACE_S, FETCHERS)

    async def submit(
        self,
        spec: relquery_submission.RelQuerySpec,
        rows: row_tables.RowCollector,
        by: workflow_service.Requester,
        *,
        after: int = 0,
    ) -> relquery_store.RelQueryRecord:
        """Creates a relQuery. The same Idempotency-Key with the same request gives the same one; a client that has `after`
        of its results gets no new one. Raises `GatewayError`."""
        rows.whole()
        upload, tenant, stored = relquery_store.new_id(), spec.fields.tenant, spec.stored()
        digest = hashlib.sha256(stored)
        if spec.id is not None:
            digest.update(f"\nid {spec.id}\n".encode())
        try:
            for first, end in _batches(rows.rows):
                batch = rows.rows[first:end]
                digest.update(b"\n".join(batch))
                await self._ask(lambda store, batch=batch: store.push(upload, batch, by=tenant))  # type: ignore[misc]
            new = relquery_store.NewRelQuery(
                id=self._ids.of(relquery_store.new_id() if spec.id is None else spec.id, tenant),
                tenant=tenant,
                model=spec.model,
                spec=stored,
                upload=upload,
                total=len(rows.rows),
                rows_bytes=rows.bytes,
                lasts_ms=round((self.bounds.lasts_s if spec.deadline_s is None else spec.deadline_s) * 1000),
                key=by.key,
                digest=digest.hexdigest(),
                repeats=after > 0,
            )
            here = self._runner.places(tenant)
            record = await self._ask(lambda store: store.create(new, here), new.id, by)
        finally:
            with contextlib.suppress(error_table.GatewayError):  # there are no rows if they became the relQuery's
                await self._ask(lambda store: store.drop(upload, by=tenant))
        self._runner.adopt(record)
        return record

    async def get(self, relquery: str, by: workflow_service.Requester) -> relquery_store.RelQueryRecord:
        known = self._of(relquery, by)
        return await self._ask(lambda store: store.get(known, by=by.tenant), known, by)

    async def cancel(self, relquery: str, by: workflow_service.Requester) -> relquery_store.RelQueryRecord:
        """Cancels a relQuery and its running rows; one that has ended stays as it is."""
        known = self._of(relquery, by)
        record = await self._ask(lambda store: store.cancel(known, by=by.tenant), known, by)
        self._runner.drop(known)
        return record

    async def page(self, relquery: str, after: int, by: workflow_service.Requester, *, most: int = PAGE_ROWS) -> Page:
        """The results that follow the first `after` ones, as far as they are there. Raises `GatewayError`."""
        async with self._places.taken(by.tenant or "", PLACE_S, READERS):
            return await self._read(relquery, after, by, most)

    async def _read(self, relquery: str, after: int, by: workflow_service.Requester, most: int) -> Page:
        known = self._of(relquery, by)
        record, results = await self._ask(lambda store: store.results(known, after, most=most, by=by.tenant), known, by)
        count, what = (record.completed + record.failed, "results") if record.ended else (record.total, "rows")
        if after > count:
            raise BadRequest(
                f"after is too large: {after}, and relQuery {relquery!r} has {count} {what}", param="after"
            )
        page = Page(record=record, results=results, after=after)
        await self._pace.spend(by.tenant, page.bytes)
        return page

    async def follow(self, relquery: str, after: int, by: workflow_service.Requester) -> AsyncGenerator[Page, None]:
        """Pages of results until the relQuery has ended; the last page is final. A page may be empty. Raises
        `GatewayError`."""
        look_s = FIRST_LOOK_S
        place = self._places.of(by.tenant or "")
        try:
            while True:
                await place.take()
                followers = self._runner.followers(self._of(relquery, by))
                seen = followers.changes if followers is not None else 0
                page = await self._read(relquery, after, by, PAGE_ROWS)
                if page.bytes <= LONG_BYTES:
                    place.give_back()
                slow = asyncio.get_running_loop().call_later(PLACE_S, place.give_back)
                try:
                    yield page  # a long one takes memory until the client has it
                finally:
                    slow.cancel()
                    place.give_back()
                if page.final:
                    return
                look_s = FIRST_LOOK_S if page.results else min(2 * look_s, MOST_LOOK_S)
                after = page.last
                if page.more:
                    continue
                least_s = max(FIRST_LOOK_S, look_s / 8)
                await asyncio.sleep(least_s)
                if followers is None:
                    await asyncio.sleep(look_s - least_s)
                else:
                    await followers.change(seen, look_s - least_s)
        finally:
            place.give_back()

    def _of(self, relquery: str, by: workflow_service.Requester) -> str:
        return self._ids.of(request_fields.name(relquery, "id"), by.tenant)

    async def _ask(
        self,
        operation: Callable[[relquery_store.RelQueryStore], Awaitable[T]],
        relquery: str = "",
        by: workflow_service.Requester | None = None,
    ) -> T:
        try:
            return await store_requests.ask(self._link, self._store, operation)
        except store_contract.Rejected as error:
            raise _rejection(error, relquery, by or workflow_service.Requester()) from error


def _batches(rows: list[bytes]) -> list[tuple[int, int]]:
    """Ranges of rows with about `PUSH_BYTES` each, and at most as many rows as one command has."""
    ranges: list[tuple[int, int]] = []
    first = size = 0
    for i, row in enumerate(rows):
        size += len(row)
        if size >= PUSH_BYTES or i - first + 1 >= relquery_store.PUSHED:
            ranges.append((first, i + 1))
            first, size = i + 1, 0
    if first < len(rows):
        ranges.append((first, len(rows)))
    return ranges


def no_results_yet() -> BadRequest:
    return BadRequest(
        "a new relQuery has no results yet, so leave after (or Last-Event-ID) out; to go on with a relQuery, read its rows,"
        " or repeat its request with its idempotency key",
        param="after",
    )


def _rejection(
    error: store_contract.Rejected, relquery: str, by: workflow_service.Requester
) -> error_table.GatewayError:
    shown = tenant_ids.of_client(relquery)
    match error.code:
        case "tenant-limit":
            text = (
                "the tenant has too many relQueries that run"
                if error.state == "running"
                else ("the relQueries of the tenant have too many bytes in the store")
            )
            return error_table.Shed(
                DropReason.TENANT_LIMIT, retry_after_s=RETRY_S, message=f"{text}; wait until some have ended"
            )
        case "saturated":
            return error_table.Shed(
                DropReason.SATURATED,
                retry_after_s=RETRY_S,
                message="the store is more than half full, and this is more than the tenant's part of what is left",
            )
        case "relquery_not_repeated":
            return no_results_yet()
        case "rows_lapsed":
            return error_table.store_unavailable()
        case "relquery_exists":
            return BadRequest(f"relQuery {shown!r} exists already; choose another id", param="id", code=error.code)
        case "idempotency_key_reused":
            name = by.names.idempotency_key
            return BadRequest(
                f"this {name} was used with another request; use a new key for a new request",
                param=name,
                code=error.code,
            )
        case _:
            return BadRequest(
                f"relQuery {shown!r} is unknown: this tenant did not submit it, or it ended too long ago",
                param="id",
                code="relquery_not_found",
            )
