"""Which rows run now, and what becomes of a row? Each row is an ordinary call: admitted, queued, dispatched, relayed.

A gateway runs the relQueries whose lease it holds. It renews its leases, and takes over relQueries of gateways that
are dead. While it drains, it gives back the lease of each relQuery as soon as no row of it is under way. Rows that the
store has a result of are never sent again. A row that fails because of engines or load is sent again.

`admit.row_window` decides which relQuery starts its next row, and when. A relQuery asks for each row, and waits for its
turn.
"""

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from tidegate_gateway import gateway_settings, loop_steps, tenant_places
from tidegate_gateway.lifecycle import calls
from tidegate_gateway.observe import background_loop, prometheus_metrics
from tidegate_gateway.openai import error_table
from tidegate_gateway.relqueries import relquery_submission, result_followers, row_results
from tidegate_gateway.store import relquery_store, store_contract, store_link
from tidegate_policy import gateway_core
from tidegate_policy.admit import row_window

T = TypeVar("T")

logger = logging.getLogger("tidegate.gateway")

LARGE_PROMPT_BYTES = 256 * 1024
PAGE_ROWS = 64
"""Rows that are read at once."""
LOOK_S = 0.05
"""Between two looks whether a row may start, if none has ended."""
PLACE_S = 1.0
"""For so long the next row of a relQuery keeps the place of its large prompt while it may not start. Rows that try again
may wait for the same place, and no row starts before they end."""
RENEWALS = 5
"""Renewals within a lease."""
MOST_RENEW_S = 1.0
STORE_S = 0.2
"""Between two attempts to record a result while the store does not answer."""
LEAST_RETRY_S, MOST_RETRY_S = 0.2, 10.0


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A relQuery that this gateway runs."""

    record: relquery_store.RelQueryRecord
    ends_at_s: float
    """Its deadline on this gateway's clock."""
    turn: asyncio.Future[None] | None = None
    """Its next row waits for this."""
    task: asyncio.Task[bool] | None = field(default=None)
    followers: result_followers.ResultFollowers = field(default_factory=result_followers.ResultFollowers)

    @property
    def id(self) -> str:
        return self.record.id


class RelQueryRunner:
    """Runs the relQueries of one gateway."""

    def __init__(
        self,
        bounds: gateway_settings.RelQueries,
        store: relquery_store.RelQueryStore | None,
        link: store_link.StoreLink,
        *,
        calls: calls.Calls,
        core: gateway_core.GatewayCore,
        most_prompt_bytes: int,
        metrics: prometheus_metrics.Metrics,
        draining: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._bounds = bounds
        self._store = store
        self._link = link
        self._calls = calls
        self._core = core
        self._most_prompt_bytes = most_prompt_bytes
        self._limits = row_window.RowLimits(
            window=bounds.window, in_flight=bounds.in_flight, floor=bounds.floor, waiting=bounds.waiting
        )
        self._metrics = metrics
        self._draining = draining
        self._clock = clock
        self._running: dict[str, Running] = {}
        self._large_rows = tenant_places.TenantPlaces(1)
        self._steps = loop_steps.LoopSteps()
        self._drains = asyncio.Event()
        """Rows that wait to try again wait no longer."""
        self._loops: background_loop.BackgroundLoops | None = None
        self._group: asyncio.TaskGroup | None = None

    def places(self, tenant: str) -> relquery_store.Places:
        """The places for a further relQuery of the tenant."""
        runs = self._group is not None and not self._draining()
        return relquery_store.Places(
            own=sum(each.record.tenant == tenant for each in self._running.values()),
            free=max(self._bounds.running - len(self._running), 0) if runs else 0,
            all=self._bounds.running,
        )

    @property
    def in_flight(self) -> int:
        """Rows that are under way."""
        return self._core.rows.rows

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Holds leases and runs rows, until cancelled."""
        if self._store is None:
            return
        async with asyncio.TaskGroup() as group:
            self._group, self._loops = group, loops
            turns = group.create_task(self._turns(loops))
            try:
                while True:
                    await loops.step("relqueries", functools.partial(self._hold, self._store))
                    renew_s = min(self._store.lease_s / RENEWALS, MOST_RENEW_S)
                    await asyncio.sleep(renew_s * random.uniform(0.8, 1.0))
            finally:
                self._group = None
                turns.cancel()
                for running in self._running.values():
                    if running.task is not None:
                        running.task.cancel()

    def adopt(self, record: relquery_store.RelQueryRecord) -> None:
        """Runs a relQuery, if it is this gateway's to run."""
        store, group, loops = self._store, self._group, self._loops
        if store is None or group is None or loops is None or record.id in self._running:
            return
        if record.ended or record.owner != store.gateway:
            return
        running = Running(
            record=record,
            ends_at_s=self._clock() + (record.expires_ms - record.now_ms) / 1000,
        )
        self._running[record.id] = running
        self._core.rows.add(record.id, record.tenant)
        running.task = group.create_task(loops.step("relquery", functools.partial(self._drive, store, running)))
        running.task.add_done_callback(lambda task: self._driven(running, task))

    def drop(self, relquery: str) -> None:
        """The relQuery ended, or another gateway runs it: its rows are cancelled."""
        running = self._running.pop(relquery, None)
        if running is None:
            return
        self._core.rows.remove(relquery)
        running.followers.on_change()
        if running.task is not None:
            running.task.cancel()

    def followers(self, relquery: str) -> result_followers.ResultFollowers | None:
        """Who waits for the results of a relQuery; None if it does not run here."""
        running = self._running.get(relquery)
        return None if running is None else running.followers

    async def drained(self) -> None:
        """Returns when no row is under way."""
        while self.in_flight:
            await asyncio.sleep(LOOK_S)

    async def release(self) -> None:
        """Gives the leases back, so that other gateways go on at once. Raises `store_contract.StoreError`."""
        if self._store is not None and self._running:
            await self._store.release(list(self._running))

    async def _hold(self, store: relquery_store.RelQueryStore) -> None:
        if not self._link.up:
            return
        held = list(self._running)
        room = 0 if self._draining() else max(self._bounds.running - len(held), 0)
        try:
            answer = await store.hold(held, room)
        except store_contract.Unavailable:
            return  # the exchange of the pool watches the store
        for relquery in answer.lost:
            self.drop(relquery)
        for record in answer.taken:
            logger.info("relQuery %s goes on here with %d rows left", record.id, record.total - _results(record))
            self.adopt(record)

    def _driven(self, running: Running, task: asyncio.Task[bool]) -> None:
        """After an unexpected exception the lease lapses, and a gateway takes the relQuery over again."""
        if not task.cancelled() and not task.result() and self._running.get(running.id) is running:
            del self._running[running.id]
            self._core.rows.remove(running.id)

    # Rows.

    async def _drive(self, store: relquery_store.RelQueryStore, running: Running) -> None:
        """Runs all rows that have no result. The relQuery ends with its last row, or at its deadline in the store."""
        raw = await self._reached(functools.partial(store.spec, running.id, by=running.record.tenant))
        if raw is None:
            return  # it has ended meanwhile
        spec = relquery_submission.RelQuerySpec.from_store(raw)
        async with asyncio.TaskGroup() as rows:
            async for number, values in self._rows_left(store, running):
                place = await self._room_for_prompt(running.record.tenant, self._prompt_bytes(spec, values))
                try:
                    while not await self._turn(running, within_s=None if place is None else PLACE_S):
                        await _to_others(place)
                except asyncio.CancelledError:
                    _give_back(place)
                    raise
                row = rows.create_task(self._row(store, running, spec, number, values, place))
                row.add_done_callback(functools.partial(self._row_ended, running, place))
                await asyncio.sleep(0)  # one row for each turn of the event loop

    async def _turn(self, running: Running, *, within_s: float | None) -> bool:
        """Waits until the next row of the relQuery may start; it counts as under way from then on. False if it may not
        within this time."""
        running.turn = turn = asyncio.get_running_loop().create_future()
        self._core.rows.ask(running.id)
        self._give_turn()
        try:
            await asyncio.wait({turn}, timeout=within_s)
            if not turn.done():
                self._core.rows.withdraw(running.id)
            return turn.done()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._ended(running)  # the turn came at the same time
            else:
                self._core.rows.withdraw(running.id)
            raise
        finally:
            running.turn = None

    def _give_turn(self) -> None:
        """Starts the next row, if one may start. Its relQuery asks again when this row is a call, so that the next decision
        sees this row."""
        if self._draining() or not self._link.up:
            return
        while (relquery := self._core.next_row(self._clock(), self._limits)) is not None:
            turn = self._running[relquery].turn
            if turn is not None and not turn.done():
                self._core.rows.start(relquery)
                turn.set_result(None)
                return
            self._core.rows.withdraw(relquery)  # its task ends, so its row would never end

    async def _look(self) -> None:
        if self._draining() and self._store is not None:
            self._drains.set()
            await self._hand_over(self._store)
        self._give_turn()

    async def _hand_over(self, store: relquery_store.RelQueryStore) -> None:
        """Gives back the leases of the relQueries without a row under way: no row of theirs starts here any more."""
        idle = [relquery for relquery in self._running if not self._core.rows.rows_of(relquery)]
        if not idle or not self._link.up:
            return
        try:
            await store.release(idle)
        except store_contract.Unavailable:
            return  # the next look tries again
        for relquery in idle:
            self.drop(relquery)

    async def _turns(self, loops: background_loop.BackgroundLoops) -> None:
        """Looks whether a row may start, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await loops.step("rows", self._look)

    def _row_ended(self, running: Running, place: tenant_places.Place | None, _: asyncio.Task[None]) -> None:
        _give_back(place)
        self._ended(running)

    def _ended(self, running: Running) -> None:
        self._core.rows.end(running.id, running.record.tenant)
        self._give_turn()

    async def _rows_left(
        self, store: relquery_store.RelQueryStore, running: Running
    ) -> AsyncIterator[tuple[int, list[str]]]:
        """Number and values of each row without a result."""
        total, by = running.record.total, running.record.tenant
        finished, first = b"", 0
        while first < total:
            if _has(finished, first):
                first += 1
                continue
            finished = await self._reached(functools.partial(store.finished, running.id, by=by))
            page = await self._reached(functools.partial(store.rows, running.id, first, PAGE_ROWS, by=by))
            if not page:
                return  # it has ended meanwhile
            for number, row in enumerate(page, first):
                if not _has(finished, number):
                    yield number, orjson.loads(row)
            first += len(page)

    async def _reached(self, operation: Callable[[], Awaitable[T]]) -> T:
        """What the store answers, as soon as it can be reached."""
        while True:
            try:
                return await operation()
            except store_contract.Unavailable:
                await asyncio.sleep(STORE_S)

    async def _row(
        self,
        store: relquery_store.RelQueryStore,
        running: Running,
        spec: relquery_submission.RelQuerySpec,
        number: int,
        values: list[str],
        place: tenant_places.Place | None,
    ) -> None:
        result = await self._result(running, spec, number, values, place)
        if result is not None:
            await self._record(store, running, number, result)

    async def _result(
        self,
        running: Running,
        spec: relquery_submission.RelQuerySpec,
        number: int,
        values: list[str],
        place: tenant_places.Place | None,
    ) -> row_results.RowResult | None:
        """The result of a row; None if the time of the relQuery, or of this gateway, is over before there is one. Between
        two attempts a row with a large prompt gives back its place."""
        failures = 0
        retry_s: float | None
        while not self._draining():
            failure: error_table.GatewayError | None = None
            try:
                spec.prompt_bytes(values, self._most_prompt_bytes)
                now = self._clock()
                left_s = running.ends_at_s - now
                if left_s <= 0:
                    return None
                deadline_s = None if spec.deadline_s is None else left_s
                request = spec.call(values, group=running.id, rows=running.record.total, left_s=deadline_s)
                async with self._calls.answer(now, request) as answer:
                    return row_results.read(number, answer.reply)
            except error_table.BadRequest as error:
                if error.code != error_table.MODEL_NOT_FOUND:
                    return row_results.failed(number, error)
                retry_s = MOST_RETRY_S  # the model was known when the relQuery came; its engines are gone for now
            except error_table.EngineTrouble as error:
                failure, retry_s = error, error.retry_after_s
            except error_table.GatewayError as error:
                retry_s = error.retry_after_s
            except Exception:  # it must not end the other rows, which would begin again with it
                logger.exception("relQuery %s: row %d failed unexpectedly", running.id, number)
                failure, retry_s = error_table.mistake_of_the_gateway(), None
            if failure is not None:
                failures += 1
                if failures >= self._bounds.attempts:
                    return row_results.failed(number, failure)
            _give_back(place)
            await self._pause(min(max(retry_s or 0.0, LEAST_RETRY_S), MOST_RETRY_S) * random.uniform(0.75, 1.25))
            if place is not None and not self._draining():
                await place.take()
        return None

    async def _pause(self, seconds: float) -> None:
        """Waits so long, and no longer once the gateway drains: the row is sent again by its successor."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._drains.wait()

    def _prompt_bytes(self, spec: relquery_submission.RelQuerySpec, values: list[str]) -> int:
        try:
            return spec.prompt_bytes(values, self._most_prompt_bytes)
        except error_table.BadRequest:
            return 0  # it is no call; the row gets the error

    async def _room_for_prompt(self, tenant: str, size: int) -> tenant_places.Place | None:
        """Rows of a tenant with large prompts are sent one after the other, because a small relQuery may have a large
        prompt in each row. Such a row takes its place before it counts as under way."""
        if size <= LARGE_PROMPT_BYTES:
            return None
        place = self._large_rows.of(tenant)
        await place.take()
        try:
            await self._steps.of(tenant).next()
        except asyncio.CancelledError:
            place.give_back()
            raise
        return place

    async def _record(
        self, store: relquery_store.RelQueryStore, running: Running, number: int, result: row_results.RowResult
    ) -> None:
        """Records a result, as soon as the store can be reached."""
        finish = functools.partial(
            store.finish, running.id, number, result.text, ok=result.ok, by=running.record.tenant
        )
        try:
            record = await self._reached(finish)
        except store_contract.Rejected:
            self.drop(running.id)
            return
        self._metrics.relquery_rows.labels("completed" if result.ok else "failed").inc()
        running.followers.on_change()
        if record.ended or record.owner != store.gateway:
            self.drop(running.id)


def _give_back(place: tenant_places.Place | None) -> None:
    if place is not None:
        place.give_back()


async def _to_others(place: tenant_places.Place | None) -> None:
    """Lets those that wait for the place go first."""
    if place is not None:
        place.give_back()
        await place.take()


def _has(finished: bytes, number: int) -> bool:
    """Whether the bitmap has the row."""
    at = number >> 3
    return at < len(finished) and bool(finished[at] & (0x80 >> (number & 7)))


def _results(record: relquery_store.RelQueryRecord) -> int:
    return record.completed + record.failed
