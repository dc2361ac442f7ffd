"""Workflows as the gateway serves them: created by a request or by a call's header, joined, finished, ended.

Between the edges and the store. The end of a call is recorded before its last bytes go out. An end that the store cannot
take now waits (`call_ends`) until the store can, so no end is lost that a client has seen. Without a store workflows
are shed and single calls go on.
"""

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import orjson

from tidegate_gateway import gateway_settings, loop_steps, stage_declaration, tenant_pace, tenant_places
from tidegate_gateway.observe import background_loop, prometheus_metrics
from tidegate_gateway.openai import error_table, parsed_request, request_fields
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract, store_link, tenant_ids
from tidegate_gateway.workflows import call_ends, store_requests, waiting_ends, workflow_declaration, workflow_looks
from tidegate_policy import immutable
from tidegate_policy.model import DropReason, WorkflowId

logger = logging.getLogger("tidegate.gateway")

T = TypeVar("T")

HOUSEKEEPING_S, FLUSH_S = 0.5, 0.05
"""Between two rounds of housekeeping; while ends wait for the store."""
RECORDED_LOOK_S = 0.1
LEAST_LOOK_S, MOST_LOOK_S = 0.05, 0.5
"""Between two looks at a workflow that is watched: soon after a change, and without changes."""
SILENT_S = 15.0
"""Proxies end a stream that is silent for longer."""
FULL = {
    DropReason.TENANT_LIMIT.value: "the tenant's workflows have too many bytes in the store; wait until some have ended",
    DropReason.SATURATED.value: "the store is more than half full, and the tenant has its part of what is left; try later",
}
RETRY_S = 5.0
"""Until the store may have room again."""
SHOWN_BYTES_PER_S = 4 * 1024 * 1024
"""Of records that the watches of one tenant compare and show. A watch of a large workflow by many clients shows changes
later."""
SHOWS_AT_ONCE = 16
"""Records that watches show in one turn of the event loop; most take less than a millisecond."""
BATCH, MOST_BATCHES = 100, 10
"""Records that one round of housekeeping touches."""
READS, READ_S = 8, 10.0
"""Reads of workflows by one tenant at a time; a further one waits for so many seconds at most. Records take ten times the
memory of their bytes."""
READERS = "the tenant's clients read too many workflows at the same time; read fewer at once"
LISTED, MOST_LISTED = 100, 1000
"""Rows of a list: when the request names no limit, and at most."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Membership:
    """A call's place in its workflow, and the workflow's record when the call joined it."""

    stage: str
    call: str
    record: store_contract.Record

    @property
    def workflow(self) -> WorkflowId:
        return WorkflowId(self.record.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """What a request about workflows says of itself."""

    tenant: str | None = None
    key: str | None = None
    """Its idempotency key."""
    names: request_fields.FieldNames = request_fields.HTTP_NAMES


class Workflows:
    """All workflows, through the store."""

    def __init__(
        self,
        link: store_link.StoreLink,
        metrics: prometheus_metrics.Metrics,
        templates: tuple[gateway_settings.Template, ...] = (),
        ends: call_ends.CallEnds | None = None,
        over: Callable[[WorkflowId, bool, list[str]], None] = lambda workflow, ok, uncalled: None,
        ids: tenant_ids.TenantIds = tenant_ids.OF_THE_POOL,
    ) -> None:
        """`ends` keeps the ends that the store could not take. `over` takes each workflow whose end this gateway has
        recorded, whether it is done, and its stages that had no call. `ids` says which workflow a client's id means."""
        self._ids = ids
        self._over = over
        self._steps = loop_steps.LoopSteps()
        self._looks: workflow_looks.WorkflowLooks[tuple[store_contract.Record, int]] = workflow_looks.WorkflowLooks()
        self._shown = tenant_pace.TenantPace(SHOWN_BYTES_PER_S, burst_s=0.25, tenants=workflow_looks.TENANTS)
        self._shows = loop_steps.TenantTurns(SHOWS_AT_ONCE)
        self._places = tenant_places.TenantPlaces(READS)
        self._link = link
        self._metrics = metrics
        self.set_templates(templates)
        self._unrecorded = call_ends.CallEnds() if ends is None else ends

    def set_templates(self, templates: Iterable[gateway_settings.Template]) -> None:
        """Replaces the templates; workflows that exist keep their declarations."""
        self._templates = {item.name: item for item in templates}

    @property
    def unrecorded(self) -> int:
        """Ends of calls that the store does not know yet."""
        return len(self._unrecorded)

    # Calls.

    def known_as(self, fields: request_fields.RequestFields) -> WorkflowId | None:
        """The workflow that a request names, by its id in the pool."""
        return None if fields.workflow is None else self._id(fields.workflow, fields.tenant)

    async def join(self, request: parsed_request.ParsedRequest, call: str) -> Membership:
        """Enters a call into the workflow that its request names. Raises `GatewayError`."""
        fields = request.fields
        workflow, stage = self.known_as(fields), fields.stage
        if workflow is None or stage is None:
            raise AssertionError("the request names no workflow")
        deadline_ms = None if fields.deadline_s is None else round(fields.deadline_s * 1000)
        asked = self._link.store is not None and self._link.up
        try:
            record = await self._ask(
                lambda store: store.join(
                    workflow, stage, call, deadline_ms=deadline_ms, tenant=fields.tenant, key=fields.idempotency_key
                ),
                _Subject(workflow=workflow, stage=stage, names=fields.names, by_call=True),
            )
        except (asyncio.CancelledError, error_table.Shed) as error:
            full = isinstance(error, error_table.Shed) and error.reason in FULL
            if asked and not full and not isinstance(error.__cause__, store_contract.NotSent):
                self._later(workflow, call, ok=False, tenant=fields.tenant)  # the store may have taken it all the same
            raise
        return Membership(stage=stage, call=call, record=record)

    async def ended(self, membership: Membership, *, ok: bool, share_s: float | None) -> None:
        """Records the end of a call, which had `share_s` seconds. If the store cannot take it now, or the wait is
        cancelled, it is recorded later, without its share."""
        recorded = False
        share_ms = None if share_s is None else round(share_s * 1000)
        try:
            recorded = await self._record(
                membership.workflow, membership.call, ok=ok, share_ms=share_ms, tenant=membership.record.tenant
            )
        finally:
            if not recorded:
                self._later(membership.workflow, membership.call, ok=ok, tenant=membership.record.tenant)

    def cut(self, membership: Membership) -> None:
        """The client of a call went away; recorded soon."""
        self._later(membership.workflow, membership.call, ok=False, tenant=membership.record.tenant)

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Records the ends that wait, ends overdue workflows and counts ended ones, until cancelled. Neither waits for the
        other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._record_ends(loops))
            while True:
                await asyncio.sleep(HOUSEKEEPING_S)
                await loops.step("workflows", self._housekeeping)

    async def _record_ends(self, loops: background_loop.BackgroundLoops) -> None:
        while True:
            await asyncio.sleep(FLUSH_S if self.unrecorded and self._link.up else HOUSEKEEPING_S)
            if self._link.up:
                await loops.step("call-ends", self.flush)

    async def _housekeeping(self) -> None:
        store = self._link.store
        if store is None or not self._link.up:
            return
        try:
            for _ in range(MOST_BATCHES):
                if await store.expire(BATCH):
                    break
            for end in await store.ends(10 * BATCH):
                self._metrics.on_workflow(end.template, end.outcome)
        except store_contract.Unavailable as error:
            self._link.failed(error)

    async def recorded(self) -> None:
        """Returns once the store knows the ends of all calls that are over."""
        while self.unrecorded:
            await asyncio.sleep(RECORDED_LOOK_S)

    async def flush(self) -> None:
        """Records the ends that wait, as far as the store takes them. Their tenants take turns here, and not at the store
        too, where the ends of one tenant would wait behind its other commands and keep the rest waiting."""
        await self._unrecorded.deliver(lambda end: self._record(end.workflow, end.call, ok=end.ok))
        self._metrics.unrecorded.set(self.unrecorded)

    # The API. A request that names a tenant does not see the workflows of other tenants.

    async def create(
        self, declaration: workflow_declaration.WorkflowDeclaration, by: Requester
    ) -> store_contract.Record:
        """Creates a workflow. Raises `GatewayError`."""
        new = workflow_declaration.declared(declaration, by.tenant, self._templates)
        new = dataclasses.replace(new, id=self._id(new.id, new.tenant))
        same = once(by.key, new.tenant, "create", orjson.dumps(declaration, option=orjson.OPT_SORT_KEYS))
        return await self._ask(lambda store: store.create(new, once=same), _Subject(workflow=new.id, names=by.names))

    async def get(self, workflow: str, by: Requester) -> store_contract.Record:
        known = self._of(workflow, by)
        subject = _Subject(workflow=known, names=by.names)
        async with self._places.taken(by.tenant or "", READ_S, READERS):
            return await self._ask(lambda store: store.get(known, by=by.tenant), subject)

    async def watch(self, workflow: str, by: Requester) -> AsyncGenerator[store_contract.Record | None, None]:
        """The workflow now and after each change, until it has ended; None after each `SILENT_S` without a change. Raises
        `GatewayError`."""
        seen: store_contract.Record | None = None
        look_s, shown_at_s = LEAST_LOOK_S, time.monotonic()
        size = 0

        async def look() -> tuple[store_contract.Record, int]:
            record = await self.get(workflow, by)
            return record, store_contract.size(record)

        while True:
            await self._shown.spend(by.tenant, size)
            record, new_size = await self._looks.look((workflow, by), by.tenant, look)
            await self._shown.spend(by.tenant, new_size - size)  # the first look, or the record has grown
            size = new_size
            same = dataclasses.replace(record, now_ms=0)
            if same != seen:
                await self._shows.next(by.tenant or "")
                yield record
                seen, look_s, shown_at_s = same, LEAST_LOOK_S, time.monotonic()
            elif time.monotonic() >= shown_at_s + SILENT_S:
                yield None
                shown_at_s = time.monotonic()
            if record.state != "running":
                return
            await asyncio.sleep(look_s)
            look_s = min(1.5 * look_s, MOST_LOOK_S)

    async def listed(
        self, state: str | None, limit: int, by: Requester, view: Callable[[store_contract.Record], T]
    ) -> tuple[list[T], bool]:
        """The newest workflows as `view` shows them, of one state or of all: at most `limit` and 256 KiB of records, and
        whether there are more."""
        if state is not None and state not in store_contract.STATES:
            raise BadRequest(f"state must be one of {', '.join(store_contract.STATES)}", param="state")
        if not 1 <= limit <= MOST_LISTED:
            raise BadRequest(f"limit must be a whole number from 1 to {MOST_LISTED}", param="limit")
        subject = _Subject(workflow="", names=by.names)
        async with self._places.taken(by.tenant or "", READ_S, READERS):
            records, more = await self._ask(lambda store: store.listed(state, limit, by=by.tenant), subject)
            return await self._steps.of(by.tenant).convert(records, view), more

    async def complete_stage(self, workflow: str, stage: str, by: Requester) -> store_contract.Record:
        """Ends a stage (a tool step, or the last of its undeclared calls)."""
        known = self._of(workflow, by)
        request_fields.name(stage, "stage")
        same = once(by.key, by.tenant, f"complete {workflow} {stage}")
        return await self._ask(
            lambda store: store.complete_stage(known, stage, by=by.tenant, once=same),
            _Subject(workflow=known, stage=stage, names=by.names),
        )

    async def complete(self, workflow: str, by: Requester) -> store_contract.Record:
        known = self._of(workflow, by)
        same = once(by.key, by.tenant, f"complete {workflow}")
        subject = _Subject(workflow=known, names=by.names)
        record = await self._ask(lambda store: store.complete(known, by=by.tenant, once=same), subject)
        return self._ended(record)

    async def cancel(self, workflow: str, by: Requester) -> store_contract.Record:
        known = self._of(workflow, by)
        subject = _Subject(workflow=known, names=by.names)
        return self._ended(await self._ask(lambda store: store.cancel(known, by=by.tenant), subject))

    # The machinery.

    def _id(self, workflow: str, tenant: str | None) -> WorkflowId:
        return WorkflowId(self._ids.of(workflow, tenant))

    def _of(self, workflow: str, by: Requester) -> WorkflowId:
        return self._id(request_fields.name(workflow, "id"), by.tenant)

    async def _ask(self, operation: Callable[[store_contract.Store], Awaitable[T]], subject: "_Subject") -> T:
        """One operation of the store; its rejections become errors of the API."""
        try:
            return await store_requests.ask(self._link, self._link.store, operation)
        except store_contract.Rejected as error:
            raise _rejection(error, subject) from error

    def _ended(self, record: store_contract.Record) -> store_contract.Record:
        if record.state != "running":
            self._over(WorkflowId(record.id), record.state == "done", record.uncalled)
        return record

    async def _record(
        self, workflow: str, call: str, *, ok: bool, share_ms: int | None = None, tenant: str | None = None
    ) -> bool:
        """Whether the end of a call is recorded, or there is no workflow left to record it in."""
        store = self._link.store
        if store is None or not self._link.up:
            return False
        try:
            self._ended(await store.finish(workflow, call, ok=ok, share_ms=share_ms, tenant=tenant))
        except store_contract.Unavailable as error:
            self._link.failed(error)
            return False
        except store_contract.Rejected as error:
            logger.info("the end of call %s is not recorded: workflow %s: %s", call, workflow, error.code)
        return True

    def _later(self, workflow: str, call: str, *, ok: bool, tenant: str | None) -> None:
        if self._link.store is None:
            return
        self._unrecorded.add(waiting_ends.CallEnd(tenant=tenant or "", workflow=workflow, call=call, ok=ok))
        self._metrics.unrecorded.set(self.unrecorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What an operation of the store is about, and how its wire names that."""

    workflow: str
    """Its id in the pool."""
    stage: str = ""
    names: request_fields.FieldNames
    by_call: bool = False
    """A call named the workflow and the stage, in its headers or fields."""


def once(key: str | None, tenant: str | None, operation: str, body: bytes = b"{}") -> store_contract.Idempotency | None:
    """What a tenant's idempotency key stands for; `key` is checked already."""
    if not key:
        return None
    printed = hashlib.sha256(body).hexdigest()
    return store_contract.Idempotency(key=key, scope=f"{operation}\n{tenant or ''}", print=printed)


def _rejection(error: store_contract.Rejected, subject: _Subject) -> error_table.GatewayError:
    """The store's rejection as an error of the API, with the header or field that it is about."""
    if error.code in FULL:
        return error_table.Shed(DropReason(error.code), retry_after_s=RETRY_S, message=FULL[error.code])
    workflow, stage, names = tenant_ids.of_client(subject.workflow), subject.stage, subject.names
    at_id, at_stage = (names.workflow, names.stage) if subject.by_call else ("id", "stage")
    sentence, param = {
        "workflow_not_found": (
            f"this tenant has no workflow {workflow!r}; create it, or start it by a call with {names.deadline}",
            at_id,
        ),
        "workflow_ended": (f"workflow {workflow!r} has ended ({error.state}); create another one", at_id),
        "workflow_exists": (
            f"workflow {workflow!r} exists already, perhaps of another tenant; choose another id, or use it as it is",
            at_id,
        ),
        "stage_not_found": (f"workflow {workflow!r} has no stage {stage!r}; its own record names them", at_stage),
        "stage_already_done": (
            f"stage {stage!r} is done, because it was completed, had all its calls, or a later stage began; name another"
            f" stage, or repeat a request with the {names.idempotency_key} that it had",
            at_stage,
        ),
        "idempotency_key_reused": (
            f"this {names.idempotency_key} was used with another body; use a new key for a new request",
            names.idempotency_key,
        ),
        "too_many_stages": (
            f"workflow {workflow!r} has {stage_declaration.MOST_STAGES} stages already, or its record is full of names;"
            " create another one",
            at_stage,
        ),
        "too_many_calls": (
            f"workflow {workflow!r} has {store_contract.MOST_CALLS} calls under way; wait until some are done",
            at_id,
        ),
    }[error.code]
    code = "invalid_request" if error.code.startswith("too_many") else error.code
    return BadRequest(sentence, param=param, code=code)
