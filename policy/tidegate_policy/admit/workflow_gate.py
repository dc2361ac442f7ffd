"""How many workflows may be active at once, and which one starts next?

Above the knee of the pool more active workflows bring no more throughput: each one only takes longer, and all of them miss
their deadlines together. So about `limit` workflows are active. The others wait before their first call. A workflow that
has started never waits here again.

Tenants share the limit by weight. A tenant with fewer active workflows than its share starts the next one at once, even if
other tenants have filled the limit: nobody knows when their workflows end. What a tenant leaves goes to the others: each
free place goes to the tenant with the fewest active workflows for its weight, and there to the earliest deadline. So more
than `limit` workflows are active only while tenants return from above their shares, or if more tenants than `limit` are
active, because each of them may have one workflow.

The limit follows Little's law (`saturation`). A pool that completes one workflow in `demand_s` seconds, when its engines
batch as much as they may, is saturated by `path_s / demand_s` workflows whose latency alone is `path_s` seconds. `HEADROOM`
times as many are allowed, because workflows do not spread evenly over engines and time. Both means come from finished
workflows. Before `FIRST_WORKFLOWS` have finished there is no limit.

Each tenant has means of its own, so that the workflows of one tenant do not decide how many another one may have: a tenant
may have its share by weight of the limit that its own workflows give. The limit of the pool is the mean of these limits by
weight, over the tenants that are here. A tenant of which too few workflows have finished has the largest limit of all.

Thousands of tenants may wait, so neither the end of a workflow nor the choice of the next one looks at all of them. Those
with a limit of their own are at most `KNOWN_TENANTS`. The others have one limit, so the one of them that is next has the
fewest active workflows for its weight, whether places are free or not, and a heap gives it.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidegate_policy.admit import saturation
from tidegate_policy.model import CallId, WorkflowId
from tidegate_policy.policies import QueuedRequest
from tidegate_policy.tenant_memory import TenantMemory

HEADROOM = 2.5
FIRST_WORKFLOWS = 8
PAUSE_S = 5.0
"""A workflow of which no call has been here for longer (its client runs a tool, goes on at another gateway, or is gone) is
not active. The bound is lower while workflows take less time alone: each one that ended at another gateway would hold a
place for many times its life."""
LEAST_WEIGHT = 1e-3
ROUNDING = 1e-9
"""Two shares that differ by less are equal, so that a tenant that is alone has the whole limit."""
REMEMBERED = 10_000
"""Started workflows of all tenants that are remembered."""
KNOWN_TENANTS = 256
"""Tenants whose means are remembered. The one of which no workflow has finished for longest is forgotten first."""


Entry = tuple[float, int, WorkflowId]
"""A held workflow: its deadline and its arrival."""
Turn = tuple[float, Entry, str]
"""A tenant with held workflows: its active workflows for its weight, and the first of the held ones."""


@dataclass(slots=True)
class _Held:
    tenant: str
    place: int
    """Its arrival among the held workflows."""
    items: dict[CallId, QueuedRequest] = field(default_factory=dict)


@dataclass(slots=True)
class _Tenant:
    weight: float
    limit: int
    """Workflows that it might have if it were alone, as its own have shown; 0 = as the largest of all tenants."""
    active: int = 0
    held: int = 0
    """Workflows that wait."""
    order: list[Entry] = field(default_factory=list)
    """A heap of held workflows by deadline and arrival. The first one is held; later entries may be out of date."""
    turn: Turn | None = None
    """Its valid entry among the turns of the tenants without a limit of their own."""


class WorkflowGate:
    """The active and the waiting workflows of one gateway."""

    def __init__(self, *, bounded: bool) -> None:
        """Without `bounded` no workflow waits."""
        self._bounded = bounded
        self._means = saturation.Means()
        """Of the workflows of all tenants."""
        self._means_of: OrderedDict[str, saturation.Means] = OrderedDict()
        self._largest = 0
        """The largest limit of a tenant; 0 = there is no limit yet."""
        self._busy: dict[WorkflowId, int] = {}
        """Workflows with calls that have not ended, and the number of these calls."""
        self._idle: dict[WorkflowId, str] = {}
        """Started workflows without such a call, and their tenants."""
        self._remembered: TenantMemory[WorkflowId, None] = TenantMemory(REMEMBERED)
        """The same workflows, by tenant."""
        self._pauses: OrderedDict[WorkflowId, float] = OrderedDict()
        """Those of them that still count as active, with the instant at which the pause began."""
        self._held: dict[WorkflowId, _Held] = {}
        self._workflow_of: dict[CallId, WorkflowId] = {}
        """The workflow of each held call."""
        self._tenants: dict[str, _Tenant] = {}
        """The tenants with active or held workflows."""
        self._turns: list[Turn] = []
        """A heap of those that wait without a limit of their own. The first entry is valid; later ones may be old."""
        self._limited: dict[str, _Tenant] = {}
        """Those of them that wait and have a limit of their own."""
        self._weights = self._limits = self._unlimited = 0.0
        """The sums of their weights, of their own limits times their weights, and of the weights of those without one."""
        self._tenant_of: dict[WorkflowId, str] = {}
        """The tenant of each active workflow."""
        self._arrivals = 0

    def __len__(self) -> int:
        """Held calls."""
        return len(self._workflow_of)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for entry in sorted(entry for tenant in self._tenants.values() for entry in tenant.order):
            if self._is_held(entry):
                yield from self._held[entry[2]].items.values()

    @property
    def limit(self) -> int | None:
        """Workflows of all tenants that may be active; None = any number."""
        if not self._bounded or not self._largest:
            return None
        limits = self._limits + self._unlimited * self._largest
        return max(round(limits / self._weights), 1) if self._tenants else self._largest

    @property
    def active(self) -> int:
        return len(self._tenant_of)

    @property
    def held(self) -> int:
        """Workflows that wait."""
        return len(self._held)

    def must_wait(self, now: float, workflow: WorkflowId, tenant: str) -> bool:
        """Whether a call of the tenant's workflow that comes in now would wait here."""
        if workflow in self._busy or workflow in self._idle:
            return False
        if workflow in self._held:
            return True
        limit = self._end_pauses(now)
        if limit is None or self.active < limit:
            return False
        known = self._tenants.get(tenant)
        if known is None:
            return False  # each tenant may have one
        return known.active >= self._share(known)

    def hold(self, item: QueuedRequest, workflow: WorkflowId) -> None:
        """The call waits until its workflow may start."""
        held = self._held.get(workflow)
        if held is None:
            self._arrivals += 1
            held = self._held[workflow] = _Held(item.call.tenant, self._arrivals)
            tenant = self._tenant(item.call.tenant, item.call.weight)
            tenant.held += 1
            deadline_at_s = item.call.deadline_at_s
            if deadline_at_s is None:
                deadline_at_s = item.call.due_or_patience_at_s + item.call.left_s
            heapq.heappush(tenant.order, (deadline_at_s, held.place, workflow))
            self._take_place(item.call.tenant, tenant)
        held.items[item.call.id] = item
        self._workflow_of[item.call.id] = workflow

    def update(self, item: QueuedRequest) -> bool:
        """Replaces what is known of a held call. False if it is not held."""
        workflow = self._workflow_of.get(item.call.id)
        if workflow is None:
            return False
        self._held[workflow].items[item.call.id] = item
        return True

    def remove(self, call_id: CallId) -> QueuedRequest | None:
        """Takes out a held call that was cancelled or has expired; None if it is not held."""
        workflow = self._workflow_of.pop(call_id, None)
        if workflow is None:
            return None
        held = self._held[workflow]
        item = held.items.pop(call_id)
        if not held.items:
            self._hold_no_more(workflow)
        return item

    def enter(self, now: float, workflow: WorkflowId, tenant: str, weight: float) -> None:
        """A call of the tenant's workflow enters the queue or goes on to an engine."""
        self._busy[workflow] = self._busy.get(workflow, 0) + 1
        self._idle_no_more(workflow)
        self._pauses.pop(workflow, None)
        tenant = self._tenant_of.get(workflow, tenant)
        self._activate(workflow, tenant, self._tenant(tenant, weight))

    def leave(self, now: float, workflow: WorkflowId) -> None:
        """A call that had entered has left."""
        left = self._busy.get(workflow, 0) - 1
        if left > 0:
            self._busy[workflow] = left
        elif left == 0:
            del self._busy[workflow]
            self._pause(now, workflow, self._tenant_of[workflow])

    def over(self, workflow: WorkflowId) -> None:
        """The workflow has ended. A call of it that is still here keeps it active until the call leaves."""
        self._idle_no_more(workflow)
        self._end_pause(workflow)

    def observe(self, tenant: str, path_s: float, demand_s: float) -> None:
        """A workflow of the tenant has finished whose latency alone is `path_s`, and which took `demand_s` of the whole
        pool."""
        means = self._means_of.setdefault(tenant, saturation.Means())
        self._means_of.move_to_end(tenant)
        forgotten = self._means_of.popitem(last=False)[0] if len(self._means_of) > KNOWN_TENANTS else tenant
        self._means.observe(path_s, demand_s)
        means.observe(path_s, demand_s)
        self._largest = max(map(_limit, self._means_of.values())) or _limit(self._means)
        for name in (tenant, forgotten):
            known = self._tenants.get(name)
            if known is not None:
                self._weigh(name, known, known.weight)

    def release(self, now: float) -> list[QueuedRequest]:
        """The calls of the workflows that may start now. The caller calls `enter` for each."""
        items: list[QueuedRequest] = []
        limit = self._end_pauses(now)
        while self._held:
            name = self._next_tenant(limit)
            if name is None:
                break
            tenant = self._tenants[name]
            workflow = heapq.heappop(tenant.order)[2]
            self._activate(workflow, name, tenant)
            # Until `enter`: a call may wait for its tenant's share, and go away there.
            self._pause(now, workflow, name)
            held = self._held[workflow]
            for call_id in held.items:
                del self._workflow_of[call_id]
            items += held.items.values()
            self._hold_no_more(workflow)
        return items

    def next_start_at_s(self) -> float | None:
        """The instant at which a workflow has paused for so long that another one may start; None = none waits."""
        return next(iter(self._pauses.values())) + self._pause_s if self._held and self._pauses else None

    @property
    def _pause_s(self) -> float:
        """The longest pause of an active workflow."""
        return min(PAUSE_S, self._means.alone_s) if self._means.count else PAUSE_S

    def _next_tenant(self, limit: int | None) -> str | None:
        """The tenant whose workflow starts next; None if none may start."""
        free = limit is None or self.active < limit
        first: Turn | None = None
        if self._turns:
            known = self._tenants[self._turns[0][2]]
            if free or known.active < self._share(known):
                first = self._turns[0]
        for name, known in self._limited.items():
            if free or known.active < self._share(known):
                turn = (known.active / known.weight, known.order[0], name)
                if first is None or turn < first:
                    first = turn
        return None if first is None else first[2]

    def _take_place(self, name: str, tenant: _Tenant) -> None:
        """What decides the turn of the tenant may have changed: its active workflows, its weight, its limit, or the first
        of its held workflows."""
        while tenant.order and not self._is_held(tenant.order[0]):
            heapq.heappop(tenant.order)
        turn: Turn | None = None
        if tenant.order and not tenant.limit:
            turn = (tenant.active / tenant.weight, tenant.order[0], name)
        if turn != tenant.turn:
            tenant.turn = turn
            if turn is not None:
                heapq.heappush(self._turns, turn)
                if len(self._turns) > 2 * len(self._tenants) + 64:
                    self._turns = [known.turn for known in self._tenants.values() if known.turn is not None]
                    heapq.heapify(self._turns)
            while self._turns and not self._is_valid(self._turns[0]):
                heapq.heappop(self._turns)
        if tenant.order and tenant.limit:
            self._limited[name] = tenant
        else:
            self._limited.pop(name, None)

    def _is_valid(self, turn: Turn) -> bool:
        known = self._tenants.get(turn[2])
        return known is not None and known.turn == turn

    def _share(self, tenant: _Tenant) -> int:
        """Workflows that the tenant may have active whatever the others do: at least one."""
        limit = tenant.limit or self._largest
        return max(math.ceil(limit * tenant.weight / self._weights - ROUNDING), 1)

    def _activate(self, workflow: WorkflowId, name: str, tenant: _Tenant) -> None:
        if workflow not in self._tenant_of:
            self._tenant_of[workflow] = name
            tenant.active += 1
            self._take_place(name, tenant)

    def _pause(self, now: float, workflow: WorkflowId, tenant: str) -> None:
        """The workflow has started, and no call of it is here."""
        self._idle[workflow] = tenant
        self._pauses[workflow] = now
        gone = self._remembered.put(tenant, workflow, None)
        if gone is not None:
            del self._idle[gone[1]]
            self._end_pause(gone[1])

    def _idle_no_more(self, workflow: WorkflowId) -> None:
        tenant = self._idle.pop(workflow, None)
        if tenant is not None:
            self._remembered.pop(tenant, workflow)

    def _end_pauses(self, now: float) -> int | None:
        """Ends the pauses that are over, if there is a limit; returns the limit."""
        limit = self.limit
        while limit is not None and self._pauses and next(iter(self._pauses.values())) + self._pause_s <= now:
            self._end_pause(next(iter(self._pauses)))
        return limit

    def _end_pause(self, workflow: WorkflowId) -> None:
        """The workflow is not active any longer, unless a call of it is here."""
        if self._pauses.pop(workflow, None) is not None:
            name = self._tenant_of.pop(workflow)
            tenant = self._tenants[name]
            tenant.active -= 1
            self._take_place(name, tenant)
            self._forget_if_gone(name)

    def _hold_no_more(self, workflow: WorkflowId) -> None:
        name = self._held.pop(workflow).tenant
        tenant = self._tenants[name]
        tenant.held -= 1
        if len(tenant.order) > 2 * tenant.held + 64:
            tenant.order = [entry for entry in tenant.order if self._is_held(entry)]
            heapq.heapify(tenant.order)
        self._take_place(name, tenant)
        self._forget_if_gone(name)

    def _tenant(self, name: str, weight: float) -> _Tenant:
        """The tenant, of whom a call with this weight has come."""
        known = self._tenants.get(name)
        if known is None:
            known = self._tenants[name] = _Tenant(0.0, 0)
        self._weigh(name, known, max(weight, LEAST_WEIGHT))
        return known

    def _weigh(self, name: str, tenant: _Tenant, weight: float) -> None:
        """The tenant has this weight, and the limit that its workflows have shown by now."""
        means = self._means_of.get(name)
        limit = 0 if means is None else _limit(means)
        self._weights += weight - tenant.weight
        self._limits += weight * limit - tenant.weight * tenant.limit
        self._unlimited += (0.0 if limit else weight) - (0.0 if tenant.limit else tenant.weight)
        tenant.weight, tenant.limit = weight, limit
        if weight:
            self._take_place(name, tenant)

    def _forget_if_gone(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.active and not tenant.held:
            self._weigh(name, tenant, 0.0)
            del self._tenants[name]
            if not self._tenants:
                self._weights = self._limits = self._unlimited = 0.0

    def _is_held(self, entry: Entry) -> bool:
        held = self._held.get(entry[2])
        return held is not None and held.place == entry[1]


def _limit(means: saturation.Means) -> int:
    """Workflows that may be active if all are like these; 0 = it is not known yet."""
    if means.count < FIRST_WORKFLOWS or means.demand_s <= 0.0:
        return 0
    return max(round(HEADROOM * means.alone_s / means.demand_s), 1)
