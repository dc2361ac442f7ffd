"""The answers of vLLM's scheduler to the questions of the engine core (`EngineProbe`). No answer changes its state.

vLLM holds requests in its waiting queues that the next step cannot start: their grammar is not compiled, their KV is still
loaded from elsewhere, their session has sent no more input, outputs of a step before their preemption are still on their
way, a LoRA adapter more would exceed vLLM's limit, or the engine is paused. `startable` repeats these conditions of vLLM's
`schedule`, without its effects.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tidegate_policy.model import CallId
from tidegate_policy.policies import QueuedRequest

MOST_PENDING = 1024
"""Calls that are remembered because their grammar is not compiled. More are forgotten together."""


class VllmProbe:
    """The answers."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pending: dict[int, tuple[QueuedRequest, Request]] = {}
        """Calls whose grammar was not compiled at the last look, by the `id` of the item, with their requests. The next
        look at such a call touches little memory."""

    def kv_tokens(self, call_id: CallId) -> int:
        return int(self._scheduler.requests[call_id].num_computed_tokens)

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        """Requests share their first blocks, so each cache group is counted from its end to its first shared block."""
        size = self._scheduler.block_size
        most = -(-enough // size)
        groups = self._scheduler.kv_cache_manager.get_blocks(call_id).blocks
        own = (itertools.takewhile(_one_holder, itertools.islice(reversed(group), most)) for group in groups)
        return int(min(sum(1 for _ in itertools.chain.from_iterable(own)), most) * size)

    def free_kv_tokens(self) -> int:
        pool = self._scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks() * self._scheduler.block_size)

    def cached_tokens(self, call_id: CallId) -> int:
        return max(self._hit(call_id)[1], self._own_tokens(call_id))

    def shared_tokens(self, call_id: CallId) -> int:
        """A call that has a block has the blocks before it too. Of several cache groups the one with the fewest counts."""
        kept = (itertools.takewhile(_is_held, group) for group in self._hit(call_id)[0])
        shared = min((sum(1 for _ in group) for group in kept), default=0) * int(self._scheduler.block_size)
        return max(shared, self._own_tokens(call_id))

    def _own_tokens(self, call_id: CallId) -> int:
        """Tokens whose KV a waiting request has itself: a session does between its inputs, and a request whose KV was
        loaded. The prefix cache does not know loaded blocks before the request starts."""
        request = self._scheduler.requests.get(call_id)
        return 0 if request is None else int(request.num_computed_tokens)

    def _hit(self, call_id: CallId) -> tuple[Sequence[Sequence[Any]], int]:
        """The leading blocks of a request that the prefix cache holds, by cache group, and their tokens."""
        manager, request = self._scheduler.kv_cache_manager, self._scheduler.requests.get(call_id)
        if request is None or not manager.prefix_cache_lookup_enabled(request):
            return (), 0
        blocks, tokens = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[:2]
        return blocks, int(tokens)

    def reserved_places(self) -> int:
        return int(self._scheduler.num_waiting_for_streaming_input)

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        """Those of the waiting calls that vLLM does not skip. Each that is given counts for the limit of LoRA adapters."""
        scheduler = self._scheduler
        limit = scheduler.lora_config.max_loras if scheduler.lora_config else None
        loras = {_lora(request) for request in scheduler.running} if limit else set()
        loras.discard(0)
        pending, requests = self._pending, scheduler.requests
        for key, (item, request) in list(pending.items()):
            if requests.get(item.call.id) is not request:
                del pending[key]  # it has ended, and nobody asks for it again
        for item in waiting:
            known = pending.get(id(item))
            if known is not None:
                if _lacks_grammar(known[1]):
                    continue
                del pending[id(item)]
            request = requests.get(item.call.id)
            if request is None:
                continue
            if not self._ready(request):
                if _lacks_grammar(request):
                    if len(pending) >= MOST_PENDING:
                        pending.clear()
                    pending[id(item)] = (item, request)
                continue
            lora = _lora(request) if limit else 0
            if lora and lora not in loras:
                if len(loras) == limit:
                    continue
                loras.add(lora)
            yield item

    def _ready(self, request: Request) -> bool:
        """Whether the request waits for nothing but its turn."""
        scheduler = self._scheduler
        if scheduler.pause_state is not PauseState.UNPAUSED and (
            scheduler.pause_state is PauseState.PAUSED_ALL or request not in scheduler.kv_holding_waiting
        ):
            return False
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if not scheduler._is_blocked_waiting_status(request.status):
            return True
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in scheduler.finished_recving_kv_req_ids
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            compiled = request.structured_output_request
            grammar = None if compiled is None else compiled.grammar
            return grammar is not None and not isinstance(grammar, Exception)
        return False


def _lacks_grammar(request: Request) -> bool:
    """Whether the request waits for its grammar, which is not compiled yet."""
    if request.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return False
    structured = request.structured_output_request
    grammar = None if structured is None else structured._grammar
    return grammar is None or (isinstance(grammar, Future) and not grammar.done())


def _is_held(block: Any) -> bool:
    return bool(block.ref_cnt and not block.is_null)


def _one_holder(block: Any) -> bool:
    return bool(block.ref_cnt == 1 and not block.is_null)


def _lora(request: Request) -> int:
    """The number of the request's LoRA adapter; 0 = none."""
    return int(request.lora_request.lora_int_id) if request.lora_request else 0
