"""The engine at one instant, as regulators and the choice of a preempted call read it.

Each answer is computed when it is first asked for and then kept, so an engine without regulators pays nothing.
"""

import functools
from collections.abc import Sequence
from itertools import islice

from tidegate_policy.cost import CostModel
from tidegate_policy.engine.engine_probe import EngineProbe
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.step import EngineLimits, RunningCall
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

    @functools.cached_property
    def running(self) -> tuple[RunningCall, ...]:
        """The running calls in the order of the engine, with the work that is left of each now."""
        known = ((self._calls.get(call_id), kv_tokens) for call_id, kv_tokens in self._probe.running_calls())
        return tuple(call.as_running(self.cost, kv_tokens) for call, kv_tokens in known if call is not None)

    @functools.cached_property
    def free_kv_tokens(self) -> int:
        return self._probe.free_kv_tokens()

    @functools.cached_property
    def head(self) -> QueuedRequest | None:
        """The call that would start next."""
        return next(iter(self.first(1)), None)

    def first(self, k: int) -> list[QueuedRequest]:
        """The first k waiting calls in the order of their starts."""
        return list(islice((item for queue in self._queues for item in queue), k))

    @functools.cached_property
    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def rank(self, item: QueuedRequest) -> Key:
        """The position of a call among calls that run: the greatest is preempted first."""
        return self._policy.rank(item)

    def key(self, item: QueuedRequest) -> Key:
        """The position of a call within its lane of the queue: the smallest starts first."""
        return self._policy.key(item)

    def uncached_tokens(self, item: QueuedRequest) -> int:
        """Tokens that a waiting call must compute before it decodes, as the prefix cache stands now."""
        known = self._calls[item.call.id]
        tokens = item.call.prompt_tokens + known.output_tokens
        return max(tokens - self._probe.cached_tokens(item.call.id), 1)

    def victims(self) -> list[RunningCall]:
        """The running calls, the first to yield first: the reverse of the policy's order by the work that is left
        (Semantic Alg 3). Calls without progress since a preemption come last, unless the policy says otherwise."""
        protects = self._policy.protects_progress

        def order(call: RunningCall) -> tuple[bool, Key]:
            return not (protects and call.protected), self._policy.rank(call.item)

        return sorted(self.running, key=order, reverse=True)
