"""The slots of a waiting queue: the waiting calls of each lane under one policy, in heaps with lazy removal. They are one
file because all operations change the same entries.

`waiting_queue` is the interface. Calls that yield come last in all lanes together, and calls that go before others come
first. The policy shares the starts between the lanes that have calls of the same turn (`Call.turn`).

A dead slot is dropped when it surfaces, or when too many of its lane are dead. The calls that a scan passed over move from
the heap of their lane to a sorted list before it, so that the next scan passes over each of them in O(1).
"""

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, cast

from tidegate_policy import heap_order
from tidegate_policy.policies import Key, Policy, QueuedRequest, Turns

if TYPE_CHECKING:
    from tidegate_policy.model import CallId


class EmptyQueue(LookupError):
    """No call waits, or the present scan has passed over all of them."""


class Entry:
    """A waiting call."""

    __slots__ = ("alive", "forgotten", "item", "lane", "rank", "scan", "turn")

    def __init__(self, item: QueuedRequest, lane: int, rank: int, scan: int) -> None:
        self.item = item
        self.turn = item.call.turn
        self.lane = lane
        self.rank = rank  # of arrival; preempted calls get ranks below all others
        self.scan = scan  # the number of the last scan that passed over it
        self.alive = True
        self.forgotten = 0  # the number of entries that had been forgotten when it died, itself included


_Slot = tuple[int, Key, int, int, Entry]
"""(turn, key, rank, push number, entry); the push number is unique, so entries are never compared."""

_Counts = dict[int, dict[int, int]]
"""Calls of each turn (`Call.turn`) in each lane that has any."""

_PLACE = attrgetter("turn", "lane")
_SLACK_SLOTS = 64
"""Dead slots that a lane may hold beyond one for each live entry before it is compacted."""


@dataclass(slots=True)
class _Lane:
    waiting: int
    """Live entries."""
    heap: list[_Slot] = field(default_factory=list)
    front: list[_Slot] = field(default_factory=list)
    """Sorted; it holds calls that scans passed over."""
    cursor: int = 0
    """All live entries of `front` before this index were passed over in the present scan."""

    def head(self, scan: int) -> Entry:
        """The first candidate. The caller knows that there is one."""
        heap, front = self.heap, self.front
        while self.cursor < len(front):
            entry = front[self.cursor][4]
            if not entry.alive:
                del front[self.cursor]
            elif entry.scan == scan:
                self.cursor += 1
            else:
                break
        while heap:
            slot = heap[0]
            entry = slot[4]
            if not entry.alive:
                heapq.heappop(heap)
            elif self.cursor < len(front) and front[self.cursor] < slot:
                break
            elif entry.scan == scan:
                heapq.heappop(heap)
                if self.cursor and slot < front[self.cursor - 1]:
                    bisect.insort(front, slot, 0, self.cursor)
                else:
                    front.insert(self.cursor, slot)
                self.cursor += 1
            else:
                return entry
        return front[self.cursor][4]

    def compact(self) -> None:
        self.heap = [slot for slot in self.heap if slot[4].alive]
        heapq.heapify(self.heap)
        self.front = [slot for slot in self.front if slot[4].alive]
        self.cursor = 0

    def in_order(self) -> Iterator[Entry]:
        """The live entries in order, found by walking down the heap: k entries cost O(k log k). Those of `front` before the
        heap cost O(1) each."""
        heap, front = self.heap, self.front
        first = bisect.bisect_left(front, heap[0]) if heap and front else len(front)
        for slot in itertools.islice(front, first):
            if slot[4].alive:
                yield slot[4]
        slots = heap_order.ascending(heap)
        for slot in slots if first == len(front) else heapq.merge(front[first:], slots):
            if slot[4].alive:
                yield slot[4]

    def copy(self) -> "_Lane":
        return _Lane(self.waiting, self.heap[:], self.front[:])

    def drained(self, forgotten: int) -> Iterator[Entry]:
        """The entries in order that were alive when so many had been forgotten. They are taken off the heap, which is
        faster than `in_order` for many entries."""
        for slot in self._merged(self._pops()):
            if slot[4].alive or slot[4].forgotten > forgotten:
                yield slot[4]

    def _merged(self, slots: Iterator[_Slot]) -> Iterator[_Slot]:
        return heapq.merge(self.front, slots) if self.front else slots

    def _pops(self) -> Iterator[_Slot]:
        heap, pop = self.heap, heapq.heappop
        while heap:
            yield pop(heap)


class _Guard(Protocol):
    """A policy that counts its events, and under which calls are served by arrival while it fails
    (`engine.guarded_policy`)."""

    failing: bool
    events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """All entries under a policy that is not in force yet."""

    policy: Policy
    entries: list[Entry]
    lanes: list[int]
    """The lane of each entry."""
    heaps: Mapping[int, list[_Slot]]
    """The heap of each lane."""


class Heaps:
    """All entries under one policy."""

    __slots__ = (
        "arrival_at",
        "arrivals",
        "choice",
        "choice_at",
        "forgotten",
        "guard",
        "lanes",
        "live",
        "open_by",
        "passed",
        "policy",
        "pushes",
        "scan",
        "waiting_by",
    )

    def __init__(self, policy: Policy) -> None:
        self.live: dict[CallId, Entry] = {}
        self.lanes: dict[int, _Lane] = {}
        self.waiting_by: _Counts = {}
        self.open_by: _Counts = {}  # without those that the present scan has passed over
        self.passed = 0  # live entries that the present scan has passed over
        self.pushes = 0
        self.forgotten = 0
        self.scan = 1
        self._follow(policy)

    def sorted_by(self, policy: Policy) -> Sorted:
        """All entries under another policy. Nothing changes, also if the policy raises."""
        entries = list(self.live.values())
        items = [entry.item for entry in entries]
        lanes = policy.lanes(items)
        ranks = [entry.rank for entry in entries]
        marks = [entry.turn for entry in entries]
        slots = zip(marks, policy.keys(items), ranks, itertools.count(self.pushes + 1), entries, strict=False)
        heaps: defaultdict[int, list[_Slot]] = defaultdict(list)
        if len(set(lanes)) == 1:
            heaps[lanes[0]] = list(slots)
        else:
            for lane, slot in zip(lanes, slots, strict=True):
                heaps[lane].append(slot)
        for heap in heaps.values():
            heapq.heapify(heap)
        return Sorted(policy=policy, entries=entries, lanes=lanes, heaps=heaps)

    def switch(self, to: Sorted) -> None:
        """Puts a policy into force. No entry has come or gone since `sorted_by`."""
        for entry, lane in zip(to.entries, to.lanes, strict=True):
            entry.lane = lane
        self.lanes = {lane: _Lane(len(heap), heap) for lane, heap in to.heaps.items()}
        self.waiting_by = _counted(to.entries)
        if self.passed:
            self.open_by = _counted([entry for entry in to.entries if entry.scan != self.scan])
        else:
            self.open_by = _copy(self.waiting_by)
        self.pushes += len(to.entries)
        self._follow(to.policy)

    def _follow(self, policy: Policy) -> None:
        self.policy = policy
        self.guard = cast("_Guard", policy) if hasattr(policy, "failing") else None
        self.arrivals: list[Entry] | None = None  # by arrival, while the policy fails
        self.arrival_at = 0  # no entry of `arrivals` before this index is a candidate
        self.choice: int | None = None  # the lane that the policy chose last, while that choice holds
        self.choice_at = 0  # the events of the guard at that time

    def insert(self, item: QueuedRequest, rank: int) -> None:
        """Adds a call, or replaces its entry. If the policy raises, nothing has changed."""
        entry = Entry(item, self.policy.lane(item), rank, 0)
        key = self.policy.key(item)
        old = self.live.get(item.call.id)
        if old is not None:
            entry.scan = old.scan
            self.forget(old)
        self.live[item.call.id] = entry
        self.pushes += 1
        lane = self.lanes.get(entry.lane)
        if lane is None:
            lane = self.lanes[entry.lane] = _Lane(0)
        heapq.heappush(lane.heap, (entry.turn, key, rank, self.pushes, entry))
        lane.waiting += 1
        _more(self.waiting_by, entry)
        if entry.scan == self.scan:
            self.passed += 1
        else:
            _more(self.open_by, entry)
        self.arrivals = self.choice = None

    def forget(self, entry: Entry) -> None:
        self.forgotten += 1
        entry.forgotten = self.forgotten  # before `alive`, because the reader of `later` holds no lock
        entry.alive = False
        self.choice = None
        del self.live[entry.item.call.id]
        if entry.scan == self.scan:
            self.passed -= 1
        else:
            _less(self.open_by, entry)
        _less(self.waiting_by, entry)
        lane = self.lanes[entry.lane]
        lane.waiting -= 1
        if not lane.waiting:
            del self.lanes[entry.lane]
        elif len(lane.heap) + len(lane.front) > 2 * lane.waiting + _SLACK_SLOTS:
            lane.compact()

    def head(self) -> Entry:
        if not self.open_by:
            raise EmptyQueue("the queue is empty" if not self.live else "the scan has passed over all waiting calls")
        guard, lane = self.guard, self.choice
        if guard is not None and guard.failing:
            return self._first_to_arrive()
        if lane is None or guard is None or self.choice_at != guard.events:
            lane = self._choose()
        return self.lanes[lane].head(self.scan)

    def _choose(self) -> int:
        """The lane of the next candidate. While a scan passes over calls, the choice holds until a lane has no candidate
        left or the policy is told of an event, so a lane is not chosen again for each call. Only a guard counts events."""
        open_in = self.open_by[min(self.open_by)]
        lane = next(iter(open_in)) if len(open_in) == 1 else self.policy.turns.next_lane(open_in.keys())
        if self.guard is not None:
            self.choice, self.choice_at = lane, self.guard.events
        return lane

    def failing(self) -> bool:
        return self.guard is not None and self.guard.failing

    def end_scan(self) -> None:
        if self.passed:
            self.passed = 0
            self.open_by = _copy(self.waiting_by)
        for lane in self.lanes.values():
            lane.cursor = 0
        self.choice = None
        self.scan += 1
        self.arrival_at = 0

    def pass_over(self, entry: Entry) -> None:
        entry.scan = self.scan
        self.passed += 1
        _less(self.open_by, entry)
        if entry.lane not in self.open_by.get(entry.turn, ()):
            self.choice = None

    def lanes_beside(self, entry: Entry) -> set[int]:
        """The lanes among which the policy chooses when this call starts: those with calls of its turn."""
        return {*self.open_by.get(entry.turn, ()), entry.lane}

    def in_order(self) -> Iterator[Entry]:
        """All entries in the order in which they would start, while this object does not change."""
        if self.failing():
            return _by_arrival(self.live.values())
        lanes = {lane: each.in_order() for lane, each in self.lanes.items()}
        if len(lanes) <= 1:
            return itertools.chain.from_iterable(lanes.values())
        return _interleaved(lanes, _copy(self.waiting_by), self.policy.turns.copy())

    def later(self) -> Iterator[Entry]:
        """The entries of `in_order` as they are now, also if this object changes before they are read. It costs a copy of
        the slots. The order within a lane is that of now. The turns between the lanes read what the policy has learnt when
        they are taken."""
        if self.failing():
            return _by_arrival(list(self.live.values()))
        lanes = {lane: each.copy().drained(self.forgotten) for lane, each in self.lanes.items()}
        return _interleaved(lanes, _copy(self.waiting_by), self.policy.turns.copy())

    def _first_to_arrive(self) -> Entry:
        if self.arrivals is None:
            self.arrivals = sorted(self.live.values(), key=attrgetter("rank"))
            self.arrival_at = 0
        while True:
            entry = self.arrivals[self.arrival_at]
            if entry.alive and entry.scan != self.scan:
                return entry
            self.arrival_at += 1


def _by_arrival(entries: Collection[Entry]) -> Iterator[Entry]:
    yield from sorted(entries, key=attrgetter("rank"))


def _interleaved(lanes: dict[int, Iterator[Entry]], left_by: _Counts, turns: Turns) -> Iterator[Entry]:
    """The entries of the lanes in the order of their turns, and of the policy's turns among those of one turn. `left_by`
    are the entries that are left."""
    last = max(left_by, default=0)
    for turn in sorted(left_by):
        left = left_by[turn]
        while len(left) > 1 or (left and turn != last):
            lane = turns.next_lane(left.keys()) if len(left) > 1 else next(iter(left))
            entry = next(lanes[lane], None)
            if entry is not None:
                yield entry
            turns.take(lane, left.keys())
            left[lane] -= 1
            if not left[lane] or entry is None:
                del left[lane]
        for lane in left:
            yield from lanes[lane]


def _more(counts: _Counts, entry: Entry) -> None:
    in_lane = counts.get(entry.turn)
    if in_lane is None:
        in_lane = counts[entry.turn] = {}
    in_lane[entry.lane] = in_lane.get(entry.lane, 0) + 1


def _less(counts: _Counts, entry: Entry) -> None:
    """Counts one call less. A lane without calls of a turn has no entry there, and neither has a turn without calls."""
    in_lane = counts[entry.turn]
    if in_lane[entry.lane] > 1:
        in_lane[entry.lane] -= 1
    elif len(in_lane) > 1:
        del in_lane[entry.lane]
    else:
        del counts[entry.turn]


def _counted(entries: Collection[Entry]) -> _Counts:
    counts: _Counts = {}
    for (turn, lane), count in Counter(map(_PLACE, entries)).items():
        counts.setdefault(turn, {})[lane] = count
    return counts


def _copy(counts: _Counts) -> _Counts:
    return {turn: dict(in_lane) for turn, in_lane in counts.items()}
