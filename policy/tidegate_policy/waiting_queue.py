"""The queue that every waiting call stands in, in the gateway and in the engine.

A `policies.Policy` orders it; a heap per lane with lazy removal, so every operation is O(log n) except a policy switch and
a full iteration (O(n log n)). It neither loses nor duplicates a call under any sequence of operations: each call has one
live entry, and heap slots that point to a dead entry are skipped. It does not know time, engines or why a call leaves.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tidegate_policy.model import CallId
from tidegate_policy.policies import Gate, Key, Policy, QueuedRequest


class DuplicateCall(ValueError):
    """A call with this id already waits here."""


class NobodyWaits(LookupError):
    """Peek or pop on an empty queue."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    ticket: QueuedRequest
    lane: int
    key: Key
    rank: int
    """Arrival rank; calls put at the front get ranks below all others."""


_Slot = tuple[Key, int, int, _Entry]
"""(key, rank, push number, entry): the push number is unique, so entries are never compared."""

_SLACK_SLOTS = 64
"""Dead slots tolerated beyond one for each live entry before a lane is compacted."""


class WaitingQueue:
    """Tickets in the order of a policy that can be switched while they wait."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._gate: Gate = policy.gate()
        self._live: dict[CallId, _Entry] = {}
        self._lanes: dict[int, list[_Slot]] = {}
        self._waiting_in: Counter[int] = Counter()
        self._back = 0
        self._front = 0
        self._pushes = 0

    @property
    def policy(self) -> Policy:
        return self._policy

    def push(self, ticket: QueuedRequest) -> None:
        """Adds a call behind its equals. Raises `DuplicateCall`."""
        self._back += 1
        self._insert(ticket, self._back)

    def push_front(self, ticket: QueuedRequest) -> None:
        """Adds a call before its equals: for one that was served and had to come back. Raises `DuplicateCall`."""
        self._front -= 1
        self._insert(ticket, self._front)

    def peek(self) -> QueuedRequest:
        """The call that `pop` would take. Raises `NobodyWaits`."""
        return self._head().ticket

    def pop(self) -> QueuedRequest:
        """Takes the next call and moves the gate. Raises `NobodyWaits`."""
        entry = self._head()
        waiting = frozenset(self._waiting_in)
        heapq.heappop(self._lanes[entry.lane])
        self._forget(entry)
        self._gate.on_pop(entry.lane, waiting)
        return entry.ticket

    def remove(self, call_id: CallId) -> QueuedRequest | None:
        """Takes a call out of turn (cancelled, expired); None if it does not wait here. The gate does not move."""
        entry = self._live.get(call_id)
        if entry is None:
            return None
        self._forget(entry)
        self._compact(entry.lane)
        return entry.ticket

    def rekey(self, ticket: QueuedRequest) -> None:
        """Replaces a waiting call's ticket, keeping its arrival rank. Raises `KeyError` if it does not wait here."""
        entry = self._live[ticket.call.id]
        self._forget(entry)
        self._insert(ticket, entry.rank)
        self._compact(entry.lane)

    def switch(self, policy: Policy) -> None:
        """Re-orders everybody in place under another policy (H-MAS C.1: no request lost, no engine stopped)."""
        entries = sorted(self._live.values(), key=lambda entry: entry.rank)
        self._policy, self._gate = policy, policy.gate()
        self._live, self._lanes, self._waiting_in = {}, {}, Counter()
        for entry in entries:
            self._insert(entry.ticket, entry.rank)

    def get(self, call_id: CallId) -> QueuedRequest | None:
        entry = self._live.get(call_id)
        return None if entry is None else entry.ticket

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All waiting calls in the order in which `pop` would give them if nothing else happened."""
        lanes = {
            lane: sorted((slot for slot in slots if self._is_live(slot[3])), reverse=True)
            for lane, slots in self._lanes.items()
        }
        waiting = {lane for lane, slots in lanes.items() if slots}
        gate = self._gate.copy()
        while waiting:
            lane = gate.next_lane(waiting)
            yield lanes[lane].pop()[3].ticket
            gate.on_pop(lane, waiting)
            if not lanes[lane]:
                waiting = waiting - {lane}

    def _head(self) -> _Entry:
        if not self._live:
            raise NobodyWaits("the queue is empty")
        slots = self._lanes[self._gate.next_lane(self._waiting_in.keys())]
        while not self._is_live(slots[0][3]):
            heapq.heappop(slots)
        return slots[0][3]

    def _insert(self, ticket: QueuedRequest, rank: int) -> None:
        if ticket.call.id in self._live:
            raise DuplicateCall(f"call {ticket.call.id!r} already waits")
        entry = _Entry(ticket, self._policy.lane(ticket), self._policy.key(ticket), rank)
        self._live[ticket.call.id] = entry
        self._waiting_in[entry.lane] += 1
        self._pushes += 1
        heapq.heappush(self._lanes.setdefault(entry.lane, []), (entry.key, rank, self._pushes, entry))

    def _forget(self, entry: _Entry) -> None:
        del self._live[entry.ticket.call.id]
        self._waiting_in[entry.lane] -= 1
        if not self._waiting_in[entry.lane]:
            del self._waiting_in[entry.lane]

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(entry.ticket.call.id) is entry

    def _compact(self, lane: int) -> None:
        slots = self._lanes[lane]
        if len(slots) > 2 * self._waiting_in[lane] + _SLACK_SLOTS:
            slots[:] = [slot for slot in slots if self._is_live(slot[3])]
            heapq.heapify(slots)
