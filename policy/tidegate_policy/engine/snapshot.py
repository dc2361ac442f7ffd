"""The engine at one instant, as regulators and the choice of a preempted call read it.

Each answer is computed when it is first asked for and then kept, so an engine without regulators pays nothing. Many calls
run, and a step has little time, so the calls that decode are not looked at one by one unless a decision needs it.
"""

import functools
import heapq
import operator
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from tidegate_policy.cost import CostModel
from tidegate_policy.engine.engine_probe import EngineProbe
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.step import EngineLimits
from tidegate_policy.model import CallId
from tidegate_policy.policies import Key, Policy, QueuedRequest
from tidegate_policy.waiting_queue import WaitingQueue


class EngineSnapshot:
    """The engine at `now`. It holds until the next event."""

    def __init__(
        self,
        now: float,
        *,
        limits: EngineLimits,
        cost: CostModel,
        policy: Policy,
        queues: Sequence[WaitingQueue],
        calls: dict[CallId, KnownCall],
        probe: EngineProbe,
        live_groups: int,
        pinned_kv_tokens: int,
    ) -> None:
        self.now = now
        self.limits = limits
        self.cost = cost
        self.live_groups = live_groups
        """Groups of calls in the engine; a call without a group is a group of its own."""
        self.pinned_kv_tokens = pinned_kv_tokens
        """Tokens in the KV cache that the engine holds for sessions whose tool runs. They are not free."""
        self._policy = policy
        self._queues = queues
        self._calls = calls
        self._probe = probe

    # The running calls.

    @functools.cached_property
    def running(self) -> list[KnownCall]:
        """The running calls in the order of the engine."""
        find = self._calls.get
        running = []
        for call_id, kv_tokens in self._probe.running_calls():
            call = find(call_id)
            if call is not None:
                if call.decodes:
                    call.kv_tokens = kv_tokens
                else:
                    call.see(kv_tokens)
                running.append(call)
        return running

    @functools.cached_property
    def decodes(self) -> list[KnownCall]:
        """The running calls that decode."""
        return [call for call in self.running if call.decodes]

    @functools.cached_property
    def prefills(self) -> list[KnownCall]:
        """The running calls that do not decode yet."""
        return [call for call in self.running if not call.decodes]

    @functools.cached_property
    def with_target(self) -> list[tuple[KnownCall, float]]:
        """The calls that decode and have a target for their time per output token, with the target."""
        targets = ((call, call.item.call.tpot_s) for call in self.decodes)
        return [(call, target_s) for call, target_s in targets if target_s is not None]

    @functools.cached_property
    def context_tokens(self) -> int:
        """Tokens in the KV cache of the calls that decode."""
        return sum([call.kv_tokens for call in self.decodes])

    def first_decode(self) -> tuple[KnownCall, Key]:
        """Of the calls that decode, the last to yield, and its rank. Raises `ValueError` if no call decodes."""
        rank, call = min(
            ((self._policy.rank(self.left(call)), call) for call in self.decodes), key=operator.itemgetter(0)
        )
        return call, rank

    def left(self, call: KnownCall) -> QueuedRequest:
        """A running call with the work that is left of it now."""
        service_s = self.cost.remaining_seconds(
            call.item.call, output_tokens=call.output_tokens, uncached_tokens=call.uncached_tokens
        )
        return QueuedRequest(call=call.item.call, service_s=service_s)

    def victims(self) -> Iterator[KnownCall]:
        """The running calls, the first to yield first: the reverse of the policy's order by the work that is left
        (Semantic Alg 3). Calls without progress since a preemption come last, unless the policy says otherwise.

        The first costs less than the order of all."""
        running = self.running
        if not self._policy.protects_progress:
            return self._by_rank(running)
        return chain(
            self._by_rank([call for call in running if not call.preempted_at_output >= call.output_tokens]),
            self._by_rank([call for call in running if call.preempted_at_output >= call.output_tokens]),
        )

    def _by_rank(self, calls: list[KnownCall]) -> Iterator[KnownCall]:
        """The greatest rank first; among equals the first of `calls`."""
        rank = self._policy.rank
        if not self._policy.rank_falls:
            yield from sorted(calls, key=lambda call: rank(self.left(call)), reverse=True)
            return
        bounds = [(-bound, index) for index, bound in enumerate(self._bounds(calls))]
        heapq.heapify(bounds)
        ranked: list[tuple[Key, int]] = []
        while bounds or ranked:
            while bounds and (not ranked or -bounds[0][0] >= max(ranked)[0][-1]):
                index = heapq.heappop(bounds)[1]
                ranked.append((rank(self.left(calls[index])), -index))
            first = max(ranked)
            ranked.remove(first)
            yield calls[-first[1]]

    def _bounds(self, calls: list[KnownCall]) -> list[float]:
        """A rank that each of the calls does not exceed, under a policy with `rank_falls`: the work that is left of a call
        takes at least the steps of all its tokens but one."""
        step_s = self.cost.step_s + self.cost.decode_s
        for call in calls:
            if call.end_rank is None:
                call.end_rank = self._policy.rank(QueuedRequest(call=call.call, service_s=0.0))[-1]
        return [
            (call.end_rank or 0.0) - step_s * (call.item.call.output_predicted - 1 - call.output_tokens)
            for call in calls
        ]

    # The waiting calls.

    @functools.cached_property
    def head(self) -> QueuedRequest | None:
        """The call that would start next."""
        return next(self.in_order(), None)

    @functools.cached_property
    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def in_order(self) -> Iterator[QueuedRequest]:
        """The waiting calls in the order of their starts."""
        return chain.from_iterable(self._queues)

    def first(self, k: int) -> list[QueuedRequest]:
        """The first k waiting calls in the order of their starts."""
        return list(islice(self.in_order(), k))

    def rank(self, item: QueuedRequest) -> Key:
        """The position of a call among calls that run: the greatest is preempted first."""
        return self._policy.rank(item)

    def uncached_tokens(self, item: QueuedRequest) -> int:
        """Tokens that a waiting call must compute before it decodes, as the prefix cache stands now."""
        return max(self.most_uncached_tokens(item) - self._probe.cached_tokens(item.call.id), 1)

    def most_uncached_tokens(self, item: QueuedRequest) -> int:
        """A bound of `uncached_tokens` that needs no look into the prefix cache."""
        return max(item.call.prompt_tokens + self._calls[item.call.id].output_tokens, 1)

    @functools.cached_property
    def free_kv_tokens(self) -> int:
        return self._probe.free_kv_tokens()
