"""The fast scheduler under Tidegate's engine core: a model of `tidegate_engine.scheduler` and `request_queue`.

It tells the same core of the same events at the same instants as the plugin does, and carries out the plans of the core.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from tidegate_policy import labels, policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, engine_status, session_hold
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import WaitingQueue
from tidegate_sim import engine_limits, fast_kv_cache, fast_scheduler
from tidegate_sim.engine_limits import BLOCK_TOKENS
from tidegate_sim.fast_scheduler import FastRequest, Step

DECODED = policies.Computed(0, 1)
"""What a step computes for a request that decodes."""


class CoreQueue:
    """The plugin's `OrderedQueue`: waiting requests in the order of the active policy."""

    def __init__(self, queue: WaitingQueue, core: engine_core.EngineCore, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._core = core
        self._clock = clock
        self._requests: dict[str, FastRequest] = {}

    def add(self, request: FastRequest) -> None:
        self._requests[request.id] = request
        self._queue.push(self._core.item(CallId(request.id)))

    def peek(self) -> FastRequest:
        return self._requests[self._queue.peek().call.id]

    def pop(self) -> FastRequest:
        return self._requests.pop(self._queue.pop(self._clock()).item.call.id)

    def put_back(self, request: FastRequest) -> None:
        item = self._core.on_preemption(self._clock(), CallId(request.id), output_tokens=request.output)
        self._requests[request.id] = request
        self._queue.push_preempted(item)

    def remove(self, request: FastRequest) -> None:
        self._queue.remove(CallId(request.id))
        del self._requests[request.id]

    def __len__(self) -> int:
        return len(self._requests)


class FastPlugin(fast_scheduler.FastScheduler):
    """vLLM's scheduler with Tidegate's mixin."""

    def __init__(
        self,
        limits: CostModel,
        *,
        policy: str,
        clock: Callable[[], float],
        regulators: Sequence[Regulator] = (),
        hold: session_hold.Settings | None = None,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__(limits, prefix_cache=prefix_cache)
        self._clock = clock
        self.core = engine_core.EngineCore(
            clock(),
            cost=limits,
            limits=EngineLimits(
                max_running=limits.max_batch,
                max_step_tokens=limits.max_step_tokens,
                kv_tokens=(engine_limits.kv_blocks(limits.kv_tokens) - 1) * BLOCK_TOKENS,
            ),
            policy=policy,
            regulators=regulators,
            hold=hold,
            queues=2,
            probe=FastProbe(self),
        )
        self.waiting = CoreQueue(self.core.queues[1], self.core, clock)
        self._began_s = clock()
        self._ended: dict[CallId, bool] = {}
        self._aborting = False
        self._held: dict[CallId, list[fast_kv_cache.Block]] = {}
        """The blocks of each held context."""
        self._yielding: list[CallId] = []
        """The running calls in the order in which they yield in this step; empty until memory is short."""
        self._follow_policy()

    # What a client of the engine does.

    def arrive(self, request: FastRequest, sent: Mapping[str, labels.Label]) -> None:
        """A request with the labels that the gateway sent."""
        now = self._clock()
        call = labels.read(
            now,
            sent,
            call_id=CallId(request.id),
            prompt_tokens=request.prompt_tokens,
            max_tokens=engine_limits.MAX_OUTPUT_TOKENS,
            output_prior=self.core.output_prior.tokens,
            client_priority=request.priority,
            client_arrived_s=request.arrived_at_s,
        )
        self.core.on_arrival(now, call)
        self.add(request)

    def abort(self, request_id: str) -> None:
        self._aborting = True
        super().abort(request_id)
        self._aborting = False
        if self._ended.pop(CallId(request_id), None) is not None:
            self.core.on_end(self._clock(), CallId(request_id), finished=False)

    # One step.

    def schedule(self) -> Step:
        now = self._began_s = self._clock()
        self._free(self.core.take_released(now))
        plan = self.core.take_plan(now)
        self._carry_out(plan)
        paused, self.paused = self.paused, self.paused.union(plan.paused)
        step = super().schedule()
        self.paused = paused
        self._yielding = []
        return step

    def finish(self, step: Step) -> list[tuple[FastRequest, bool]]:
        results = super().finish(step)
        now = self._clock()
        ended, self._ended = self._ended, {}
        self.core.on_step(
            now,
            step_s=now - self._began_s if step.tokens else 0.0,
            computed=_computed(step, results),
            ended=ended,
        )
        return results

    def _end(self, request: FastRequest) -> None:
        call_id, blocks = CallId(request.id), request.hashed
        tokens = len(blocks) * BLOCK_TOKENS
        if blocks and not self._aborting and self.core.hold(self._clock(), call_id, context_tokens=tokens):
            self.kv.touch(blocks)
            self._held[call_id] = list(blocks)
        super()._end(request)
        self._ended[CallId(request.id)] = True

    # The calls of the control server.

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float]) -> engine_status.Switched:
        switched = self.core.set_policy(self._clock(), name, parameters, reason)
        self._follow_policy()
        return switched

    def watch(self) -> "FastWatch":
        return FastWatch(self, self.core.watch(self._clock()))

    def cut(self, watch: engine_core.QosWatch) -> engine_status.WatchReport:
        return self.core.cut(self._clock(), watch, kv_usage=self.kv.usage)

    # Carrying out plans.

    def _carry_out(self, plan: StepPlan) -> None:
        for call_id in plan.preempt:
            request = self.requests.get(call_id)
            if request is not None and request.running:
                self.running.remove(request)
                self._preempt(request)
        self.max_step_tokens = plan.max_step_tokens
        self.max_running = plan.max_running
        if plan.max_starts is not None:
            self.max_running = min(plan.max_running, len(self.running) + plan.max_starts)

    def _follow_policy(self) -> None:
        self._by_priority = self.core.policy.name != "fcfs"

    def _victim(self) -> FastRequest:
        if not self._by_priority:
            return self.running[-1]
        if not self._yielding:
            self._yielding = self.core.victims(self._clock())
        running = {CallId(request.id): request for request in self.running}
        return next(running[call_id] for call_id in self._yielding if call_id in running)

    def _reclaim(self) -> bool:
        call_id = self.core.release_one() if self._held else None
        if call_id is None:
            return False
        self._free([call_id])
        return True

    def _free(self, call_ids: Iterable[CallId]) -> None:
        for call_id in call_ids:
            blocks = self._held.pop(call_id, None)
            if blocks is not None:
                self.kv.free(blocks, 0)


class FastProbe:
    """The answers of the scheduler to the questions of the core, as `plan_execution.VllmProbe` gives them."""

    def __init__(self, scheduler: FastPlugin) -> None:
        self._scheduler = scheduler

    def running_calls(self) -> Iterable[tuple[CallId, int]]:
        return [(CallId(request.id), request.computed) for request in self._scheduler.running]

    def free_kv_tokens(self) -> int:
        return self._scheduler.kv.free_blocks * BLOCK_TOKENS

    def cached_tokens(self, call_id: CallId) -> int:
        request, kv = self._scheduler.requests.get(call_id), self._scheduler.kv
        if request is None or not kv.caching:
            return 0
        most = (request.tokens - 1) // BLOCK_TOKENS
        return len(kv.hits(request.keys.extend(most), most)) * BLOCK_TOKENS


class FastWatch:
    """One watcher's windows."""

    def __init__(self, scheduler: FastPlugin, watch: engine_core.QosWatch) -> None:
        self._scheduler = scheduler
        self._watch = watch

    def cut(self) -> engine_status.WatchReport:
        return self._scheduler.cut(self._watch)

    def close(self) -> None:
        self._scheduler.core.unwatch(self._watch)


def _computed(step: Step, results: Sequence[tuple[FastRequest, bool]]) -> dict[CallId, policies.Computed]:
    """The tokens of a step by call: prompt tokens that it computed, and output tokens that it delivered."""
    if not step.prompts:
        found = dict.fromkeys(map(_id, step.tokens), policies.Computed())
        for request, _ in results:
            found[CallId(request.id)] = DECODED
        return found
    delivered = {request for request, _ in results}
    return {
        CallId(request.id): policies.Computed(step.prompts.get(request, 0), int(request in delivered))
        for request in step.tokens
    }


def _id(request: FastRequest) -> CallId:
    return CallId(request.id)
