"""The queue in which every waiting call stands, in the gateway and in the engine.

A `policies.Policy` orders it. Each lane is a heap with lazy removal: push, pop, skip and the re-key of one call cost
O(log n), the first k calls cost O(k log k), and a switch of the policy costs O(n log n). Each call has exactly one live
entry, and dead heap slots are skipped, so no sequence of operations loses or doubles a call.

Three events take a call in or out of service. `pop`: the call starts. `skip`: the start did not happen; the call returns
to its old place and its lane gets its turn back. `push_preempted`: the call ran, lost its place, and comes back before
its equals with new work. This module does not know time, engines or the reason why a call leaves.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tidegate_policy.model import CallId
from tidegate_policy.policies import Changed, Key, Policy, QueuedRequest


class DuplicateCall(ValueError):
    """A call with this id already waits in the queue."""


class EmptyQueue(LookupError):
    """Peek or pop on an empty queue."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    item: QueuedRequest
    lane: int
    key: Key
    rank: int
    """Arrival rank; preempted calls get ranks below all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A call that `pop` took, with all that `skip` needs to undo the start."""

    item: QueuedRequest
    lane: int
    lanes: frozenset[int]
    """The lanes in which calls waited just before the start."""
    rank: int
    policy: Policy
    queue: "WaitingQueue"


_Slot = tuple[Key, int, int, _Entry]
"""(key, rank, push number, entry): the push number is unique, so entries are never compared."""

_SLACK_SLOTS = 64
"""Dead slots that a lane may hold beyond one for each live entry before it is compacted."""


@dataclass(slots=True)
class _Heaps:
    """All entries under one policy."""

    policy: Policy
    live: dict[CallId, _Entry] = field(default_factory=dict)
    lanes: dict[int, list[_Slot]] = field(default_factory=dict)
    waiting_in: Counter[int] = field(default_factory=Counter)
    pushes: int = 0

    def insert(self, item: QueuedRequest, rank: int) -> None:
        """Adds a call, or replaces its entry. If the policy raises, nothing has changed."""
        entry = _Entry(item, self.policy.lane(item), self.policy.key(item), rank)
        old = self.live.get(item.call.id)
        if old is not None:
            self.forget(old)
            self.compact(old.lane)
        self.live[item.call.id] = entry
        self.waiting_in[entry.lane] += 1
        self.pushes += 1
        heapq.heappush(self.lanes.setdefault(entry.lane, []), (entry.key, rank, self.pushes, entry))

    def forget(self, entry: _Entry) -> None:
        del self.live[entry.item.call.id]
        self.waiting_in[entry.lane] -= 1
        if not self.waiting_in[entry.lane]:
            del self.waiting_in[entry.lane]

    def is_live(self, entry: _Entry) -> bool:
        return self.live.get(entry.item.call.id) is entry

    def compact(self, lane: int) -> None:
        slots = self.lanes[lane]
        if len(slots) > 2 * self.waiting_in[lane] + _SLACK_SLOTS:
            slots[:] = [slot for slot in slots if self.is_live(slot[3])]
            heapq.heapify(slots)

    def head(self) -> _Entry:
        if not self.live:
            raise EmptyQueue("the queue is empty")
        slots = self.lanes[self.policy.turns.next_lane(self.waiting_in.keys())]
        while not self.is_live(slots[0][3]):
            heapq.heappop(slots)
        return slots[0][3]

    def in_lane(self, lane: int) -> Iterator[_Entry]:
        """The live entries of a lane in order, found by walking down the heap: k entries cost O(k log k)."""
        slots = self.lanes[lane]
        frontier = [(slots[0], 0)] if slots else []
        while frontier:
            slot, index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(slots):
                    heapq.heappush(frontier, (slots[child], child))
            if self.is_live(slot[3]):
                yield slot[3]


class WaitingQueue:
    """Waiting calls in the order of a policy. The policy can be switched while they wait."""

    def __init__(self, policy: Policy, *, rekey: Callable[[Changed], object] | None = None) -> None:
        """`rekey` receives the ids whose keys a start or skip changed; by default this queue re-keys them. A scheduler
        with several queues under one policy re-keys them in each queue."""
        self._heaps = _Heaps(policy)
        self._on_changed = rekey or self.rekey
        self._back = 0
        self._front = 0

    @property
    def policy(self) -> Policy:
        return self._heaps.policy

    def push(self, item: QueuedRequest) -> None:
        """Adds a call behind its equals. Raises `DuplicateCall`."""
        self._check_new(item)
        self._heaps.insert(item, self._back + 1)
        self._back += 1

    def push_preempted(self, item: QueuedRequest) -> None:
        """Adds a call that was served and lost its place, before its equals. Raises `DuplicateCall`."""
        self._check_new(item)
        self._heaps.insert(item, self._front - 1)
        self._front -= 1

    def peek(self) -> QueuedRequest:
        """The call that `pop` would take. Raises `EmptyQueue`."""
        return self._heaps.head().item

    def pop(self, now: float) -> Start:
        """Starts the next call: its lane's turn is used, and the policy is told. Raises `EmptyQueue`."""
        heaps = self._heaps
        entry = heaps.head()
        lanes = frozenset(heaps.waiting_in)
        heapq.heappop(heaps.lanes[entry.lane])
        heaps.forget(entry)
        heaps.policy.turns.take(entry.lane, lanes)
        self._changed(heaps.policy.on_start(now, entry.item))
        return Start(item=entry.item, lane=entry.lane, lanes=lanes, rank=entry.rank, policy=heaps.policy, queue=self)

    def skip(self, now: float, start: Start) -> None:
        """Undoes a start: the call stands where it stood, and its lane has its turn back. Raises `DuplicateCall`.

        A call that started from another queue of the same scheduler stands before its equals."""
        policy = self._heaps.policy
        if start.queue is self:
            self._check_new(start.item)
            self._heaps.insert(start.item, start.rank)
        else:
            self.push_preempted(start.item)
        if start.policy is policy:
            policy.turns.give_back(start.lane, start.lanes)
        self._changed(policy.on_skip(now, start.item))

    def remove(self, call_id: CallId) -> QueuedRequest | None:
        """Takes a call out of turn (cancelled, expired); None if it does not wait here. No lane loses a turn."""
        entry = self._heaps.live.get(call_id)
        if entry is None:
            return None
        self._heaps.forget(entry)
        self._heaps.compact(entry.lane)
        return entry.item

    def update(self, item: QueuedRequest) -> None:
        """Replaces what is known of a waiting call; its arrival rank stays. Raises `KeyError` if it does not wait here."""
        self._heaps.insert(item, self._heaps.live[item.call.id].rank)

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

    def first(self, k: int) -> list[QueuedRequest]:
        """The first k waiting calls in the order of `pop`, in O(k log k)."""
        return list(islice(self, k))

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._heaps.live

    def __len__(self) -> int:
        return len(self._heaps.live)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All waiting calls in the order in which `pop` would give them if no other event came."""
        heaps = self._heaps
        left = dict(heaps.waiting_in)
        lanes = {lane: heaps.in_lane(lane) for lane in left}
        turns = heaps.policy.turns.copy()
        while left:
            lane = turns.next_lane(left.keys())
            yield next(lanes[lane]).item
            turns.take(lane, left.keys())
            left[lane] -= 1
            if not left[lane]:
                del left[lane]

    def _check_new(self, item: QueuedRequest) -> None:
        if item.call.id in self._heaps.live:
            raise DuplicateCall(f"call {item.call.id!r} already waits")

    def _changed(self, changed: Changed) -> None:
        if changed:
            self._on_changed(changed)


def switch(queues: Sequence[WaitingQueue], policy: Policy) -> None:
    """Puts several queues under one policy at once. If the policy raises for any call, no queue has changed."""
    built = []
    for queue in queues:
        heaps = _Heaps(policy)
        for entry in sorted(queue._heaps.live.values(), key=lambda entry: entry.rank):
            heaps.insert(entry.item, entry.rank)
        built.append(heaps)
    for queue, heaps in zip(queues, built, strict=True):
        queue._heaps = heaps
