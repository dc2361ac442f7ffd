"""The fast scheduler under Tidegate's engine core: a model of `tidegate_engine.scheduler` and `request_queue`.

It tells the same core of the same events at the same instants as the plugin does, and carries out the plans of the core.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from tidegate_policy import labels, policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, engine_status, session_hold
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.model import Call, CallId
from tidegate_policy.waiting_queue import WaitingQueue
from tidegate_sim import engine_limits, fast_plan_execution, fast_scheduler
from tidegate_sim.fast_scheduler import FastRequest, Step


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
        """The plugin passes a request over first, and reports its start when it sees that vLLM did not skip it."""
        call_id = self._queue.pass_over().call.id
        self._queue.start(self._clock(), call_id)
        return self._requests.pop(call_id)

    def end_scan(self) -> None:
        """A scan over the waiting requests is over."""
        self._queue.end_scan()

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
        cost: CostModel,
        *,
        policy: str,
        clock: Callable[[], float],
        regulators: Sequence[Regulator] = (),
        hold: session_hold.Settings | None = None,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__(cost, prefix_cache=prefix_cache)
        self._clock = clock
        self.core = engine_core.EngineCore(
            clock(),
            cost=cost,
            limits=fast_plan_execution.limits(self),
            policy=policy,
            regulators=regulators,
            hold=hold,
            queues=2,
            probe=fast_plan_execution.FastProbe(self),
        )
        self._execution = fast_plan_execution.FastPlanExecution(self, self.core, clock=clock)
        self._queue = CoreQueue(self.core.queues[1], self.core, clock)
        self.waiting = self._queue
        self._began_s = clock()
        self._ended: dict[CallId, bool] = {}

    # What a client of the engine does.

    def arrive(self, request: FastRequest, sent: Mapping[str, labels.Label]) -> None:
        """A request with the labels that the gateway sent. If `check` raises `ValueError`, nothing changes."""
        call = labels.read(
            self._clock(),
            sent,
            call_id=CallId(request.id),
            prompt_tokens=request.prompt_tokens,
            max_tokens=engine_limits.MAX_OUTPUT_TOKENS,
            output_prior=self.core.output_prior.tokens,
            client_priority=float(request.priority),
            client_arrived_s=request.arrived_at_s,
        )
        self.receive(request, call)

    def receive(self, request: FastRequest, call: Call) -> None:
        """As `arrive`, with the labels as a call."""
        self.check(request)
        self.core.on_arrival(self._clock(), call)
        self.add(request)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        if self._ended.pop(CallId(request_id), None) is not None:
            self.core.on_end(self._clock(), CallId(request_id), finished=False)

    # One step.

    def schedule(self) -> Step:
        self._began_s = self._clock()
        self._execution.begin_step()
        step = super().schedule()
        self._queue.end_scan()
        return step

    def finish(self, step: Step) -> list[tuple[FastRequest, bool]]:
        results = super().finish(step)
        now = self._clock()
        ended, self._ended = self._ended, {}
        self.core.on_step(
            now,
            step_s=self.seconds(step, now - self._began_s) if step.tokens else 0.0,
            computed=_computed(step, results),
            ended=ended,
        )
        return results

    def seconds(self, step: Step, passed_s: float) -> float:
        """The duration of a step, whose end comes `passed_s` after its start."""
        return passed_s

    def _end(self, request: FastRequest, *, finished: bool) -> None:
        self._ended[CallId(request.id)] = finished
        if finished:
            self._execution.before_free(request)
        super()._end(request, finished=finished)

    def _reclaim(self) -> bool:
        return self._execution.release_one()

    def _victim(self) -> FastRequest:
        return self._execution.first_to_yield()

    # The calls of the control server.

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float], *, bypass: bool = False
    ) -> engine_status.Switched:
        switched = self.core.set_policy(self._clock(), name, parameters, reason, bypass=bypass)
        if bypass:
            self._execution.release_all()
        return switched

    def watch(self) -> engine_status.Watch:
        recorder = self.core.watch(self._clock())
        return engine_status.Watch(
            cut=lambda: self.core.cut(self._clock(), recorder), close=functools.partial(self.core.unwatch, recorder)
        )


def _computed(step: Step, results: Sequence[tuple[FastRequest, bool]]) -> dict[CallId, policies.Computed]:
    """The tokens of a step by call: prompt tokens that it computed, and output tokens that it delivered."""
    if not step.prompts:
        found = dict.fromkeys(map(_id, step.tokens), policies.Computed())
        for request, _ in results:
            found[CallId(request.id)] = policies.ONE_OUTPUT
        return found
    delivered = {request for request, _ in results}
    return {
        CallId(request.id): policies.Computed(step.prompts.get(request, 0), int(request in delivered))
        for request in step.tokens
    }


def _id(request: FastRequest) -> CallId:
    return CallId(request.id)
