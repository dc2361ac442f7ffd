"""Workflows as the gateway serves them: created by request or by a call's header, budgeted, finished, ended.

Between the wire and the `store`: validates what clients declare, turns a record into a call's budget (HexGen eq 5), and
sees to it that nothing a client was told is lost: the end of a call is recorded before its last bytes go out, and what the
store cannot take now waits in an outbox until it can. Without a store workflows are refused and single calls go on.
"""

import asyncio
import collections
import datetime
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_gateway import gateway_settings, perceive
from tidegate_gateway.observe import prometheus_metrics
from tidegate_gateway.openai import error_table, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_declaration
from tidegate_policy import budget
from tidegate_policy.cost import CostModel
from tidegate_policy.model import StageState, Workflow, WorkflowId

logger = logging.getLogger("tidegate.gateway")

HOUSEKEEPING_S = 0.5
BATCH = 100
"""Records that one round of housekeeping touches."""
MOST_UNRECORDED = 100_000
LISTED, MOST_LISTED = 100, 1000
"""Rows of a list: when nobody says, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A call's place in its workflow, and what follows from it."""

    workflow: WorkflowId
    stage: str
    call: str
    template: str
    tenant: str
    due_s: float
    """By when this call should finish: its share of the time left."""
    deadline_s: float
    """After which its answer is worthless: the workflow's deadline and its grace."""
    left_s: float
    """Expected work of the workflow after this call."""

    @property
    def scope(self) -> str:
        """Whose calls are like this one: the template's, else the tenant's."""
        return self.template or self.tenant


class Workflows:
    """All workflows, through the store."""

    def __init__(
        self,
        told: gateway_settings.Settings,
        kept: store_contract.Store | None,
        perception: perceive.Perception,
        meters: prometheus_metrics.Telemetry,
        *,
        costs: Callable[[], list[CostModel]],
    ) -> None:
        self.kept = kept
        self.up = kept is not None
        """Whether the store answered last time; while it is down nobody waits for it."""
        self._told = told
        self._templates = {item.name: item for item in told.workflows}
        self._perception = perception
        self._meters = meters
        self._costs = costs
        self._outbox: dict[bool, collections.deque[tuple[str, str]]] = {ok: collections.deque() for ok in (True, False)}
        """Ends that wait for the store, good ones first: a client was told of those."""

    @property
    def unrecorded(self) -> int:
        """Ends of calls that the store does not know yet."""
        return sum(map(len, self._outbox.values()))

    # Calls.

    async def join(self, now: float, ask: parsed_request.Ask, call: str) -> Membership:
        """Enters the ask's call into its workflow. Raises `GatewayError`."""
        if ask.workflow is None or ask.stage is None:
            raise AssertionError("the ask names no workflow")
        deadline_ms = None if ask.deadline_s is None else round(ask.deadline_s * 1000)
        asked = self.kept is not None and self.up
        try:
            record = await self._ask(
                ask.workflow,
                "join",
                ask.workflow,
                ask.stage,
                call,
                deadline_ms=deadline_ms,
                tenant=ask.tenant,
                key=ask.idempotency,
                stage=ask.stage,
            )
        except (asyncio.CancelledError, error_table.Refused):
            if asked:
                self._later(ask.workflow, call, ok=False)  # the store may have taken it all the same
            raise
        return self._membership(now, record, ask.stage, call, ask.model)

    async def ended(self, membership: Membership, *, ok: bool) -> None:
        """Records the end of a call, well or not; if the store cannot now, or nobody waits for it, it is recorded later."""
        recorded = False
        try:
            recorded = await self._record(membership.workflow, membership.call, ok=ok)
        finally:
            if not recorded:
                self._later(membership.workflow, membership.call, ok=ok)

    def cut(self, membership: Membership) -> None:
        """The client of a call went away; recorded soon."""
        self._later(membership.workflow, membership.call, ok=False)

    async def run(self) -> None:
        """Empties the outbox, ends what is overdue and counts what has ended, until cancelled."""
        while True:
            await asyncio.sleep(0.05 if self.unrecorded and self.up else HOUSEKEEPING_S)
            if self.kept is None or not self.up:
                continue
            await self.flush()
            try:
                await self.kept.expire(BATCH)
                for end in await self.kept.ends(10 * BATCH):
                    self._meters.on_workflow(end.template, end.outcome)
            except store_contract.Unavailable:
                self.up = False

    async def flush(self) -> None:
        """Records what waits in the outbox, as far as the store takes it."""
        for ok, waiting in self._outbox.items():
            while waiting and await self._record(*waiting[0], ok=ok):
                waiting.popleft()
        self._meters.unrecorded.set(self.unrecorded)

    # The API; every answer is a JSON object of `shown`. To a request that names a tenant, others' workflows are unknown.

    async def create(self, body: Mapping[str, Any], *, tenant: str | None, key: str | None) -> dict[str, Any]:
        """Creates a workflow from a request body. Raises `GatewayError`."""
        new = workflow_declaration.declared(body, tenant, self._templates)
        return shown(await self._ask(new.id, "create", new, once=once(key, new.tenant, "create", body)))

    async def get(self, workflow: str, *, tenant: str | None) -> dict[str, Any]:
        parsed_request.name_of(workflow, "id")
        return shown(await self._ask(workflow, "get", workflow, by=tenant))

    async def listed(
        self, state: str | None, limit: int = LISTED, *, tenant: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """The newest workflows, of one state or of all, and whether there are more than `limit`."""
        if state is not None and state not in store_contract.STATES:
            raise BadRequest(f"state must be one of {', '.join(store_contract.STATES)}", param="state")
        if not 1 <= limit <= MOST_LISTED:
            raise BadRequest(f"limit must be a whole number from 1 to {MOST_LISTED}", param="limit")
        found = await self._ask("", "listed", state, limit + 1, by=tenant)
        return [shown(record) for record in found[:limit]], len(found) > limit

    async def complete_stage(self, workflow: str, stage: str, *, tenant: str | None, key: str | None) -> dict[str, Any]:
        """A stage is over (a tool step, or the last of its undeclared calls)."""
        parsed_request.name_of(workflow, "id")
        parsed_request.name_of(stage, "stage")
        record = await self._ask(
            workflow,
            "complete_stage",
            workflow,
            stage,
            by=tenant,
            once=once(key, tenant, f"complete {workflow} {stage}", None),
            stage=stage,
        )
        return shown(record)

    async def complete(self, workflow: str, *, tenant: str | None, key: str | None) -> dict[str, Any]:
        parsed_request.name_of(workflow, "id")
        same = once(key, tenant, f"complete {workflow}", None)
        return shown(await self._ask(workflow, "complete", workflow, by=tenant, once=same))

    async def cancel(self, workflow: str, *, tenant: str | None) -> dict[str, Any]:
        parsed_request.name_of(workflow, "id")
        return shown(await self._ask(workflow, "cancel", workflow, by=tenant))

    # The machinery.

    async def _ask(self, workflow: str, operation: str, *arguments: Any, stage: str = "", **options: Any) -> Any:
        """One operation of the store, its refusals as errors of the API."""
        if self.kept is None or not self.up:
            raise error_table.store_unavailable()
        try:
            return await getattr(self.kept, operation)(*arguments, **options)
        except store_contract.Unavailable as error:
            self.up = False
            raise error_table.store_unavailable() from error
        except store_contract.Rejected as error:
            raise _refusal(error, operation, workflow, stage) from error

    async def _record(self, workflow: str, call: str, *, ok: bool) -> bool:
        """Whether the end of a call is recorded (or there is nothing left to record it in)."""
        if self.kept is None or not self.up:
            return False
        try:
            await self.kept.finish(workflow, call, ok=ok)
        except store_contract.Unavailable:
            self.up = False
            return False
        except store_contract.Rejected as error:
            logger.info("the end of call %s is not recorded: workflow %s: %s", call, workflow, error.code)
        return True

    def _later(self, workflow: str, call: str, *, ok: bool) -> None:
        if self.kept is None:
            return
        self._outbox[ok].append((workflow, call))
        if self.unrecorded > MOST_UNRECORDED:
            workflow, call = (self._outbox[False] or self._outbox[True]).pop()
            logger.error("the end of call %s of workflow %s cannot be recorded", call, workflow)
        self._meters.unrecorded.set(self.unrecorded)

    def _membership(self, now: float, record: store_contract.Record, stage: str, call: str, model: str) -> Membership:
        models = self._costs()
        scope = record.template or record.tenant

        def pass_s(name: str) -> float:
            return self._perception.stage_seconds((scope, name, model), models)

        states = tuple(
            StageState(name=item.name, after=item.after, mean_s=pass_s(item.name), passes=_passes(item), done=item.over)
            for item in record.stages
        )
        deadline_s = now + (record.deadline_ms - record.now_ms) / 1000
        flow = Workflow(id=WorkflowId(record.id), arrival_s=now, deadline_s=deadline_s, stages=states)
        granted = budget.of_call(now, flow, stage)
        return Membership(
            workflow=flow.id,
            stage=stage,
            call=call,
            template=record.template,
            tenant=record.tenant,
            due_s=granted.due_s,
            deadline_s=deadline_s + self._told.store.grace_s,
            left_s=granted.rest_s,
        )


def once(
    key: str | None, tenant: str | None, operation: str, body: Mapping[str, Any] | None
) -> store_contract.Idempotency | None:
    """What a tenant's Idempotency-Key stands for. Raises `BadRequest`."""
    if key is None or key == "":
        return None
    parsed_request.text_of(key, "Idempotency-Key")
    printed = hashlib.sha256(orjson.dumps(dict(body or {}), option=orjson.OPT_SORT_KEYS)).hexdigest()
    return store_contract.Idempotency(key=key, scope=f"{operation}\n{tenant or ''}", print=printed)


def shown(record: store_contract.Record) -> dict[str, Any]:
    """A workflow as the API shows it."""
    deadline = datetime.datetime.fromtimestamp(record.deadline_ms / 1000, datetime.UTC)
    return {
        "id": record.id,
        "object": "workflow",
        "state": record.state,
        "template": record.template or None,
        "tenant": record.tenant or None,
        "deadline": deadline.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "deadline_ms": record.deadline_ms - record.created_ms,
        "left_ms": record.deadline_ms - record.now_ms,
        "stages": [
            {
                "name": stage.name,
                "state": "done" if stage.over else _open(record) if stage.started else "waiting",
                "after": list(stage.after),
                "parallel": stage.parallel or None,
                "calls_running": stage.running,
                "calls_done": stage.done,
            }
            for stage in record.stages
        ],
    }


def _open(record: store_contract.Record) -> str:
    """The state of a stage that began and is not done: its workflow's, if that ended before it."""
    return record.state if record.state in ("cancelled", "expired") else "running"


def _passes(stage: store_contract.Stage) -> int:
    """Repetitions of a stage that may still come, this one included."""
    return max(1, stage.passes - stage.done // max(stage.parallel, 1))


def _refusal(error: store_contract.Rejected, operation: str, workflow: str, stage: str) -> error_table.GatewayError:
    """The store's refusal of an operation as the API's, with the header or field that it is about."""
    by_call = operation == "join"
    at_id, at_stage = ("x-tidegate-workflow", "x-tidegate-stage") if by_call else ("id", "stage")
    sentence, param = {
        "workflow_not_found": (
            f"workflow {workflow!r} is unknown; create it, or start it by a call with x-tidegate-deadline-ms",
            at_id,
        ),
        "workflow_ended": (f"workflow {workflow!r} has ended ({error.state}); create another one", at_id),
        "workflow_exists": (f"workflow {workflow!r} exists already; choose another id, or use it as it is", at_id),
        "stage_not_found": (f"workflow {workflow!r} has no stage {stage!r}; its own record names them", at_stage),
        "stage_already_done": (
            f"stage {stage!r} is done and takes no more calls or completions; name another stage, or repeat a request"
            " with the Idempotency-Key that it had",
            at_stage,
        ),
        "idempotency_key_reused": (
            "this Idempotency-Key was used with another body; use a new key for a new request",
            "Idempotency-Key",
        ),
        "too_many_stages": (
            f"workflow {workflow!r} has {store_contract.MOST_STAGES} stages already; create another one",
            at_stage,
        ),
        "too_many_calls": (
            f"workflow {workflow!r} has {store_contract.MOST_CALLS} calls under way; wait until some are done",
            at_id,
        ),
    }[error.code]
    code = "invalid_request" if error.code.startswith("too_many") else error.code
    return BadRequest(sentence, param=param, code=code)
