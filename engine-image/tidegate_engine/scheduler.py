"""vLLM's scheduler with Tidegate's order of waiting, choice of victims and bounds of a step.

One mixin, two classes: over `AsyncScheduler` where vLLM schedules ahead of the device (GPUs), over `Scheduler` where it
does not (the CPU platform). Everything that vLLM does in a step stays vLLM's; the mixin replaces the waiting queues, sets
each request's `priority` to its key, so that vLLM's own victim choice follows the order reversed, and moves the limits
that vLLM reads. Under `fcfs` it switches vLLM's `policy` to FCFS, and the schedule is vLLM's own, step by step.

The engine core calls from its one thread, `control` from another. One lock guards both; a policy is in force as soon as
the lock is released, also while the engine core is idle and blocks on its input.
"""

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tidegate_control import control_contract
from tidegate_engine import meters, request_queue
from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
from tidegate_policy.qos import Qos
from tidegate_policy.window import Recorder

GENERIC = CostModel(step_s=0.02, prefill_s=1e-4)
"""For engines without a profile. Orders compare calls on one engine, so proportions matter more than seconds."""


class Governed(SchedulerInterface):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """The mixin; stands before one of vLLM's scheduler classes."""

    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(
        self,
        *args: Any,
        cost: CostModel = GENERIC,
        policy: str = "fcfs",
        clock: Callable[[], float] = time.monotonic,
        meter: meters.Meter = meters.SILENT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._clock = clock
        self._meter = meter
        self._desk = request_queue.Desk(cost)
        order = policies.named(policy)
        self._queues = tuple(request_queue.OrderedQueue(order, self._desk) for _ in range(2))
        self.waiting, self.kv_holding_waiting = self._queues
        self._own_limits: tuple[int, int] = (self.max_num_active_reqs, self.max_num_scheduled_tokens)
        self._controls = control_contract.Controls()
        self._steps: dict[int, float] = {}
        self._last_step_s = clock()
        self._ended: list[Request] = []
        self._watches: list[_Watch] = []
        self._preemptions = 0
        self._apply(order, reason="at start")

    # What the engine core calls.

    def add_request(self, request: Request) -> None:
        with self._lock:
            if request.request_id not in self.requests:
                ticket = self._desk.admit(self._clock(), request)
                self._prioritise(request)
                for watch in self._watches:
                    watch.recorder.on_arrival(ticket.call, ticket.service_s)
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        with self._lock:
            began_s = self._clock()
            output = super().schedule(*args, **kwargs)
            self._steps[id(output)] = began_s
            evicted = len(output.preempted_req_ids or ())
            if evicted:
                self._on_evictions(output.preempted_req_ids)
            self._meter.scheduled(self._clock() - began_s, evicted)
            return output

    def update_from_output(self, output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            results = super().update_from_output(output, *args, **kwargs)
            now = self._clock()
            self._on_step(now, output)
            if self._watches:
                for batch in results.values():
                    for result in batch.outputs:
                        self._on_tokens(now, CallId(result.request_id), len(result.new_token_ids))
            self._forget_ended(now)
            return results

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            finished = super().finish_requests(*args, **kwargs)
            self._forget_ended(self._clock())
            return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with self._lock:
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._ended.append(request)
        return super()._free_request(request, *args, **kwargs)

    # What `control` calls (`control_contract.ControlledEngine`).

    def set_policy(self, name: str, reason: str) -> control_contract.Switched:
        order = policies.named(name)
        with self._lock:
            previous = self._order.name
            reordered = sum(queue.switch(order) for queue in self._queues)
            self._apply(order, reason)
            return control_contract.Switched(policy=order.name, previous=previous, reordered=reordered)

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> control_contract.Controls:
        """Bounds only tighten: each stays within the engine's own limit, and a step has at least one token for each
        sequence that may run, so that no decode starves."""
        with self._lock:
            now = self._controls
            running = now.max_running if max_running is None else max_running
            tokens = now.max_step_tokens if max_step_tokens is None else max_step_tokens
            own_running, own_tokens = self._own_limits
            self.max_num_active_reqs = min(running or own_running, own_running)
            floor = max(self.max_num_active_reqs, len(self.running))
            self.max_num_scheduled_tokens = min(max(tokens or own_tokens, floor), own_tokens)
            self._controls = control_contract.Controls(
                max_running=self.max_num_active_reqs if running else 0,
                max_step_tokens=self.max_num_scheduled_tokens if tokens else 0,
            )
            return self._controls

    def state(self) -> control_contract.State:
        with self._lock:
            waiting = (request.request_id for queue in reversed(self._queues) for request in queue)
            return control_contract.State(
                policy=self._order.name,
                policy_reason=self._reason,
                policy_age_s=self._clock() - self._since_s,
                controls=self._controls,
                running=len(self.running),
                waiting=sum(map(len, self._queues)),
                kv_usage=self.get_kv_cache_usage(),
                waiting_ids=tuple(islice(waiting, control_contract.SHOWN_WAITING)),
                preemptions=self._preemptions,
            )

    def watch(self) -> control_contract.Watch:
        with self._lock:
            watch = _Watch(self, Recorder(self._clock()))
            self._watches.append(watch)
            return watch

    def cut(self, watch: "_Watch") -> tuple[str, Qos, float]:
        with self._lock:
            busy_s, watch.busy_s = watch.busy_s, 0.0
            window = watch.recorder.cut(
                self._clock(),
                running=len(self.running),
                waiting=sum(map(len, self._queues)),
                kv_usage=self.get_kv_cache_usage(),
            )
            return self._order.name, window, busy_s

    def unwatch(self, watch: "_Watch") -> None:
        with self._lock:
            self._watches.remove(watch)

    # The machinery.

    def _apply(self, order: policies.Policy, reason: str) -> None:
        self._order = order
        self._reason = reason[: control_contract.KEPT_REASON]
        self._since_s = self._clock()
        self.policy = SchedulingPolicy.FCFS if order.name == "fcfs" else SchedulingPolicy.PRIORITY
        for request in (*self.running, *self.waiting, *self.kv_holding_waiting):
            self._prioritise(request)

    def _prioritise(self, request: Request) -> None:
        """vLLM evicts the running request with the greatest (priority, arrival): ours is (lane, *key)."""
        ticket = self._desk.of(request)
        request.priority = (self._order.lane(ticket), *self._order.key(ticket))

    def _on_evictions(self, evicted: Any) -> None:
        self._preemptions += len(evicted)
        for request_id in evicted:
            if request_id in self.requests:
                self._prioritise(self.requests[request_id])
            for watch in self._watches:
                watch.recorder.on_preemption()

    def _on_step(self, now: float, output: SchedulerOutput) -> None:
        """With async scheduling steps overlap; a step's time starts when the one before it has ended."""
        began_s = max(self._steps.pop(id(output), now), self._last_step_s)
        self._last_step_s = now
        if output.total_num_scheduled_tokens:
            self._meter.stepped(now - began_s, output.num_scheduled_tokens.values())
            for watch in self._watches:
                watch.busy_s += now - began_s

    def _on_tokens(self, now: float, call_id: CallId, tokens: int) -> None:
        if tokens:
            for watch in self._watches:
                watch.recorder.on_tokens(now, call_id, tokens)

    def _forget_ended(self, now: float) -> None:
        ended, self._ended = self._ended, []
        for request in ended:
            finished = request.status != RequestStatus.FINISHED_ABORTED
            for watch in self._watches:
                watch.recorder.on_end(now, CallId(request.request_id), finished=finished)
            self._desk.dismiss(request)


class _Watch:
    """One watcher's recorder: watchers with different periods do not share windows."""

    def __init__(self, scheduler: Governed, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self.recorder = recorder
        self.busy_s = 0.0

    def cut(self) -> tuple[str, Qos, float]:
        return self._scheduler.cut(self)

    def close(self) -> None:
        self._scheduler.unwatch(self)


class TidegateScheduler(Governed, Scheduler):  # type: ignore[misc]
    """Where vLLM waits for each step's output before it schedules the next."""


class TidegateAsyncScheduler(Governed, AsyncScheduler):  # type: ignore[misc]
    """Where vLLM schedules a step while the one before it still runs."""
