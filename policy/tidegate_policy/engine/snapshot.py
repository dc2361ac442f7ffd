"""The engine at one instant, as regulators and the choice of a preempted call read it.

Each answer is computed when it is first asked for and then kept, so an engine without regulators pays nothing. Many calls
run, and a step has little time, so the calls that decode are not looked at one by one unless a decision needs it.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from tidegate_policy.cost import CostModel
from tidegate_policy.engine.batch import Batch
from tidegate_policy.engine.call_census import CallCensus
from tidegate_policy.engine.engine_probe import EngineProbe
from tidegate_policy.engine.kept import kept
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.size_bounds import SizeBounds
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import LEAST_URGENT, CallId
from tidegate_policy.policies import Key, Policy, QueuedRequest, token_counts
from tidegate_policy.waiting_queue import WaitingQueue

MOST_SKIPPED = 24
"""Waiting calls that cannot start and that one snapshot passes. It finds no call behind so many of them."""
LEAST_CHUNK = 16
"""Tokens of the smallest part of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of an engine from which its snapshots read. They are the same objects until the end of the engine."""

    limits: EngineLimits
    queues: Sequence[WaitingQueue]
    calls: dict[CallId, KnownCall]
    tokens: token_counts.TokenCounts
    probe: EngineProbe
    census: CallCensus
    batch: Batch
    sizes: SizeBounds


class Victim(NamedTuple):
    """A running call that may yield."""

    call: KnownCall
    left: QueuedRequest
    """The call with the work that is left of it."""
    rank: Key


class EngineSnapshot:
    """The engine at `now`. It holds until the next event."""

    def __init__(
        self,
        now: float,
        parts: EngineParts,
        *,
        cost: CostModel,
        policy: Policy,
        delivered: int,
        pinned_kv_tokens: int,
    ) -> None:
        self.now = now
        self.limits = parts.limits
        self.sizes = parts.sizes
        """Sizes that no call exceeds."""
        self.cost = cost
        self.delivered = delivered
        """Output tokens that the engine has delivered since its start."""
        self.pinned_kv_tokens = pinned_kv_tokens
        """Tokens in the KV cache that the engine holds for sessions whose tool runs. They are not free."""
        self._policy = policy
        self._parts = parts
        self._calls = parts.calls
        self._probe = parts.probe
        self._batch = parts.batch
        self.running_count = len(parts.batch.running)
        """The number of the running calls."""
        self.waiting = sum(map(len, parts.queues))
        """The number of the waiting calls."""
        self._first: list[QueuedRequest] = []
        """The first waiting calls that can start, as far as they were asked for."""

    @property
    def live_groups(self) -> int:
        """Groups of calls in the engine; a call without a group is a group of its own."""
        return len(self._parts.census.groups)

    # The running calls.

    @kept
    def prefills(self) -> list[KnownCall]:
        """The running calls that do not decode yet."""
        found = []
        for call in map(self._look, list(self._batch.filling)):
            if call.decodes:
                self._batch.decode(call)
            else:
                found.append(call)
        return found

    @kept
    def decode_count(self) -> int:
        """The number of the calls that decode."""
        return self.running_count - len(self.prefills)

    @property
    def decode_tokens(self) -> int:
        """The tokens of a step that the calls that decode need, with their speculative drafts."""
        return self.decode_count * self.limits.tokens_per_sequence

    @kept
    def with_target(self) -> list[tuple[KnownCall, float]]:
        """The calls that decode and have a target for their time per output token, with the target."""
        if not self.decode_count:
            return []
        return [(self._calls[call_id], target_s) for call_id, target_s in self._batch.targets.items()]

    @kept
    def running(self) -> list[KnownCall]:
        """All running calls, in the order of the engine. It looks at each of them, as few decisions need to."""
        return list(map(self._look, self._batch.running))

    @kept
    def decoding(self) -> list[KnownCall]:
        """The calls that decode, as `decodes`. It looks at none of them, so their `kv_tokens` are not of now."""
        return [self._calls[call_id] for call_id in self._batch.decoding] if self.decode_count else []

    @property
    def newest_decode(self) -> KnownCall:
        """The last call of `decoding`, which has probably the most tokens to come. Raises `StopIteration`."""
        return self._calls[next(reversed(self._batch.decoding if self.decode_count else {}))]

    @property
    def highest_level(self) -> int:
        """The urgency level of the most urgent call of `decoding`; the lowest level if none decodes."""
        return min(self._batch.decoding.values(), default=LEAST_URGENT) if self.decode_count else LEAST_URGENT

    @kept
    def decodes(self) -> list[KnownCall]:
        """The calls that decode, each looked at."""
        return [call for call in self.running if call.decodes]

    @property
    def changes(self) -> int:
        """Calls that changed after their arrival, since the start of the engine."""
        return self._batch.changes

    def started_after(self, number: int) -> list[KnownCall]:
        """The running calls that started after the start `number`, which counts from the start of the engine."""
        return [self._calls[call_id] for call_id in self._batch.started_after(number)]

    @property
    def running_ids(self) -> Collection[CallId]:
        """The running calls, in the order of the engine."""
        return self._batch.running.keys()

    def outputs_of(self, call_ids: Iterable[CallId]) -> Iterator[int]:
        """The output tokens that each of these calls has delivered."""
        return self._parts.tokens.outputs_of(call_ids)

    @property
    def starts(self) -> int:
        """The starts of calls since the start of the engine."""
        return self._batch.starts

    @property
    def leaves(self) -> int:
        """The calls that ran and no longer do, since the start of the engine; each start counts."""
        return self._batch.starts - self.running_count

    def _look(self, call_id: CallId) -> KnownCall:
        call = self._calls[call_id]
        call.kv_tokens = self._probe.kv_tokens(call_id)
        return call

    def chunk(self, steps: float) -> int:
        """Tokens of the part of a prompt that takes so many times the fixed time of a step; `LEAST_CHUNK` at least."""
        return max(round(steps * self.cost.step_s / self.cost.prefill_s), LEAST_CHUNK)

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        """Tokens of memory that the preemption of a running call frees, counted up to `enough`. Memory that it shares with
        another call stays in use."""
        return self._probe.own_kv_tokens(call_id, enough=enough)

    def first_decode(self) -> tuple[KnownCall, Key]:
        """Of the calls that decode, the last to yield, and its rank. Raises `ValueError` if no call decodes."""
        rank, call = min(
            ((self._policy.rank(self.left(call)), call) for call in self.decodes), key=operator.itemgetter(0)
        )
        return call, rank

    def goes_before_decodes(self, item: QueuedRequest) -> bool:
        """Whether a waiting call ranks before all calls that decode. Calls that started late are the least advanced and
        rank first more often than others, so most answers need one look. Raises `ValueError` if no call decodes."""
        rank = self.rank(item)
        decodes = False
        for call in map(self._look, reversed(self._batch.running)):
            if call.decodes:
                if self._policy.rank(self.left(call)) <= rank:
                    return False
                decodes = True
        if not decodes:
            raise ValueError("no call decodes")
        return True

    def left(self, call: KnownCall) -> QueuedRequest:
        """A running call with the work that is left of it now."""
        service_s = self.cost.remaining_seconds(
            call.item.call, output_tokens=call.output_tokens, uncached_tokens=call.uncached_tokens
        )
        return QueuedRequest(call=call.item.call, service_s=service_s)

    def victims(self) -> Iterator[Victim]:
        """The running calls, the first to yield first: the reverse of the policy's order by the work that is left
        (Semantic Alg 3). Calls without progress since a preemption come last, unless the policy says otherwise. Of equal
        calls the first in the order of the engine yields first."""
        if self._policy.rank_falls and self._policy.protects_progress:
            yield from self._found_by_bounds()
            yield from self._by_rank([call for call in self.running if call.protected])
        else:
            yield from self._sorted_victims()

    def all_victims(self) -> list[KnownCall]:
        """The running calls in the order in which they yield memory to running calls. Calls that are owed a place come
        last. Apart from that the order is that of `victims`; under `fcfs` the last that started comes first, as in vLLM."""
        calls = (
            self.running[::-1] if self._policy.name == "fcfs" else [victim.call for victim in self._sorted_victims()]
        )
        if self._parts.census.owed:
            calls.sort(key=lambda known: known.call.owed)
        return calls

    def _sorted_victims(self) -> list[Victim]:
        if not self._policy.protects_progress:
            return self._by_rank(self.running)
        return [
            *self._by_rank([call for call in self.running if not call.protected]),
            *self._by_rank([call for call in self.running if call.protected]),
        ]

    def _by_rank(self, calls: list[KnownCall]) -> list[Victim]:
        return sorted(map(self._victim, calls), key=operator.attrgetter("rank"), reverse=True)

    def _victim(self, call: KnownCall) -> Victim:
        left = self.left(call)
        return Victim(call, left, self._policy.rank(left))

    def _found_by_bounds(self) -> Iterator[Victim]:
        """The calls that are not protected, as `victims`. A rank is computed only if the bound of its call reaches the
        greatest rank so far, so the first calls cost less than the order of all."""
        bounds = self._batch.bounds.highest(self._batch, self._calls, self._policy, self.cost)
        found: list[Victim] = []
        first: Key | None = None  # the greatest rank in `found`
        for bound, known in bounds:
            while first is not None and bound < first[-1]:
                yield self._take(found, first)
                first = max([victim.rank for victim in found], default=None)
            call = self._look(known.call.id)
            if not call.protected:
                victim = self._victim(call)
                found.append(victim)
                if first is None or victim.rank > first:
                    first = victim.rank
        while first is not None:
            yield self._take(found, first)
            first = max([victim.rank for victim in found], default=None)

    def _take(self, found: list[Victim], rank: Key) -> Victim:
        """Takes the victim of this rank that comes first in the order of the engine."""
        equal = [victim for victim in found if victim.rank == rank]
        taken = equal[0] if len(equal) == 1 else min(equal, key=lambda victim: self._batch.running[victim.call.call.id])
        found.remove(taken)
        return taken

    # The waiting calls.

    def places(self, plan: StepPlan) -> int:
        """Places in the batch for waiting calls; a negative number means that calls must leave first."""
        return plan.max_running - self.running_count - self.reserved_places + len(plan.preempt)

    @kept
    def reserved_places(self) -> int:
        """Places of the batch that sessions keep while they wait for more input."""
        return self._probe.reserved_places()

    @kept
    def head(self) -> QueuedRequest | None:
        """The call that would start next. A call that waits for an event, such as its grammar, is none."""
        if self._first:
            return self._first[0]  # a peek drops dead entries from the heap that `startable` reads
        first = next((queue.peek() for queue in self._parts.queues if len(queue)), None)
        if first is None or next(self._probe.startable((first,)), None) is not None:
            return first  # most steps need no more than this look
        return next(self.startable(), None)

    @kept
    def _others(self) -> Iterator[QueuedRequest]:
        """The calls behind them that can start, in the order of their starts."""
        return self._probe.startable(self._looked_at())

    def _looked_at(self) -> Iterator[QueuedRequest]:
        for looked, item in enumerate(chain.from_iterable(self._parts.queues)):
            if looked - len(self._first) == MOST_SKIPPED:
                return
            yield item

    def startable(self) -> Iterator[QueuedRequest]:
        """The waiting calls that can start, in the order of their starts, found as they are read. It finds none behind
        `MOST_SKIPPED` others."""
        for place in itertools.count():
            if place == len(self._first):
                found = next(self._others, None)
                if found is None:
                    return
                self._first.append(found)
            yield self._first[place]

    def first(self, k: int) -> list[QueuedRequest]:
        """The first k of `startable`."""
        return list(islice(self.startable(), k))

    def rank(self, item: QueuedRequest) -> Key:
        """The position of a call among calls that run: the greatest is preempted first."""
        return self._policy.rank(item)

    def uncached_tokens(self, item: QueuedRequest) -> int:
        """Tokens that a waiting call must compute before it decodes, as the prefix cache stands now."""
        return max(self.most_uncached_tokens(item) - self._probe.cached_tokens(item.call.id), 1)

    def memory_tokens(self, item: QueuedRequest) -> int:
        """Tokens of free memory that a waiting call takes until it decodes. A part of its prompt that is in the prefix
        cache and that no call keeps takes free memory too."""
        return max(self.most_uncached_tokens(item) - self._probe.shared_tokens(item.call.id), 1)

    def most_uncached_tokens(self, item: QueuedRequest) -> int:
        """A bound of `uncached_tokens` and `memory_tokens` that needs no look into the prefix cache."""
        return max(item.call.prompt_tokens + self._calls[item.call.id].output_tokens, 1)

    def output_left(self, item: QueuedRequest) -> int:
        """Output tokens that are expected of a waiting call. After a preemption it has delivered some already."""
        return self._calls[item.call.id].output_left

    @kept
    def free_kv_tokens(self) -> int:
        return self._probe.free_kv_tokens()
