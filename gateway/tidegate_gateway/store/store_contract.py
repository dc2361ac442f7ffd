"""The contract of a store: the state that gateways share or that outlives them, its values, its errors and its operations.

`valkey_store` implements it over Valkey; `workflows`, `lifecycle` and `coordination` use it. Instants are the store's own
milliseconds, so the clocks of gateways do not matter.

    StoreError
    ├── Unavailable         no answer; nothing is known about the change
    │   └── Slow            no answer to this command in time
    └── Rejected            the store rejected it, with a code of `error_table.TABLE`, too_many_stages or too_many_calls
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidegate_gateway import stage_declaration
from tidegate_gateway.store import tenant_ids
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad
from tidegate_policy.model import Backlog, EngineId

State = Literal["running", "done", "cancelled", "expired"]
Outcome = Literal["met", "late", "failed", "cancelled", "expired"]
"""`met` and `late` are done. The time of `failed` and `expired` was over before they were done; in a failed one the
last call of a stage failed."""
STATES: tuple[State, ...] = ("running", "done", "cancelled", "expired")

MOST_CALLS = 10_000
"""Calls of one workflow that may be under way at the same time."""


class StoreError(Exception):
    """The store did not carry out an operation."""


class Unavailable(StoreError):
    """The store does not answer."""


class NotSent(Unavailable):
    """The store has not got this command, because it did not answer the ones before it."""


class Slow(Unavailable):
    """The store did not answer this command in time. It may answer others, so the store is not taken for down."""


class Rejected(StoreError):
    """The store answered, and rejected the operation."""

    def __init__(self, code: str, state: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage as recorded."""

    name: str
    after: tuple[str, ...] = ()
    parallel: int = 0
    """Declared calls at the same time; 0 = undeclared."""
    passes: int = 1
    """How often they may be repeated."""
    declared: bool = True
    """False for a stage that its first call added to the workflow."""
    started: bool = False
    over: bool = False
    running: int = 0
    done: int = 0
    share_ms: int | None = None
    """The budget of its first call that ended; None = no call had one."""
    started_ms: int | None = None
    """The instant at which its first call joined."""
    ended_ms: int | None = None
    """The instant at which its last call ended, or at which a client completed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A workflow as recorded, at the store's instant `now_ms`."""

    id: str
    """Unique in the pool (`tenant_ids`)."""
    state: State
    template: str
    tenant: str
    created_ms: int
    deadline_ms: int
    now_ms: int
    stages: tuple[Stage, ...]
    outcome: Outcome | None = None
    """None while it runs."""
    ended_ms: int | None = None

    @property
    def uncalled(self) -> list[str]:
        """The declared stages that were over without a call: a client has completed them, or calls of a later stage have
        begun. The rest of a workflow that was completed early tells nothing."""
        passed = {name for stage in self.stages if stage.done for name in stage.after}
        return [
            stage.name
            for stage in self.stages
            if stage.declared and (stage.started or stage.name in passed) and not stage.done and stage.share_ms is None
        ]

    @property
    def client_id(self) -> str:
        """Its id as clients see it."""
        return tenant_ids.of_client(self.id)


def size(record: Record) -> int:
    """About the bytes of a record as a client sees it."""
    return 200 + sum(180 + len(stage.name) + sum(map(len, stage.after)) for stage in record.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWorkflow:
    id: str
    deadline_ms: int
    """Milliseconds from now."""
    template: str = ""
    tenant: str = ""
    stages: tuple[stage_declaration.StageDeclaration, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A policy that a person or the steering loop chose."""

    policy: str
    reason: str
    left_s: float | None
    """Seconds until the choice ends; None = it does not end."""
    alternatives: tuple[str, ...] = ()
    """The other policies that the steering loop compared, best first."""
    expected: str = ""
    """What the steering loop expects of the switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The answer to one exchange with the other gateways."""

    others: Mapping[EngineId, Backlog] = field(default_factory=dict)
    tenants: PoolLoad = NO_LOAD
    """What tenants have at the other gateways, together."""
    gateways: int = 1
    """Gateways of the pool that live, this one included."""
    dead: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    override: Chosen | None = None
    steered: Chosen | None = None
    now_s: float | None = None
    """The store's clock at the exchange, in seconds since 1970."""
    lost_s: float | None = None
    """The store has lost writes that it had acknowledged: those of at least so many seconds before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A client's key, and the request that it was sent with."""

    key: str
    scope: str
    """Tenant, method and path; the same key elsewhere is another key."""
    print: str = ""
    """A hash of the body: the same key with another body is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A workflow ended."""

    template: str
    outcome: Outcome


class Store(Protocol):
    """The contract; `tests/gateway` holds every implementation to it.

    `by` is the tenant that a request names; the workflows of other tenants are unknown to it. None sees all workflows.
    """

    async def create(self, workflow: NewWorkflow, *, once: Idempotency | None = None) -> Record: ...
    async def join(
        self, workflow: str, stage: str, call: str, *, deadline_ms: int | None, tenant: str, key: str | None = None
    ) -> Record:
        """A call enters a stage. An unknown workflow is created if there is a deadline. The tenant is `by` too.

        If a call of the stage with the same idempotency key ended well, the record does not change: the answer of that call
        was lost.
        """

    async def finish(
        self, workflow: str, call: str, *, ok: bool, share_ms: int | None = None, tenant: str | None = None
    ) -> Record:
        """A call of `tenant` ends, which had a budget of `share_ms`; without a tenant it waits for no turn. A good end
        counts once, even if the call was forgotten meanwhile or has the key of another call."""

    async def complete_stage(
        self, workflow: str, stage: str, *, by: str | None = None, once: Idempotency | None = None
    ) -> Record: ...
    async def complete(self, workflow: str, *, by: str | None = None, once: Idempotency | None = None) -> Record: ...
    async def cancel(self, workflow: str, *, by: str | None = None) -> Record: ...
    async def get(self, workflow: str, *, by: str | None = None) -> Record: ...
    async def listed(self, state: State | None, limit: int, *, by: str | None = None) -> tuple[list[Record], bool]:
        """The newest workflows by creation, newest first, and whether there are more. Large records make a list shorter
        than `limit`."""

    async def expire(self, limit: int) -> bool:
        """Ends at most `limit` workflows whose grace is over, and forgets ids of those whose records have lapsed. False if
        more may be overdue."""

    async def ends(self, limit: int) -> list[End]:
        """Workflows that ended by any operation of any gateway; each end is reported once, or never if this gateway or its
        connection fails meanwhile. Ends are counted in metrics only; the records keep them."""

    async def forget(self, gateway: str, limit: int) -> bool:
        """Takes a dead gateway's calls out of their workflows; False while some are left."""

    async def exchange(self, backlogs: Mapping[EngineId, Backlog], tenants: PoolLoad = NO_LOAD) -> Exchange:
        """Tells the others what this gateway has, and renews the lease. A gateway whose lease expired is dead, but only
        after one full lease of uninterrupted exchanges."""

    async def leave(self) -> None:
        """This gateway ends after its last exchange; its backlogs and its lease are removed at once."""

    async def choose_policy(
        self,
        kind: Literal["override", "steered"],
        policy: str | None,
        reason: str,
        for_s: float | None,
        *,
        alternatives: tuple[str, ...] = (),
        expected: str = "",
    ) -> Exchange:
        """Sets or clears a chosen policy; the choices as they are then."""

    async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
        """Books a tenant's tokens; seconds until the tenant may try again, 0 = booked. Used tokens are always booked, and
        wait for no turn."""
