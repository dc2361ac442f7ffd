"""vLLM's scheduler as a driver of Tidegate's engine core.

`TidegateSchedulerMixin` stands before one of two vLLM classes: `AsyncScheduler`, where vLLM schedules ahead of the device
(GPUs), or `Scheduler`, where it does not (the CPU platform). Everything that vLLM does in a step stays vLLM's. The mixin
replaces the waiting queues, has `plan_execution` carry out the plan of each step, and reports the facts of each step to
the core. vLLM preempts in the reverse of the policy's order. Under `fcfs` vLLM's own policy is FCFS, and the schedule is
vLLM's own, step by step. Under `priority` it is vLLM's own priority schedule for clients without labels.

The engine core process calls from one thread, the control server from others. One lock guards both. A switch of the policy
does not hold it while the new policy learns of the calls. A policy is in force when the switch has returned, also while the
engine is idle and blocks on its input.
"""

import contextlib
import functools
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tidegate_engine import meters, plan_execution, request_queue, vllm_labels, vllm_probe
from tidegate_policy import policies, window
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, engine_status, session_hold
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import ONE_OUTPUT, Computed
from tidegate_policy.predict.step_cost import StepWork

log = logging.getLogger("vllm.tidegate")  # below vLLM's logger, which has the handlers

STEPS_IN_FLIGHT = 64
"""Most steps that are remembered between `schedule` and `update_from_output`; more than any pipeline is deep."""
FINISHED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
"""The ends of requests whose answer is complete. All others were aborted, or failed."""
PARTS = {
    "policy": "requests are served in the order of their arrival meanwhile",
    "plan": "the step runs under the bounds of the step before",
    "step": "the engine core does not learn of this step",
    "hold": "no context is held for a session any more",
    "labels": "the request is served as one without labels",
    "cost": "the cost model does not learn of this step",
    "watch": "a report of the quality of service lacks this event",
    "served": "the metrics lack this call",
    "meter": "the metrics lack this step",
}
"""What the failure of a part means for requests, by the name under which it is counted; hooks of policies and regulators
have names of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that vLLM has scheduled and not yet reported."""

    scheduled: Mapping[str, int]
    """vLLM's own table of the tokens of each request; it identifies the step."""
    began_s: float
    prompt_tokens: Mapping[str, int]
    """Prompt tokens in the step, by request."""
    work: StepWork | None = None
    """What the step computes, if its time is to refine the cost model."""


class TidegateSchedulerMixin(SchedulerInterface):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """The scheduler mixin."""

    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(
        self,
        *args: Any,
        policy: str | None = None,
        cost: CostModel = policies.GENERIC_COST,
        regulators: Sequence[Regulator] = (),
        hold: session_hold.Settings | None = None,
        learn_cost: bool = False,
        clock: Callable[[], float] = time.monotonic,
        meter: meters.Meter = meters.SILENT,
        **kwargs: Any,
    ) -> None:
        """Without `policy` the policy is the one of vLLM's own `--scheduling-policy`. With `learn_cost` the measured step
        times refine `cost`."""
        self._vllm_policy = SchedulingPolicy.FCFS
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._switching = threading.Lock()
        """Held during a switch of the policy, which releases the other lock meanwhile. It is taken first."""
        self._clock = clock
        self._meter = meter
        self._learn_cost = learn_cost
        self._core = engine_core.EngineCore(
            clock(),
            cost=cost,
            limits=plan_execution.limits(self),
            policy=policy or self.scheduler_config.policy,
            regulators=regulators,
            hold=hold,
            queues=2,
            probe=vllm_probe.VllmProbe(self),
            report=_report,
            served=meter.served,
        )
        self._core_reader = meters.CoreReader(
            self._core, meter, kv_token_bytes=meters.kv_token_bytes(self.kv_cache_config, self.block_size)
        )
        self._caught = self._core.failures.caught
        self._execution = plan_execution.PlanExecution(self, self._core, clock=clock, ranked=self._ranked)
        self._scan = request_queue.Scan(clock)
        self.kv_holding_waiting, self.waiting = (
            request_queue.OrderedQueue(
                queue, self._scan, clock=clock, admit=self._admitted, preempted=self._preempted_item
            )
            for queue in self._core.queues
        )
        self._steps: deque[_Step] = deque(maxlen=STEPS_IN_FLIGHT)
        self._last_step_s = clock()
        self._updating = False
        self._prefilling: dict[str, None] = {}
        """Running requests that have not computed their whole prompt; most other requests compute one token in a step."""
        self._returning: list[Request] = []
        """Sessions that stopped in the present `update_from_output` while they waited."""
        self._ended: dict[CallId, bool] = {}

    @property
    def policy(self) -> SchedulingPolicy:
        """vLLM's choice of the request to preempt: the last to come, or the one with the greatest priority."""
        execution: plan_execution.PlanExecution | None = self.__dict__.get("_execution")  # None while vLLM constructs
        if execution is None:
            return self._vllm_policy
        own = SchedulingPolicy.FCFS if self._core.last_yields else SchedulingPolicy.PRIORITY
        return execution.preemption_policy(own)

    @policy.setter
    def policy(self, value: SchedulingPolicy) -> None:
        self._vllm_policy = value

    # The calls of vLLM's engine core.

    def add_request(self, request: Request) -> None:
        with self._lock:
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        with self._lock:
            began_s = self._clock()
            with self._caught("plan"):
                self._execution.begin_step()
            self._scan.begin()
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self._execution.end_step()
                self._scan.end()
            with self._caught("step"):
                self._steps.append(
                    _Step(
                        scheduled=output.num_scheduled_tokens,
                        began_s=began_s,
                        prompt_tokens=self._prompt_tokens(output),
                        work=step_work(output, self.requests) if self._learn_cost else None,
                    )
                )
            with self._caught("meter"):
                self._meter.scheduled(self._clock() - began_s, len(output.preempted_req_ids or ()))
            self._read_core()
            return output

    def update_from_output(self, output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if "_core" not in self.__dict__:  # made without a constructor, as parts of vLLM's own tests do
            return super().update_from_output(output, *args, **kwargs)
        with self._lock:
            self._updating = True
            try:
                results = super().update_from_output(output, *args, **kwargs)
            finally:
                self._updating = False
            self._return_sessions()
            now, ended = self._clock(), self._take_ended()
            with self._caught("step"):
                step = self._take_step(now, output)
                self._core.on_step(
                    now,
                    step_s=self._step_seconds(now, step, output),
                    computed=_computed(step, results),
                    ended=ended,
                    work=step.work,
                )
            for call_id, completed in ended.items():  # those that a failure above has left
                self._core.on_end(now, call_id, finished=completed)
            self._read_core()
            return results

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            finished = super().finish_requests(*args, **kwargs)
            if not self._updating:  # else `update_from_output` reports the ends, after the tokens of its step
                now = self._clock()
                for call_id, completed in self._take_ended().items():
                    self._core.on_end(now, call_id, finished=completed)
            return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self._lock:
            self._execution.release_all()  # held blocks would keep the cache from being reset
            self._read_core()
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        with contextlib.suppress(KeyError):
            self._core.on_update(self._call(session))

    def _handle_stopped_request(self, request: Request) -> bool:
        if "_core" not in self.__dict__:
            return bool(super()._handle_stopped_request(request))
        waited = request in self.waiting or request in self.kv_holding_waiting
        finished = bool(super()._handle_stopped_request(request))
        if waited and not finished:
            self._returning.append(request)
        return finished

    def _return_sessions(self) -> None:
        """vLLM takes a request that stopped while it waited out of all queues. A session whose stop token was in flight
        when it was preempted expects more input, and vLLM would forget it."""
        for request in self._returning:
            if request.request_id in self.requests and not request.is_finished():
                self._enqueue_waiting_request(request)
        self._returning.clear()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._ended[CallId(request.request_id)] = request.status in FINISHED
        self._prefilling.pop(request.request_id, None)
        with self._caught("hold"):
            self._execution.before_free(request)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    # The calls of the control server, from its threads.

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None, *, bypass: bool = False
    ) -> engine_status.Switched:
        with self._switching, _no_garbage_collection():
            with self._lock:
                switch = self._core.begin_switch(self._clock(), name, parameters or {})
            switch.learn()
            with self._lock:
                switched = self._core.end_switch(self._clock(), switch, reason, bypass=bypass)
                if bypass:
                    self._execution.release_all()
                    self._read_core()
                return switched

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> engine_status.Controls:
        with self._lock:
            return self._core.set_controls(max_running=max_running, max_step_tokens=max_step_tokens)

    def state(self, *, max_waiting_ids: int = engine_status.SHOWN_WAITING) -> engine_status.State:
        with self._lock:
            self._execution.release_overdue()
            counts = self._core.counts(self._clock(), kv_usage=self.get_kv_cache_usage())
            waiting_ids = self._core.waiting_later(max_waiting_ids)
        return replace(counts, waiting_ids=waiting_ids())

    def watch(self) -> engine_status.Watch:
        with self._lock:
            recorder = self._core.watch(self._clock())
        return engine_status.Watch(
            cut=functools.partial(self.cut, recorder), close=functools.partial(self.unwatch, recorder)
        )

    def cut(self, watch: window.Recorder) -> engine_status.WatchReport:
        with self._lock:
            self._execution.release_overdue()
            return self._core.cut(self._clock(), watch)

    def unwatch(self, watch: window.Recorder) -> None:
        with self._lock:
            self._core.unwatch(watch)

    def _read_core(self) -> None:
        with self._caught("meter"):
            self._core_reader.read()

    # Calls for requests.

    def _admitted(self, request: Request) -> policies.QueuedRequest:
        """The core's record of a request. A request that the core does not know arrives now."""
        try:
            return self._core.item(CallId(request.request_id))
        except KeyError:
            return self._core.on_arrival(self._clock(), self._call(request))

    def _ranked(self, request: Request) -> None:
        """A running request is about to be ranked. vLLM reads its `priority` anew each time, so a changed one counts."""
        known, priority = self._admitted(request).call, vllm_labels.client_priority(request)
        if known.client_priority != priority and not vllm_labels.labelled(request):
            self._core.on_update(replace(known, client_priority=priority))

    def _call(self, request: Request) -> Call:
        now, prior = self._clock(), self._core.output_prior.tokens
        call: Call | None = None
        with self._caught("labels"):
            call = vllm_labels.call(now, request, output_prior=prior, on_bad=self._meter.bad_label)
        return call or vllm_labels.unlabelled(now, request, output_prior=prior)

    def _preempted_item(self, request: Request) -> policies.QueuedRequest:
        call_id = self._admitted(request).call.id
        return self._core.on_preemption(self._clock(), call_id, output_tokens=request.num_output_tokens)

    # Reporting facts.

    def _prompt_tokens(self, output: SchedulerOutput) -> dict[str, int]:
        """The prompt tokens of each request that computes some; vLLM has just advanced `num_computed_tokens`."""
        scheduled, prefilling = output.num_scheduled_tokens, self._prefilling
        prefilling.update((new.req_id, None) for new in output.scheduled_new_reqs)
        prefilling.update(dict.fromkeys(output.scheduled_cached_reqs.resumed_req_ids))
        computing: Collection[str] = [request_id for request_id in prefilling if request_id in scheduled]
        prefilled = sum(map(scheduled.__getitem__, computing))
        if output.total_num_scheduled_tokens - prefilled != len(scheduled) - len(computing):
            computing = scheduled  # requests compute drafts, or a prompt again
        found = {}
        for request_id in computing:
            tokens, request = scheduled[request_id], self.requests[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens + tokens
            if left > 0:
                found[request_id] = min(tokens, left)
            if left <= tokens:
                prefilling.pop(request_id, None)
        return found

    def _step_seconds(self, now: float, step: _Step, output: SchedulerOutput) -> float:
        """With async scheduling steps overlap; a step's time starts when the step before it has ended."""
        began_s = max(step.began_s, self._last_step_s)
        self._last_step_s = now
        if not output.total_num_scheduled_tokens:
            return 0.0
        with self._caught("meter"):
            self._meter.stepped(now - began_s, output.num_scheduled_tokens.values())
        return now - began_s

    def _take_step(self, now: float, output: SchedulerOutput) -> _Step:
        """The step of an output. Outputs come in the order of the steps. An output of no remembered step has no facts."""
        steps = self._steps
        for index, step in enumerate(steps):
            if step.scheduled is output.num_scheduled_tokens or step.scheduled == output.num_scheduled_tokens:
                for _ in range(index + 1):
                    steps.popleft()
                return step
        return _Step(scheduled={}, began_s=now, prompt_tokens={})

    def _take_ended(self) -> dict[CallId, bool]:
        ended, self._ended = self._ended, {}
        return ended


def step_work(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepWork:
    """The work of a step; vLLM has just advanced `num_computed_tokens`. A request that computes one token beyond its prompt
    decodes, whatever drafts follow the token; all other tokens are prefill."""
    uncached = attended = decodes = context = 0
    drafts = output.scheduled_spec_decode_tokens
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        end = request.num_computed_tokens
        if end - tokens >= request.num_prompt_tokens and tokens - len(drafts.get(request_id, ())) == 1:
            decodes += 1
            context += end
        else:
            uncached += tokens
            attended += tokens * (end - tokens) + tokens * (tokens + 1) // 2
    return StepWork(uncached=uncached, attended=attended, decodes=decodes, context=context)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Puts off the garbage collector. A switch of the policy makes objects for each waiting request. The collections that
    they cause would walk all objects of all requests, while the engine waits for the lock."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _report(hook: str, error: Exception) -> None:
    log.error("%s failed: %s", hook, PARTS.get(hook, PARTS["policy"]), exc_info=error)


def _computed(step: _Step, results: Mapping[int, Any]) -> dict[CallId, Computed]:
    """The tokens of a step by call: prompt tokens that it computed, and output tokens that it delivered."""
    found: dict[CallId, Computed] = {
        result.request_id: ONE_OUTPUT if len(result.new_token_ids) == 1 else Computed(0, len(result.new_token_ids))
        for batch in results.values()
        for result in batch.outputs
    }
    for request_id, tokens in step.prompt_tokens.items():
        call_id = CallId(request_id)
        found[call_id] = Computed(tokens, found[call_id].output_tokens if call_id in found else 0)
    return found


class TidegateScheduler(TidegateSchedulerMixin, Scheduler):  # type: ignore[misc]
    """For platforms on which vLLM waits for each step's output before it schedules the next step."""


class TidegateAsyncScheduler(TidegateSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """For platforms on which vLLM schedules a step while the step before it still runs."""


def over(base: type[Scheduler]) -> type[Scheduler]:
    """Tidegate's class over one of vLLM's. vLLM has further ones, such as those of diffusion models."""
    for known in (TidegateAsyncScheduler, TidegateScheduler):
        if known.__bases__[1] is base:
            return known
    return type(f"Tidegate{base.__name__}", (TidegateSchedulerMixin, base), {})
