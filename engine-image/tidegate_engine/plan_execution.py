"""Carries out the plans of the engine core inside vLLM's scheduler, by vLLM's own means.

- Bounds: `max_num_scheduled_tokens`, `max_num_active_reqs` and `long_prefill_token_threshold`.
- Preemption: vLLM's `_preempt_request`; the call can resume in the same step. Where a KV connector loads blocks, vLLM frees
  none that a step in flight may still write. Such a call pauses until no step in flight has it.
- Pause: `next_decode_eligible_step`; the request keeps its KV blocks and computes nothing in this step.
- Held contexts: `block_pool.touch` on the cached blocks of a request that ends, `free_blocks` when the hold is over.
- Memory: when vLLM cannot allocate blocks, held contexts yield first. When vLLM then asks for its policy, to choose the
  request that it preempts, `priority` of each running request becomes its place in the core's order of yielding, and vLLM
  preempts the greatest. After the step each request has its own number again, which other parts of vLLM and its connectors
  read.

The scheduler mixin calls this module under its lock. `vllm_probe` answers the core's questions.
"""

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import CallId

if TYPE_CHECKING:
    from tidegate_policy.engine.engine_core import EngineCore


def limits(scheduler: Any) -> EngineLimits:
    """The limits with which vLLM was started, and the tokens without which it cannot start a request."""
    drafts = scheduler.num_spec_tokens
    if not scheduler.scheduler_config.enable_chunked_prefill:
        start = scheduler.max_model_len
    elif scheduler.need_mamba_block_aligned_split:
        start = scheduler.block_size + scheduler.num_prefill_lookahead
    else:
        start = 1 + max(drafts, scheduler.num_prefill_lookahead)
    if scheduler.scheduler_config.disable_chunked_mm_input:  # the longest image is computed in one step
        start = max(start, scheduler.max_num_encoder_input_tokens)
    return EngineLimits(
        max_running=scheduler.max_num_active_reqs,
        max_step_tokens=scheduler.max_num_scheduled_tokens,
        tokens_per_sequence=1 + drafts,
        start_tokens=start,
        kv_tokens=max(scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, 1) * scheduler.block_size,
    )


class PlanExecution:
    """The plans of one engine core in one vLLM scheduler."""

    def __init__(
        self,
        scheduler: Any,
        core: "EngineCore",
        *,
        clock: Callable[[], float],
        ranked: Callable[[Request], object],
    ) -> None:
        """`ranked` makes sure that the core knows a request as it is now."""
        self._scheduler = scheduler
        self._core = core
        self._ranked = ranked
        self._clock = clock
        self._held: dict[CallId, list[Any]] = {}
        """The blocks of each held context, in the order of the prompt."""
        self._yielding: list[CallId] = []
        """The calls that pause until they can be preempted."""
        self._own_priority: dict[str, tuple[Request, int]] = {}
        """The requests whose `priority` is a place in the order of yielding now, with their own number."""
        self._stepping = False
        self._own_call_tokens: tuple[int, bool] | None = None
        """vLLM's own bound of the tokens of one request (0 = none), and whether vLLM raises it where few requests share the
        step, while a plan's bound stands in its place."""
        self._manager = scheduler.kv_cache_manager
        self._allocate_slots: Callable[..., Any] | None = None
        """vLLM's `allocate_slots`, while `_allocate` stands in its place."""

    def begin_step(self) -> None:
        """Takes the core's plan and prepares vLLM's scheduler for it. Call it before `schedule`."""
        self.release_overdue()
        self._carry_out(self._core.take_plan(self._clock()))
        # vLLM allocates for each running request in each step, so its own method stays where nothing is held.
        if self._held:
            self._allocate_slots = self._manager.allocate_slots
            self._manager.allocate_slots = self._allocate
        self._stepping = True

    def end_step(self) -> None:
        """Call it after `schedule`, also if it raised."""
        self._stepping = False
        if self._own_call_tokens is not None:
            own, self._scheduler.adaptive_long_prefill_threshold = self._own_call_tokens
            self._scheduler.scheduler_config.long_prefill_token_threshold, self._own_call_tokens = own, None
        if self._allocate_slots is not None:
            self._manager.allocate_slots, self._allocate_slots = self._allocate_slots, None
        for request, priority in self._own_priority.values():
            request.priority = priority
        self._own_priority.clear()

    def preemption_policy(self, own: SchedulingPolicy) -> SchedulingPolicy:
        """vLLM's choice of the request to preempt. `own` is the policy that the scheduler has at other times."""
        if not self._stepping or own is SchedulingPolicy.FCFS:
            return own
        self._rank_running()
        return SchedulingPolicy.FCFS if self._core.policy.failing else own

    def before_free(self, request: Request) -> None:
        """A request is about to free its blocks because it ended. Holds them if the core wants the context back."""
        if not self._core.holds_contexts:
            return
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            return
        call_id = CallId(request.request_id)
        blocks = [
            block
            for group in self._manager.get_blocks(request.request_id).blocks
            for block in group
            if block.block_hash is not None and not block.is_null
        ]
        if blocks and self._core.hold(self._clock(), call_id, context_tokens=len(blocks) * self._scheduler.block_size):
            self._pool.touch(blocks)
            self._held[call_id] = blocks

    def release_overdue(self) -> None:
        """Frees the held contexts whose time is over. An idle engine makes no steps, so reports free them too."""
        self._free(self._core.take_released(self._clock()))

    def release_all(self) -> None:
        """Frees all held contexts."""
        self._core.release_all()
        self._free(list(self._held))

    @property
    def _pool(self) -> Any:
        return self._manager.block_pool

    def _carry_out(self, plan: StepPlan) -> None:
        scheduler = self._scheduler
        # While calls of an earlier plan pause for it, a plan would preempt others in their place.
        self._yielding = [call_id for call_id in self._yielding or plan.preempt if not self._preempt(call_id)]
        scheduler.max_num_scheduled_tokens = plan.max_step_tokens
        scheduler.max_num_active_reqs = plan.max_running
        if plan.max_starts is not None:
            present = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
            scheduler.max_num_active_reqs = min(plan.max_running, present + plan.max_starts)
        if plan.max_call_tokens is not None:
            own = scheduler.scheduler_config.long_prefill_token_threshold
            self._own_call_tokens = own, scheduler.adaptive_long_prefill_threshold
            scheduler.scheduler_config.long_prefill_token_threshold = min(plan.max_call_tokens, own or sys.maxsize)
            scheduler.adaptive_long_prefill_threshold = False
        for call_id in (*self._yielding, *plan.paused):
            request = scheduler.requests.get(call_id)
            if request is not None and self._can_pause(request):
                eligible = scheduler.current_step + 2  # `schedule` counts the step first
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)

    def _can_pause(self, request: Request) -> bool:
        """vLLM counts the adapters of the calls that compute. Beside one that pauses it would start one too many."""
        return not (self._scheduler.lora_config and request.lora_request)

    def _preempt(self, call_id: CallId) -> bool:
        """Preempts a running request by vLLM's own method; False if it must pause before."""
        scheduler = self._scheduler
        request = scheduler.requests.get(call_id)
        if request is None or request.status != RequestStatus.RUNNING or request not in scheduler.running:
            return True
        if not scheduler._request_blocks_can_be_freed(request):
            return not self._can_pause(request)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(call_id)  # it may resume in this step
        return True

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `allocate_slots`. If there is no memory, held contexts yield (AugServe eq 31 with gamma = 1)."""
        allocate_slots = self._allocate_slots
        assert allocate_slots is not None  # `end_step` puts vLLM's method back
        blocks = allocate_slots(request, *args, **kwargs)
        while blocks is None and self._held:
            call_id = self._core.release_one()
            if call_id is None:
                break
            self._free([call_id])
            blocks = allocate_slots(request, *args, **kwargs)
        return blocks

    def _rank_running(self) -> None:
        """Sets the running requests' `priority` so that vLLM preempts in the core's order. Once in each step."""
        if self._own_priority:
            return
        for request in self._scheduler.running:
            self._ranked(request)
            self._core.on_found_running(CallId(request.request_id))
        order = {call_id: place for place, call_id in enumerate(self._core.victims(self._clock()))}
        for request in self._scheduler.running:
            self._own_priority[request.request_id] = (request, request.priority)
            request.priority = len(order) - order[CallId(request.request_id)]

    def _free(self, call_ids: Iterable[CallId]) -> None:
        for call_id in call_ids:
            blocks = self._held.pop(call_id, None)
            if blocks is not None:
                self._pool.free_blocks(reversed(blocks))
