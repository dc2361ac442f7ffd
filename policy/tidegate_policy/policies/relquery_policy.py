"""`relquery`: the request group with the least remaining work goes first, in one file because all events change one table.

This is the Dynamic Priority Updater of RelServe (section 4.2). A client waits for all calls of a group, so all calls of
a group share one priority: the predicted seconds of the work that is left (`batch_decomposition`), on uncached tokens.
A group is a lane, so a new priority moves no waiting call. Calls without a group are groups of one. They share a lane
in which the least remaining work goes first.

- The estimate of a group is made when it arrives, and again when the group has made `MATERIAL` progress. While nothing of
  it has started, only arrivals of its calls change it (eq 12).
- The uncached share is measured on a sample of the waiting calls of the group (eq 11).
- A group that has waited `patience_s` for each of its calls goes before all groups that have not (eq 13), except groups of
  urgency 0, which go before all others: the paper's zero priority must not outrank them. The lift holds for as many starts
  as the group has calls here then, because a group to which calls keep coming would otherwise take every start.
- The client's `group_size` counts only as patience in eq 13, at most as `MAX_DECLARED`, without the calls that have ended.
  A group is complete when none of its calls is left.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice

from tidegate_policy.model import MOST_URGENT, Call, CallId
from tidegate_policy.policies import batch_decomposition, overdue, token_counts
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Computed,
    Key,
    Parameter,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
)

SINGLES = 0
"""The lane of the calls without a group."""
MAX_GROUPS = 256
"""Groups with a lane of their own; calls of further groups are groups of one."""
MAX_DECLARED = 10_000
MATERIAL = 0.05
"""Part of a group's remaining seconds that must be done, or of its calls that must arrive, before it is estimated again."""
ESTIMATED = 256
"""Waiting calls that an estimate reads; the rest of a larger group is assumed to be like them."""
SAMPLE = 4
"""Calls of a group whose cached tokens are looked up (eq 11)."""
ESTIMATES_PER_STEP = 1
SLACK_HEADS = 64
"""Entries of singles that no longer wait, tolerated beyond one for each single."""
SWEEP = 16
"""Steps within which the progress of every running group is looked at."""

Place = tuple[float, float, float]
"""(0 for urgency 0 else 1, remaining seconds or 0 while lifted, arrival number): the smallest goes first."""
LAST: Place = (2.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class _Group:
    """A group of which at least one call is in the scheduler."""

    name: str
    lane: int
    urgent: bool
    since_s: float
    """The instant of its arrival or of its last start, or from which a call of it waits again."""
    waiting: dict[CallId, int] = field(default_factory=dict)
    """Prompt tokens of the waiting calls, in the order of arrival."""
    waiting_tokens: int = 0
    running: dict[CallId, int] = field(default_factory=dict)
    """Predicted output tokens of the running calls."""
    seen: int = 0
    declared: int = 0
    output: int = 1
    """Greatest predicted output of a call."""
    miss_ratio: float = 1.0
    remaining_s: float = 0.0
    estimated_at: int = 0
    """Calls that had been seen at the last estimate."""
    work_s: float = 0.0
    """The work that was left at the last estimate, in seconds of the engine's time in a full batch."""
    sampled: bool = False
    """The sample is younger than the last start."""

    @property
    def present(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def size(self) -> int:
        """The calls that are here, and those that the client announced and that have not come."""
        ended = self.seen - self.present
        return max(self.present, min(self.declared, MAX_DECLARED) - ended)

    @property
    def place(self) -> Place:
        return (0.0 if self.urgent else 1.0, self.remaining_s, self.lane)


class RelQuery(StaticPolicy):
    """Groups are lanes."""

    name = "relquery"
    PARAMETERS = (
        Parameter(
            name="patience_s",
            default=10.0,
            low=0.01,
            high=86400.0,
            unit="seconds for each call",
            meaning="A group that has waited this long for each of its calls goes before the others.",
        ),
    )
    keys_change = True

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._patience_s = self.parameters["patience_s"]
        self._groups: dict[str, _Group] = {}
        self._members: dict[CallId, _Group] = {}
        """The groups of the calls that have one."""
        self.places: dict[int, Place] = {SINGLES: LAST}
        """The place of each lane without its lift; that of the singles is made up to date whenever lanes are compared."""
        self.lifts: dict[int, int] = {}
        """The starts that are left of the lift of a lane. A spent lift stays as 0 until the next start of the lane."""
        self._singles: dict[CallId, Place] = {}
        """The places of the calls without a group."""
        self._waiting: dict[float, Place] = {}
        """The places of the singles that wait, by their arrival numbers."""
        self._heads: list[Place] = []
        """A heap of these places. A place counts while it is the present one of a single that waits."""
        self._changed: dict[str, None] = {}
        """Groups that must be estimated again."""
        self._tokens = token_counts.TokenCounts()
        self._unchecked: list[str] = []
        """Groups whose progress is to be looked at next."""
        self._number = 0
        self._group_patience = overdue.Overdue()
        self._single_patience = overdue.Overdue()
        self._group_turns = GroupTurns(self, self.places, self.lifts)
        self.turns = self._group_turns

    def lane(self, item: QueuedRequest) -> int:
        group = self._members.get(item.call.id)
        return SINGLES if group is None else group.lane

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        group_of = self._members.get
        return [SINGLES if (group := group_of(item.call.id)) is None else group.lane for item in items]

    def key(self, item: QueuedRequest) -> Key:
        call = item.call
        if call.id in self._members:
            return ()
        return self._singles.get(call.id) or (_level(call), item.service_s)

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        place_of, members = self._singles.get, self._members
        return [place_of(call_id := item.call.id) or (() if call_id in members else self.key(item)) for item in items]

    def rank(self, item: QueuedRequest) -> Key:
        group = self._members.get(item.call.id)
        if group is not None:
            return (*self._group_turns.place(group.lane), item.call.arrived_at_s)
        return (_level(item.call), item.service_s, 0.0, item.call.arrived_at_s)

    @property
    def heads(self) -> list[Place]:
        """The heap of the singles, whose first entry counts."""
        while self._heads and not self.counts(self._heads[0]):
            heapq.heappop(self._heads)
        return self._heads

    def counts(self, head: Place) -> bool:
        return self._waiting.get(head[2]) == head

    # Events.

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        return self.on_arrivals(now, (item,))

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        cost, members, groups, patience_s = self.context.cost(), self._members, self._groups, self._patience_s
        output_s, number, many = cost.batched_decode_s, self._number, len(items) > 1
        singles: dict[CallId, Place] = {}
        ends: dict[str, float] = {}
        joined: dict[int, _Group] = {}
        for item in items:  # in one pass, because the calls come from far memory
            call = item.call
            call_id, name = call.id, call.group
            number += 1
            group = None if name is None else groups.get(name)
            if group is None and name is not None and len(groups) < MAX_GROUPS:
                group = groups[name] = _Group(name, number, call.urgency == MOST_URGENT, call.arrived_at_s)
            if group is None:
                singles[call_id] = (0.0 if call.urgency == MOST_URGENT else 1.0, item.service_s, number)
                ends[call_id] = call.arrived_at_s + patience_s
                continue
            prompt_tokens, output = call.prompt_tokens, call.output_predicted
            members[call_id] = joined[group.lane] = group
            if group.seen and not group.waiting:
                self._waits_again(group, call.arrived_at_s)
            group.waiting[call_id] = prompt_tokens
            group.waiting_tokens += prompt_tokens
            group.seen += 1
            if call.group_size > group.declared:
                group.declared = call.group_size
            if output > group.output:
                group.output = output
            if group.seen == 1:
                self._estimate(group)
                self._group_patience.watch(group.name, self._group_ends_at_s(group))
                self._changed[group.name] = None
            else:
                more_s = cost.prefill_s * (prompt_tokens * group.miss_ratio) + output_s * output
                group.work_s += more_s
                group.remaining_s += more_s
                if group.seen > group.estimated_at * (1 + MATERIAL):
                    self._changed[group.name] = None
            if many and now >= self._group_patience.first_at_s:
                self._lift_groups(now)
        self._number = number
        for lane, group in joined.items():
            self.places[lane] = group.place
        self._singles.update(singles)
        self._singles_wait(singles.values(), ends)
        changed = [*self._lift(now)]
        while many and now >= self._single_patience.first_at_s:
            changed += self._lift(now)
        return changed

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        call = item.call
        group = self._members.get(call.id)
        if group is not None and call.id in group.waiting:
            group.waiting_tokens -= group.waiting.pop(call.id)
            group.running[call.id] = call.output_predicted
            group.since_s = now
            group.sampled = False
            if self.lifts.get(group.lane) == 0:
                self._group_patience.watch(group.name, self._group_ends_at_s(group))
        elif call.id in self._singles and self._waiting.pop(self._singles[call.id][2], None) is not None:
            self._single_patience.forget(call.id)
        return self._lift(now)

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        self._tokens.add(computed)
        self._find_progress()
        self._estimate_changed()
        return self._lift(now)

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        call_id = item.call.id
        group = self._members.get(call_id)
        if group is not None and group.running.pop(call_id, None) is not None:
            if not group.waiting:
                self._waits_again(group, now)
            group.waiting[call_id] = item.call.prompt_tokens
            group.waiting_tokens += item.call.prompt_tokens
            self._changed[group.name] = None
        elif call_id in self._singles and self._singles[call_id][2] not in self._waiting:
            level, _, number = self._singles[call_id]
            place = self._singles[call_id] = (level, item.service_s, number)
            self._singles_wait((place,), {call_id: now + self._patience_s})
        return self._lift(now)

    def on_end(self, now: float, call_id: CallId) -> Changed:
        place = self._singles.pop(call_id, None)
        if place is not None:
            self._waiting.pop(place[2], None)
            self._single_patience.forget(call_id)
        self._tokens.forget(call_id)
        group = self._members.pop(call_id, None)
        if group is not None:
            group.waiting_tokens -= group.waiting.pop(call_id, 0)
            group.running.pop(call_id, None)
            if group.waiting or group.running:
                self._changed[group.name] = None
                if group.waiting and not self.lifts.get(group.lane):
                    self._group_patience.watch(group.name, self._group_ends_at_s(group))
            else:
                del self._groups[group.name], self.places[group.lane]
                self.lifts.pop(group.lane, None)
                self._changed.pop(group.name, None)
                self._group_patience.forget(group.name)
        return self._lift(now)

    # Groups.

    def _singles_wait(self, places: Collection[Place], ends: Mapping[str, float]) -> None:
        """Singles with these places wait from now on. `ends` are the ends of their patience."""
        self._waiting.update({place[2]: place for place in places})
        if len(places) <= overdue.FEW and len(self._heads) <= 2 * len(self._singles) + SLACK_HEADS:
            for place in places:
                heapq.heappush(self._heads, place)
        else:
            self._heads = list(self._waiting.values())
            heapq.heapify(self._heads)
        self._single_patience.watch_all(ends)

    def _estimate_changed(self) -> None:
        for name in list(islice(self._changed, ESTIMATES_PER_STEP)):
            del self._changed[name]
            group = self._groups[name]
            if group.waiting and not group.sampled:
                self._sample(group)
            self._estimate(group)

    def _estimate(self, group: _Group) -> None:
        """`PEM(R)` of the calls that are left."""
        waiting = list(islice(group.waiting.values(), ESTIMATED))
        scale = len(group.waiting) / max(len(waiting), 1)
        cost, tokens = self.context.cost(), sum(waiting)
        group.remaining_s = scale * batch_decomposition.seconds(
            cost,
            uncached=[count * group.miss_ratio for count in waiting],
            decoding=self._decoding(group),
            output=group.output,
            context=tokens / max(len(waiting), 1),
        )
        group.estimated_at, group.work_s = group.seen, self._work_s(group)
        self.places[group.lane] = group.place

    def _find_progress(self) -> None:
        """Marks groups that have made progress since their estimate; it looks at a part of the groups in each step."""
        if not self._unchecked:
            self._unchecked = list(self._groups)
        for _ in range(min(len(self._groups) // SWEEP + 1, len(self._unchecked))):
            group = self._groups.get(self._unchecked.pop())
            if group is not None and group.running and self._work_s(group) < (1 - MATERIAL) * group.work_s:
                self._changed[group.name] = None

    def _work_s(self, group: _Group) -> float:
        """The work that is left of a group. It costs O(running calls), and an estimate costs O(calls)."""
        left = group.output * len(group.waiting) + sum(self._decoding(group))
        cost = self.context.cost()
        return cost.prefill_s * (group.waiting_tokens * group.miss_ratio) + cost.batched_decode_s * left

    def _decoding(self, group: _Group) -> list[int]:
        """Output tokens that each running call of a group still needs."""
        if not group.running:
            return []
        outputs = self._tokens.outputs
        return [max(output - outputs(call_id), 1) for call_id, output in group.running.items()]

    def _sample(self, group: _Group) -> None:
        """Equation 11: the uncached share of a few waiting calls stands for the group."""
        calls = list(islice(group.waiting.items(), ESTIMATED))
        sample = self.context.random.sample(calls, min(SAMPLE, len(calls)))
        tokens = sum(count for _, count in sample)
        uncached = sum(max(count - self.context.cached_tokens(call_id), 1) for call_id, count in sample)
        group.miss_ratio = min(uncached / max(tokens, 1), 1.0)
        group.sampled = True

    # Starvation.

    def _group_ends_at_s(self, group: _Group) -> float:
        return group.since_s + self._patience_s * group.size

    def _waits_again(self, group: _Group, at_s: float) -> None:
        """A call begins to wait in a group of which none waited."""
        group.since_s = max(group.since_s, at_s)
        if not self.lifts.get(group.lane):
            self._group_patience.watch(group.name, self._group_ends_at_s(group))

    def _lift_groups(self, now: float) -> None:
        """Patience is watched from the arrival of a group, from the last start of its lift, and from the instant from which
        a call of it waits again. Further calls and starts only move its end to later."""
        for name in self._group_patience.take(now):
            group = self._groups[name]
            if (ends_at_s := self._group_ends_at_s(group)) > now:
                self._group_patience.watch(name, ends_at_s)
            elif group.waiting:
                self.lifts[group.lane] = group.present

    def _lift(self, now: float) -> Changed:
        if now >= self._group_patience.first_at_s:
            self._lift_groups(now)
        if now < self._single_patience.first_at_s:
            return NONE_CHANGED
        changed = [CallId(name) for name in self._single_patience.take(now)]
        for call_id in changed:
            level, _, number = self._singles[call_id]
            place = self._singles[call_id] = self._waiting[number] = (level, 0.0, number)
            heapq.heappush(self._heads, place)
        return changed


class GroupTurns:
    """The lane of the first place is next. A start of a lifted lane uses a start of its lift. A copy has its own tables,
    because the groups may end before it is read, and walks the singles in their order."""

    def __init__(
        self,
        policy: RelQuery,
        places: dict[int, Place],
        lifts: dict[int, int],
        heads: list[Place] | None = None,
    ) -> None:
        self._policy = policy
        self._places = places
        self._lifts = lifts
        self._heads = heads
        """In a copy: the heap of the singles that it has not walked."""

    def place(self, lane: int) -> Place:
        """The place of a lane with its lift."""
        place = self._places[lane]
        return (place[0], 0.0, place[2]) if self._lifts.get(lane) else place

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        if len(lanes) == 1:
            return next(iter(lanes))
        if SINGLES in lanes:
            self._places[SINGLES] = self._first()
        return min(lanes, key=self.place if self._lifts else self._places.__getitem__)

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        if self._heads and lane == SINGLES:
            self._first()
            heapq.heappop(self._heads)
        left = self._lifts.get(lane)
        if left:
            self._lifts[lane] = left - 1
        elif left == 0:
            del self._lifts[lane]

    def copy(self) -> "GroupTurns":
        heads = self._policy.heads if self._heads is None else self._heads
        return GroupTurns(self._policy, dict(self._places), dict(self._lifts), list(heads))

    def _first(self) -> Place:
        """The place of the first single."""
        if self._heads is None:
            heads = self._policy.heads
        else:
            heads = self._heads
            while heads and not self._policy.counts(heads[0]):
                heapq.heappop(heads)
        return heads[0] if heads else LAST


def _level(call: Call) -> float:
    """The first part of a place and of a rank."""
    return 0.0 if call.urgency == MOST_URGENT else 1.0
