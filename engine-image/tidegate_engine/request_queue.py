"""vLLM's `RequestQueue` over the policy library's `WaitingQueue`: waiting requests in the order of the active policy.

vLLM 0.32 has two such queues: `waiting`, and `kv_holding_waiting` for requests that wait while they hold KV blocks. The
scheduler mixin replaces both. This module translates vLLM's four ways of putting a request into a queue; the engine core
knows the calls.
"""

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched import request_queue
from vllm.v1.request import Request

from tidegate_policy.engine.engine_core import EngineCore
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import Start, WaitingQueue


class OrderedQueue(request_queue.RequestQueue):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """One of the engine's waiting queues. The engine core switches its policy."""

    def __init__(
        self, queue: WaitingQueue, core: EngineCore, starts: dict[str, Start], clock: Callable[[], float]
    ) -> None:
        """`starts` holds the starts of the current step; all queues of the engine share it."""
        self._queue = queue
        self._core = core
        self._starts = starts
        self._clock = clock
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._queue.push(self._core.item(CallId(request.request_id)))

    def pop_request(self) -> Request:
        """Counts as a start. vLLM also pops requests that it then skips; `prepend_requests` undoes these starts."""
        start = self._queue.pop(self._clock())
        call_id = start.item.call.id
        self._starts[call_id] = start
        return self._requests.pop(call_id)

    def peek_request(self) -> Request:
        return self._requests[self._queue.peek().call.id]

    def prepend_request(self, request: Request) -> None:
        """vLLM calls this for a preempted request: it comes back before its equals, with its recomputation as work."""
        call_id = CallId(request.request_id)
        item = self._core.on_preemption(self._clock(), call_id, output_tokens=request.num_output_tokens)
        self._requests[request.request_id] = request
        self._queue.push_preempted(item)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM calls this for requests that the step skipped: each returns to its old place."""
        for request in requests:
            self._requests[request.request_id] = request
            self._queue.skip(self._clock(), self._starts.pop(request.request_id))

    def remove_request(self, request: Request) -> None:
        """Raises `ValueError` if the request does not wait here."""
        if self._queue.remove(request.request_id) is None:
            raise ValueError(f"request {request.request_id!r} does not wait here")
        del self._requests[request.request_id]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Removes those of `requests` that wait here."""
        for request in requests:
            if self._queue.remove(request.request_id) is not None:
                del self._requests[request.request_id]

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[item.call.id] for item in self._queue)
