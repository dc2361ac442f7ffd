"""The queue in which every waiting call stands, in the gateway and in the engine.

A `policies.Policy` orders it. Each lane is a heap with lazy removal: push, pop and the re-key of one call cost O(log n),
the first k calls cost O(k log k), and a switch of the policy costs O(n). Each call has exactly one live entry, and dead
slots are dropped when they surface, so no sequence of operations loses or doubles a call.

A scheduler that cannot start each call that it looks at scans the queue. `peek` gives the next candidate, `pass_over` sets
it aside, and `end_scan` makes all waiting calls candidates again. A call that was passed over still waits, in its place,
and takes no turn from its lane. Calls that one scan passed over stand in a sorted list before the heap, so the next scan
passes over each of them in O(1). `start` begins to serve any waiting call, also one that was passed over.
`push_preempted`: the call ran, lost its place, and comes back before its equals with new work.

While a guarded policy fails (`engine.guarded_policy`), calls are served in the order of their arrival. This module does
not know time, engines or the reason why a call leaves.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import islice

from tidegate_policy import waiting_slots
from tidegate_policy.model import CallId
from tidegate_policy.policies import Changed, Policy, QueuedRequest
from tidegate_policy.waiting_slots import EmptyQueue

__all__ = ["DuplicateCall", "EmptyQueue", "WaitingQueue", "switch"]


ONE_LANE, SEVERAL_LANES = "one lane", "several lanes"


class DuplicateCall(ValueError):
    """A call with this id already waits in the queue."""


def _ignored(call_id: CallId) -> None:
    return None


class WaitingQueue:
    """Waiting calls in the order of a policy. The policy can be switched while they wait."""

    def __init__(
        self,
        policy: Policy,
        *,
        rekey: Callable[[Changed], object] | None = None,
        started: Callable[[CallId], object] = _ignored,
        waits: Callable[[CallId], object] = _ignored,
    ) -> None:
        """`rekey` receives the ids whose keys a start changed; by default this queue re-keys them. A scheduler
        with several queues under one policy re-keys them in each queue. `started` and `waits` receive each call that
        starts, and each that begins to wait here."""
        self._heaps = waiting_slots.Heaps(policy)
        self._on_changed = rekey or self.rekey
        self._started = started
        self._waits = waits
        self._back = 0
        self._front = 0

    @property
    def policy(self) -> Policy:
        return self._heaps.policy

    @property
    def candidates(self) -> int:
        """Waiting calls that the present scan has not passed over."""
        return len(self._heaps.live) - self._heaps.passed

    def push(self, item: QueuedRequest) -> None:
        """Adds a call behind its equals. Raises `DuplicateCall`."""
        self._begins_to_wait(item)
        self._heaps.insert(item, self._back + 1)
        self._back += 1

    def push_preempted(self, item: QueuedRequest) -> None:
        """Adds a call that was served and lost its place, before its equals. Raises `DuplicateCall`."""
        self._begins_to_wait(item)
        self._heaps.insert(item, self._front - 1)
        self._front -= 1

    def peek(self) -> QueuedRequest:
        """The next candidate. Raises `EmptyQueue`."""
        return self._heaps.head().item

    def pass_over(self) -> QueuedRequest:
        """Sets the next candidate aside until `end_scan`. It still waits, and no lane uses a turn. Raises `EmptyQueue`."""
        entry = self._heaps.head()
        self._heaps.pass_over(entry)
        return entry.item

    def set_aside(self, call_id: CallId) -> None:
        """`pass_over` for the call that `peek` gave. Raises `KeyError` if it does not wait here."""
        self._heaps.pass_over(self._heaps.live[call_id])

    def end_scan(self) -> None:
        """All waiting calls are candidates again."""
        self._heaps.end_scan()

    def pop(self, now: float) -> QueuedRequest:
        """Starts the next candidate: its lane's turn is used, and the policy is told. Raises `EmptyQueue`."""
        return self._start(now, self._heaps.head())

    def start(self, now: float, call_id: CallId) -> QueuedRequest:
        """Starts a waiting call, also one that the scan passed over. Raises `KeyError` if it does not wait here."""
        return self._start(now, self._heaps.live[call_id])

    def remove(self, call_id: CallId) -> QueuedRequest | None:
        """Takes a call out of turn (cancelled, expired); None if it does not wait here. No lane loses a turn."""
        entry = self._heaps.live.get(call_id)
        if entry is None:
            return None
        self._heaps.forget(entry)
        return entry.item

    def update(self, item: QueuedRequest) -> None:
        """Replaces what is known of a waiting call; its arrival rank and turn stay. Raises `KeyError` if it does not wait
        here."""
        old = self._heaps.live[item.call.id]
        if item.call.turn != old.item.call.turn:
            marks = old.item.call
            item = replace(item, call=replace(item.call, yields=marks.yields, owed=marks.owed, ahead=marks.ahead))
        self._heaps.insert(item, old.rank)

    def promote(self, call_id: CallId) -> QueuedRequest:
        """The call is owed a place from here on; returns it. Its arrival rank stays. Raises `KeyError` if it does not wait
        here."""
        old = self._heaps.live[call_id]
        item = replace(old.item, call=replace(old.item.call, owed=True, ahead=False))
        self._heaps.insert(item, old.rank)
        return item

    def rekey(self, changed: Changed) -> None:
        """Asks the policy again for the lane and key of these calls. Ids that do not wait here are ignored."""
        for call_id in changed:
            entry = self._heaps.live.get(call_id)
            if entry is not None:
                self.update(entry.item)

    def switch(self, policy: Policy) -> None:
        """Puts all waiting calls into the order of another policy. If the policy raises, nothing has changed."""
        switch([self], policy)

    def get(self, call_id: CallId) -> QueuedRequest | None:
        entry = self._heaps.live.get(call_id)
        return None if entry is None else entry.item

    def ids(self) -> Set[CallId]:
        """The ids of all waiting calls, in no order."""
        return self._heaps.live.keys()

    def by_lane(self) -> dict[str, int]:
        """The number of waiting calls of each lane by its name. The lanes of tenants and groups, which are many, are one
        entry."""
        waiting = {lane: each.waiting for lane, each in self._heaps.lanes.items()}
        names = self.policy.lane_names
        if not waiting:
            return {}
        if waiting.keys() <= names.keys():
            return {names[lane]: waiting[lane] for lane in sorted(waiting)}
        return {ONE_LANE if len(waiting) == 1 else SEVERAL_LANES: sum(waiting.values())}

    def first(self, k: int) -> list[QueuedRequest]:
        """The first k waiting calls in the order of `pop`, in O(k log k)."""
        return list(islice(self, k))

    def later(self) -> Callable[[int], list[QueuedRequest]]:
        """The first k of the calls that wait now, for one reader that computes their order later, also in another thread.
        It costs a copy of the slots. A policy with several lanes may share their turns by what it learns until then."""
        entries = self._heaps.later()
        return lambda k: [entry.item for entry in islice(entries, k)]

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._heaps.live

    def __len__(self) -> int:
        """All waiting calls, also those that the scan passed over."""
        return len(self._heaps.live)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All waiting calls in the order in which `pop` would give them if no other event came."""
        for entry in self._heaps.in_order():
            yield entry.item

    def _start(self, now: float, entry: waiting_slots.Entry) -> QueuedRequest:
        heaps = self._heaps
        lanes = heaps.lanes_beside(entry)
        heaps.forget(entry)
        self._started(entry.item.call.id)
        if not heaps.failing():
            heaps.policy.turns.take(entry.lane, lanes)
        self._changed(heaps.policy.on_start(now, entry.item))
        return entry.item

    def _begins_to_wait(self, item: QueuedRequest) -> None:
        if item.call.id in self._heaps.live:
            raise DuplicateCall(f"call {item.call.id!r} already waits")
        self._waits(item.call.id)

    def _changed(self, changed: Changed) -> None:
        if changed:
            self._on_changed(changed)


def switch(queues: Sequence[WaitingQueue], policy: Policy) -> None:
    """Puts several queues under one policy at once. If the policy raises for any call, no queue has changed."""
    found = [queue._heaps.sorted_by(policy) for queue in queues]
    for queue, order in zip(queues, found, strict=True):
        queue._heaps.switch(order)
