"""Carries out the plans of the engine core in the fast scheduler: a model of `tidegate_engine.plan_execution`."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from tidegate_policy.engine.engine_core import EngineCore
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import CallId
from tidegate_policy.policies import QueuedRequest
from tidegate_sim import fast_kv_cache, fast_scheduler
from tidegate_sim.engine_limits import BLOCK_TOKENS


def limits(scheduler: fast_scheduler.FastScheduler) -> EngineLimits:
    """The limits with which the engine was started."""
    return EngineLimits(
        max_running=scheduler.max_running,
        max_step_tokens=scheduler.max_step_tokens,
        kv_tokens=max(scheduler.kv.blocks, 1) * BLOCK_TOKENS,
    )


class FastProbe:
    """The answers of the fast scheduler to the questions of the core."""

    def __init__(self, scheduler: fast_scheduler.FastScheduler) -> None:
        self._scheduler = scheduler

    def kv_tokens(self, call_id: CallId) -> int:
        return self._scheduler.requests[call_id].computed

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        request = self._scheduler.requests[call_id]
        own = itertools.takewhile(lambda block: block.holders == 1, reversed(request.hashed))
        blocks = request.held - len(request.hashed) + sum(1 for _ in own)
        return min(blocks, -(-enough // BLOCK_TOKENS)) * BLOCK_TOKENS

    def reserved_places(self) -> int:
        return 0

    def free_kv_tokens(self) -> int:
        return self._scheduler.kv.free_blocks * BLOCK_TOKENS

    def cached_tokens(self, call_id: CallId) -> int:
        request = self._scheduler.requests.get(call_id)
        return 0 if request is None else len(self._scheduler.hits(request)) * BLOCK_TOKENS

    def shared_tokens(self, call_id: CallId) -> int:
        request = self._scheduler.requests.get(call_id)
        hits = [] if request is None else self._scheduler.hits(request)
        return sum(1 for _ in itertools.takewhile(lambda block: block.holders, hits)) * BLOCK_TOKENS

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        """All of them: the fast scheduler has no grammars, LoRA adapters, KV connectors and streaming input."""
        return iter(waiting)


class FastPlanExecution:
    """The plans of one engine core in one fast scheduler."""

    def __init__(
        self, scheduler: fast_scheduler.FastScheduler, core: EngineCore, *, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._clock = clock
        self._held: dict[CallId, list[fast_kv_cache.Block]] = {}
        """The blocks of each held context, in the order of the prompt."""
        self._yielding: dict[str, int] | None = None
        """The place of each running request in the order of yielding, from the first lack of memory in a step."""

    def begin_step(self) -> None:
        """Takes the core's plan and prepares the scheduler for it. Call it before `schedule`."""
        now = self._clock()
        self._yielding = None
        self._free(self._core.take_released(now))
        self._carry_out(self._core.take_plan(now))

    def before_free(self, request: fast_scheduler.FastRequest) -> None:
        """A request is about to free its blocks because it finished. Holds them if the core wants the context back."""
        if not self._core.holds_contexts:
            return
        blocks = list(request.hashed)
        call_id = CallId(request.id)
        if blocks and self._core.hold(self._clock(), call_id, context_tokens=len(blocks) * BLOCK_TOKENS):
            self._scheduler.kv.touch(blocks)
            self._held[call_id] = blocks

    def release_one(self) -> bool:
        """Frees a held context, because a request needs memory. False if nothing is held."""
        if not self._held:
            return False
        call_id = self._core.release_one()
        if call_id is None:
            return False
        self._free([call_id])
        return True

    def release_all(self) -> None:
        """Frees all held contexts."""
        self._core.release_all()
        self._free(list(self._held))

    def first_to_yield(self) -> fast_scheduler.FastRequest:
        """The running request that is preempted for a running request that lacks memory."""
        running = self._scheduler.running
        if self._core.last_yields:
            return running[-1]
        if self._yielding is None:
            self._yielding = {call_id: place for place, call_id in enumerate(self._core.victims(self._clock()))}
        if self._core.policy.failing:
            return running[-1]
        places = self._yielding
        return min(running, key=lambda request: places[request.id])

    def _carry_out(self, plan: StepPlan) -> None:
        scheduler = self._scheduler
        for call_id in plan.preempt:
            scheduler.preempt(call_id)
        scheduler.max_step_tokens = plan.max_step_tokens
        scheduler.max_running = plan.max_running
        if plan.max_starts is not None:
            scheduler.max_running = min(plan.max_running, len(scheduler.running) + plan.max_starts)
        scheduler.paused = plan.paused
        scheduler.max_call_tokens = plan.max_call_tokens

    def _free(self, call_ids: Iterable[CallId]) -> None:
        for call_id in call_ids:
            blocks = self._held.pop(call_id, None)
            if blocks is not None:
                self._scheduler.kv.free(blocks, 0)
