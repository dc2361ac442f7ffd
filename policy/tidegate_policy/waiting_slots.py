"""The slots of a waiting queue: the waiting calls of each lane under one policy, in heaps with lazy removal.

`waiting_queue` is the interface. A dead slot is dropped when it surfaces, or when too many of its lane are dead. The calls
that a scan passed over move from the heap of their lane to a sorted list before it, so that the next scan passes over
each of them in O(1).
"""

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, cast

from tidegate_policy.policies import Key, Policy, QueuedRequest

if TYPE_CHECKING:
    from tidegate_policy.model import CallId


class EmptyQueue(LookupError):
    """No call waits, or the present scan has passed over all of them."""


class Entry:
    """A waiting call under one policy. It is a plain class, because a switch makes one for each waiting call."""

    __slots__ = ("alive", "item", "key", "lane", "rank", "scan")

    def __init__(self, item: QueuedRequest, lane: int, key: Key, rank: int, scan: int) -> None:
        self.item = item
        self.lane = lane
        self.key = key
        self.rank = rank  # of arrival; preempted calls get ranks below all others
        self.scan = scan  # the number of the last scan that passed over it
        self.alive = True


_Slot = tuple[Key, int, int, Entry]
"""(key, rank, push number, entry): the push number is unique, so entries are never compared."""

_SLACK_SLOTS = 64
"""Dead slots that a lane may hold beyond one for each live entry before it is compacted."""


@dataclass(slots=True)
class _Lane:
    heap: list[_Slot] = field(default_factory=list)
    front: list[_Slot] = field(default_factory=list)
    """Sorted; it holds calls that scans passed over."""
    cursor: int = 0
    """All live entries of `front` before this index were passed over in the present scan."""

    def head(self, scan: int) -> Entry:
        """The first candidate. The caller knows that there is one."""
        heap, front = self.heap, self.front
        while self.cursor < len(front):
            entry = front[self.cursor][3]
            if not entry.alive:
                del front[self.cursor]
            elif entry.scan == scan:
                self.cursor += 1
            else:
                break
        while heap:
            slot = heap[0]
            entry = slot[3]
            if not entry.alive:
                heapq.heappop(heap)
            elif entry.scan == scan:
                heapq.heappop(heap)
                if self.cursor and slot < front[self.cursor - 1]:
                    bisect.insort(front, slot, 0, self.cursor)
                else:
                    front.insert(self.cursor, slot)
                self.cursor += 1
            elif self.cursor < len(front) and front[self.cursor] < slot:
                break
            else:
                return entry
        return front[self.cursor][3]

    def compact(self) -> None:
        self.heap = [slot for slot in self.heap if slot[3].alive]
        heapq.heapify(self.heap)
        self.front = [slot for slot in self.front if slot[3].alive]
        self.cursor = 0

    def in_order(self) -> Iterator[Entry]:
        """The live entries in order, found by walking down the heap: k entries cost O(k log k)."""
        return (slot[3] for slot in heapq.merge(self.front, self._walk()) if slot[3].alive)

    def _walk(self) -> Iterator[_Slot]:
        heap = self.heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            slot, index = heapq.heappop(frontier)
            yield slot
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))


class _MayFail(Protocol):
    """A policy that serves calls by arrival while it fails (`engine.guarded_policy`)."""

    failing: bool


class Heaps:
    """All entries under one policy."""

    __slots__ = (
        "arrival_at",
        "arrivals",
        "guard",
        "lanes",
        "live",
        "open_in",
        "passed",
        "policy",
        "pushes",
        "scan",
        "waiting_in",
    )

    def __init__(self, policy: Policy, entries: Iterable[Entry] = (), *, scan: int = 1) -> None:
        """Takes over the calls, ranks and scan of `entries`. If the policy raises, the caller has lost nothing."""
        self.policy = policy
        self.guard = cast("_MayFail", policy) if hasattr(policy, "failing") else None
        self.live: dict[CallId, Entry] = {}
        self.lanes: dict[int, _Lane] = {}
        self.waiting_in: dict[int, int] = {}
        self.passed = 0  # live entries that the present scan has passed over
        self.pushes = 0
        self.scan = scan
        self.arrivals: list[Entry] | None = None  # by arrival, while the policy fails
        self.arrival_at = 0  # no entry of `arrivals` before this index is a candidate
        lane_of, key_of, live = policy.lane, policy.key, self.live
        slots_of: dict[int, list[_Slot]] = {}
        for old in entries:
            item = old.item
            entry = Entry(item, lane_of(item), key_of(item), old.rank, old.scan)
            self.pushes += 1
            slots_of.setdefault(entry.lane, []).append((entry.key, entry.rank, self.pushes, entry))
            live[item.call.id] = entry
            self.passed += entry.scan == scan
        for lane, slots in slots_of.items():
            heapq.heapify(slots)
            self.lanes[lane] = _Lane(slots)
            self.waiting_in[lane] = len(slots)
        self.open_in = self._open()

    def insert(self, item: QueuedRequest, rank: int) -> None:
        """Adds a call, or replaces its entry. If the policy raises, nothing has changed."""
        entry = Entry(item, self.policy.lane(item), self.policy.key(item), rank, 0)
        old = self.live.get(item.call.id)
        if old is not None:
            entry.scan = old.scan
            self.forget(old)
        self.live[item.call.id] = entry
        self.pushes += 1
        lane = self.lanes.get(entry.lane)
        if lane is None:
            lane = self.lanes[entry.lane] = _Lane()
        heapq.heappush(lane.heap, (entry.key, rank, self.pushes, entry))
        self.waiting_in[entry.lane] = self.waiting_in.get(entry.lane, 0) + 1
        if entry.scan == self.scan:
            self.passed += 1
        else:
            self.open_in[entry.lane] = self.open_in.get(entry.lane, 0) + 1
        self.arrivals = None

    def forget(self, entry: Entry) -> None:
        entry.alive = False
        del self.live[entry.item.call.id]
        if entry.scan == self.scan:
            self.passed -= 1
        else:
            _less(self.open_in, entry.lane)
        _less(self.waiting_in, entry.lane)
        if entry.lane not in self.waiting_in:
            del self.lanes[entry.lane]
            return
        lane = self.lanes[entry.lane]
        if len(lane.heap) + len(lane.front) > 2 * self.waiting_in[entry.lane] + _SLACK_SLOTS:
            lane.compact()

    def head(self) -> Entry:
        if not self.open_in:
            raise EmptyQueue("the queue is empty" if not self.live else "the scan has passed over all waiting calls")
        if self.guard is not None and self.guard.failing:
            return self._first_to_arrive()
        open_in = self.open_in
        lane = next(iter(open_in)) if len(open_in) == 1 else self.policy.turns.next_lane(open_in.keys())
        return self.lanes[lane].head(self.scan)

    def failing(self) -> bool:
        return self.guard is not None and self.guard.failing

    def end_scan(self) -> None:
        if self.passed:
            self.passed = 0
            self.open_in = dict(self.waiting_in)
        for lane in self.lanes.values():
            lane.cursor = 0
        self.scan += 1
        self.arrival_at = 0

    def pass_over(self, entry: Entry) -> None:
        entry.scan = self.scan
        self.passed += 1
        _less(self.open_in, entry.lane)

    def in_order(self) -> Iterator[Entry]:
        if self.failing():
            yield from sorted(self.live.values(), key=attrgetter("rank"))
            return
        left = dict(self.waiting_in)
        lanes = {lane: self.lanes[lane].in_order() for lane in left}
        turns = self.policy.turns.copy()
        while left:
            lane = turns.next_lane(left.keys())
            entry = next(lanes[lane], None)
            if entry is not None:
                yield entry
            turns.take(lane, left.keys())
            left[lane] -= 1
            if not left[lane] or entry is None:
                del left[lane]

    def copy(self) -> "Heaps":
        """A copy whose order can be read while this object changes."""
        twin = Heaps(self.policy, scan=self.scan)
        twin.live = dict(self.live) if self.failing() else {}  # only the order of arrival reads it
        twin.waiting_in = dict(self.waiting_in)
        twin.lanes = {lane: _Lane(each.heap[:], each.front[:]) for lane, each in self.lanes.items()}
        return twin

    def _open(self) -> dict[int, int]:
        if not self.passed:
            return dict(self.waiting_in)
        open_in: dict[int, int] = {}
        for entry in self.live.values():
            if entry.scan != self.scan:
                open_in[entry.lane] = open_in.get(entry.lane, 0) + 1
        return open_in

    def _first_to_arrive(self) -> Entry:
        if self.arrivals is None:
            self.arrivals = sorted(self.live.values(), key=attrgetter("rank"))
            self.arrival_at = 0
        while True:
            entry = self.arrivals[self.arrival_at]
            if entry.alive and entry.scan != self.scan:
                return entry
            self.arrival_at += 1


def _less(counts: dict[int, int], lane: int) -> None:
    """Counts one call less in a lane; a lane without calls has no entry."""
    if counts[lane] == 1:
        del counts[lane]
    else:
        counts[lane] -= 1
