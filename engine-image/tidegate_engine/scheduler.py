"""vLLM's scheduler as a driver of Tidegate's engine core.

`TidegateSchedulerMixin` stands before one of two vLLM classes: `AsyncScheduler`, where vLLM schedules ahead of the device
(GPUs), or `Scheduler`, where it does not (the CPU platform). Everything that vLLM does in a step stays vLLM's. The mixin
replaces the waiting queues, has `plan_execution` carry out the plan of each step, and reports the facts of each step to
the core. vLLM preempts in the reverse of the policy's order. Under `fcfs` the mixin sets vLLM's own policy to FCFS, and
the schedule is vLLM's own, step by step.

The engine core process calls from one thread, the control server from others. One lock guards both. A policy is in force
as soon as the lock is released, also while the engine is idle and blocks on its input.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tidegate_engine import meters, plan_execution, request_queue, vllm_labels
from tidegate_policy import policies, waiting_queue
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, engine_status, session_hold
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.model import CallId

GENERIC = CostModel(step_s=0.02, prefill_s=1e-4)
"""For engines without a profile. Policies compare calls on one engine, so proportions matter more than seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that vLLM has scheduled and not yet reported."""

    began_s: float
    prompt_tokens: Mapping[str, int]
    """Prompt tokens in the step, by request."""


class TidegateSchedulerMixin(SchedulerInterface):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """The scheduler mixin."""

    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(
        self,
        *args: Any,
        policy: str,
        cost: CostModel = GENERIC,
        regulators: Sequence[Regulator] = (),
        hold: session_hold.Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: meters.Meter = meters.SILENT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._clock = clock
        self._meter = meter
        self._core = engine_core.EngineCore(
            clock(),
            cost=cost,
            limits=plan_execution.limits(self),
            policy=policy,
            regulators=regulators,
            hold=hold,
            queues=2,
            probe=plan_execution.VllmProbe(self),
        )
        self._execution = plan_execution.PlanExecution(self, self._core, clock)
        self._starts: dict[str, waiting_queue.Start] = {}
        self.kv_holding_waiting, self.waiting = (
            request_queue.OrderedQueue(queue, self._core, self._starts, clock) for queue in self._core.queues
        )
        self._steps: dict[int, _Step] = {}
        self._last_step_s = clock()
        self._ended: dict[CallId, bool] = {}
        self._follow_policy()

    # The calls of vLLM's engine core.

    def add_request(self, request: Request) -> None:
        with self._lock:
            if request.request_id not in self.requests:
                now = self._clock()
                self._core.on_arrival(now, vllm_labels.call(now, request))
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        with self._lock:
            began_s = self._clock()
            self._starts.clear()
            self._execution.begin_step()
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self._execution.end_step()
            self._steps[id(output)] = _Step(began_s=began_s, prompt_tokens=self._prompt_tokens(output))
            self._meter.scheduled(self._clock() - began_s, len(output.preempted_req_ids or ()))
            return output

    def update_from_output(self, output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            results = super().update_from_output(output, *args, **kwargs)
            now = self._clock()
            step = self._steps.pop(id(output), None) or _Step(began_s=now, prompt_tokens={})
            self._core.on_step(
                now,
                step_s=self._step_seconds(now, step, output),
                computed=_computed(step, results),
                ended=self._take_ended(),
            )
            return results

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            finished = super().finish_requests(*args, **kwargs)
            now = self._clock()
            for call_id, completed in self._take_ended().items():
                self._core.on_end(now, call_id, finished=completed)
            return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self._lock:
            self._execution.release_all()  # held blocks would keep the cache from being reset
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._ended[CallId(request.request_id)] = request.status != RequestStatus.FINISHED_ABORTED
        self._execution.before_free(request)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    # The calls of the control server, from its threads.

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None
    ) -> engine_status.Switched:
        with self._lock:
            switched = self._core.set_policy(self._clock(), name, parameters or {}, reason)
            self._follow_policy()
            return switched

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> engine_status.Controls:
        with self._lock:
            return self._core.set_controls(max_running=max_running, max_step_tokens=max_step_tokens)

    def state(self) -> engine_status.State:
        with self._lock:
            return self._core.state(self._clock(), kv_usage=self.get_kv_cache_usage())

    def watch(self) -> "_Watch":
        with self._lock:
            return _Watch(self, self._core.watch(self._clock()))

    def cut(self, watch: engine_core.QosWatch) -> engine_status.WatchReport:
        with self._lock:
            return self._core.cut(self._clock(), watch, kv_usage=self.get_kv_cache_usage())

    def unwatch(self, watch: engine_core.QosWatch) -> None:
        with self._lock:
            self._core.unwatch(watch)

    def _follow_policy(self) -> None:
        """Makes vLLM's choice of the request to preempt follow the active policy."""
        self.policy = SchedulingPolicy.FCFS if self._core.policy.name == "fcfs" else SchedulingPolicy.PRIORITY

    # Reporting facts.

    def _prompt_tokens(self, output: SchedulerOutput) -> dict[str, int]:
        """The prompt tokens of each request in a step; vLLM has just advanced `num_computed_tokens` by its tokens."""
        found = {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens + tokens
            found[request_id] = max(min(tokens, left), 0)
        return found

    def _step_seconds(self, now: float, step: _Step, output: SchedulerOutput) -> float:
        """With async scheduling steps overlap; a step's time starts when the step before it has ended."""
        began_s = max(step.began_s, self._last_step_s)
        self._last_step_s = now
        if not output.total_num_scheduled_tokens:
            return 0.0
        self._meter.stepped(now - began_s, output.num_scheduled_tokens.values())
        return now - began_s

    def _take_ended(self) -> dict[CallId, bool]:
        ended, self._ended = self._ended, {}
        return ended


def _computed(step: _Step, results: Mapping[int, Any]) -> dict[CallId, policies.Computed]:
    """The tokens of a step by call: prompt tokens that it computed, and output tokens that it delivered."""
    delivered = {result.request_id: len(result.new_token_ids) for batch in results.values() for result in batch.outputs}
    return {
        CallId(request_id): policies.Computed(step.prompt_tokens.get(request_id, 0), delivered.get(request_id, 0))
        for request_id in {**step.prompt_tokens, **delivered}
    }


class _Watch:
    """One watcher's windows."""

    def __init__(self, scheduler: TidegateSchedulerMixin, watch: engine_core.QosWatch) -> None:
        self._scheduler = scheduler
        self._watch = watch

    def cut(self) -> engine_status.WatchReport:
        return self._scheduler.cut(self._watch)

    def close(self) -> None:
        self._scheduler.unwatch(self._watch)


class TidegateScheduler(TidegateSchedulerMixin, Scheduler):  # type: ignore[misc]
    """For platforms on which vLLM waits for each step's output before it schedules the next step."""


class TidegateAsyncScheduler(TidegateSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """For platforms on which vLLM schedules a step while the step before it still runs."""
