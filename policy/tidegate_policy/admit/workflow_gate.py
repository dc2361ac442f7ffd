"""How many workflows may be active at once, and which one starts next?

Above the knee of the pool more active workflows bring no more throughput: each one only takes longer, and all of them miss
their deadlines together. So at most `limit` workflows are active. The others wait before their first call, the earliest
deadline first. A workflow that has started never waits here again.

The limit follows Little's law. A pool that completes one workflow in `demand_s` seconds, when its engines batch as much as
they may, is saturated by `path_s / demand_s` workflows whose latency alone is `path_s` seconds. `HEADROOM` times as many
are allowed, because workflows do not spread evenly over engines and time. Both means come from finished workflows. Before
`FIRST_WORKFLOWS` have finished there is no limit.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidegate_policy.model import CallId, WorkflowId
from tidegate_policy.policies import QueuedRequest

HEADROOM = 2.5
FIRST_WORKFLOWS = 8
NEWEST_WEIGHT = 0.02
"""Weight of the newest workflow in the means, once many have finished."""
PAUSE_S = 5.0
"""A workflow of which no call has been here for longer (its client runs a tool, or is gone) is not active."""
REMEMBERED = 10_000
"""Started workflows that are remembered."""


@dataclass(slots=True)
class _Held:
    place: int
    """Its arrival among the held workflows."""
    items: dict[CallId, QueuedRequest] = field(default_factory=dict)


class WorkflowGate:
    """The active and the waiting workflows of one gateway."""

    def __init__(self, *, bounded: bool) -> None:
        """Without `bounded` no workflow waits."""
        self._bounded = bounded
        self._finished = 0
        self._path_s = 0.0
        self._demand_s = 0.0
        self._busy: dict[WorkflowId, int] = {}
        """Workflows with calls that have not ended, and the number of these calls."""
        self._idle: OrderedDict[WorkflowId, None] = OrderedDict()
        """Started workflows without such a call, the one that is idle for longest first."""
        self._pauses: OrderedDict[WorkflowId, float] = OrderedDict()
        """Those of them that still count as active, with the instant at which the pause began."""
        self._held: dict[WorkflowId, _Held] = {}
        self._workflow_of: dict[CallId, WorkflowId] = {}
        """The workflow of each held call."""
        self._order: list[tuple[float, int, WorkflowId]] = []
        """A heap of held workflows by deadline and arrival. Entries of workflows that are not held are skipped."""
        self._arrivals = 0
        self.share = 1.0
        """The share of the pool's calls that this gateway has sent."""

    def __len__(self) -> int:
        """Held calls."""
        return len(self._workflow_of)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for entry in sorted(self._order):
            if self._is_held(entry):
                yield from self._held[entry[2]].items.values()

    @property
    def limit(self) -> int | None:
        """Workflows that may be active; None = any number."""
        if not self._bounded or self._finished < FIRST_WORKFLOWS or self._demand_s <= 0.0:
            return None
        return max(round(HEADROOM * self.share * self._path_s / self._demand_s), 1)

    @property
    def active(self) -> int:
        return len(self._busy) + len(self._pauses)

    @property
    def held(self) -> int:
        """Workflows that wait."""
        return len(self._held)

    def must_wait(self, now: float, workflow: WorkflowId) -> bool:
        """Whether a call of the workflow that comes in now would wait here."""
        if workflow in self._busy or workflow in self._idle:
            return False
        return workflow in self._held or self._full(now)

    def hold(self, item: QueuedRequest, workflow: WorkflowId) -> None:
        """The call waits until its workflow may start."""
        held = self._held.get(workflow)
        if held is None:
            self._arrivals += 1
            held = self._held[workflow] = _Held(self._arrivals)
            deadline_at_s = item.call.deadline_at_s
            if deadline_at_s is None:
                deadline_at_s = item.call.due_or_patience_at_s + item.call.left_s
            heapq.heappush(self._order, (deadline_at_s, held.place, workflow))
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
            del self._held[workflow]
            self._tidy()
        return item

    def enter(self, now: float, workflow: WorkflowId) -> None:
        """A call of the workflow enters the queue or goes on to an engine."""
        self._busy[workflow] = self._busy.get(workflow, 0) + 1
        self._idle.pop(workflow, None)
        self._pauses.pop(workflow, None)

    def leave(self, now: float, workflow: WorkflowId) -> None:
        """A call that had entered has left."""
        left = self._busy.get(workflow, 0) - 1
        if left > 0:
            self._busy[workflow] = left
        elif left == 0:
            del self._busy[workflow]
            self._idle[workflow] = None
            self._pauses[workflow] = now
            if len(self._idle) > REMEMBERED:
                self._pauses.pop(self._idle.popitem(last=False)[0], None)

    def over(self, workflow: WorkflowId) -> None:
        """The workflow has ended. A call of it that is still here keeps it active until the call leaves."""
        self._idle.pop(workflow, None)
        self._pauses.pop(workflow, None)

    def observe(self, path_s: float, demand_s: float) -> None:
        """A workflow has finished whose latency alone is `path_s`, and which took `demand_s` of the whole pool."""
        self._finished += 1
        weight = max(NEWEST_WEIGHT, 1 / self._finished)
        self._path_s += weight * (path_s - self._path_s)
        self._demand_s += weight * (demand_s - self._demand_s)

    def release(self, now: float) -> list[QueuedRequest]:
        """The calls of the workflows that may start now. The caller calls `enter` for each."""
        items: list[QueuedRequest] = []
        starting = 0
        while self._held and not self._full(now, starting):
            entry = heapq.heappop(self._order)
            if not self._is_held(entry):
                continue
            held = self._held.pop(entry[2])
            starting += 1
            for call_id in held.items:
                del self._workflow_of[call_id]
            items += held.items.values()
        return items

    def next_start_at_s(self) -> float | None:
        """The instant at which a workflow has paused for so long that another one may start; None = none waits."""
        return next(iter(self._pauses.values())) + PAUSE_S if self._held and self._pauses else None

    def _full(self, now: float, starting: int = 0) -> bool:
        limit = self.limit
        if limit is None:
            return False
        while self._pauses and next(iter(self._pauses.values())) + PAUSE_S <= now:
            self._pauses.popitem(last=False)
        return self.active + starting >= limit

    def _is_held(self, entry: tuple[float, int, WorkflowId]) -> bool:
        held = self._held.get(entry[2])
        return held is not None and held.place == entry[1]

    def _tidy(self) -> None:
        if len(self._order) > 2 * len(self._held) + 64:
            self._order = [entry for entry in self._order if self._is_held(entry)]
            heapq.heapify(self._order)
