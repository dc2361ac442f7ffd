"""vLLM's `RequestQueue` over the policy library's `WaitingQueue`: waiting requests in the order of the active policy.

vLLM 0.32 has two such queues: `waiting`, and `kv_holding_waiting` for requests that wait while they hold KV blocks. The
scheduler mixin replaces both. vLLM pops a request that it starts, and it also pops a request that it skips in this step;
it returns the skipped requests at the end of the step. `Scan` tells the two apart by the status that vLLM sets, so a skip
is no start: the request keeps its place, its lane keeps its turn, and the policy hears nothing.

A request that the engine core does not know is admitted when it is queued, so code that fills vLLM's queues directly works
as with vLLM's own queues.
"""

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched import request_queue
from vllm.v1.request import Request, RequestStatus

from tidegate_policy.model import CallId
from tidegate_policy.policies import QueuedRequest
from tidegate_policy.waiting_queue import EmptyQueue, WaitingQueue


class Scan:
    """One pass of `schedule` over the waiting requests of all queues."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.active = False
        self._clock = clock
        self._queues: list[OrderedQueue] = []
        self.popped: Request | None = None
        """The last request that vLLM popped. Whether it starts is not known before vLLM's next look at a queue."""
        self.popped_from: OrderedQueue | None = None

    def join(self, queue: "OrderedQueue") -> None:
        self._queues.append(queue)

    def begin(self) -> None:
        self.active = True

    def settle(self) -> None:
        """Reports the start of the last request that was popped, if vLLM started it."""
        request, self.popped = self.popped, None
        if request is not None and self.popped_from is not None and request.status is RequestStatus.RUNNING:
            self.popped_from.started(self._clock(), request)

    def end(self) -> None:
        self.settle()
        self.active = False
        for queue in self._queues:
            queue.end_scan()

    def passed_elsewhere(self, queue: "OrderedQueue") -> bool:
        """Whether this scan popped a request of another queue and did not start it."""
        return any(other._passed for other in self._queues if other is not queue)

    def moved(self, to: "OrderedQueue", request: Request) -> None:
        """vLLM returns a skipped request to another queue than the one from which it popped it."""
        for queue in self._queues:
            if queue is not to and request in queue:
                queue.remove_request(request)


class OrderedQueue(request_queue.RequestQueue):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """One of the engine's waiting queues. The engine core switches its policy."""

    def __init__(
        self,
        queue: WaitingQueue,
        scan: Scan,
        *,
        clock: Callable[[], float],
        admit: Callable[[Request], QueuedRequest],
        preempted: Callable[[Request], QueuedRequest],
    ) -> None:
        """`admit` and `preempted` give the core's record of a request that arrives or that lost its place."""
        self._queue = queue
        self._scan = scan
        self._clock = clock
        self._admit = admit
        self._preempted = preempted
        self._requests: dict[str, Request] = {}
        self._peeked: Request | None = None
        """The request that vLLM has looked at in this scan and may pop next."""
        self._passed = 0
        """Requests that vLLM popped in this scan and did not start; they are still in `_requests`."""
        scan.join(self)

    def add_request(self, request: Request) -> None:
        """A request that already waits here moves to the end of its equals."""
        self._requests[request.request_id] = request
        self._queue.remove(CallId(request.request_id))
        self._queue.push(self._admit(request))

    def pop_request(self) -> Request:
        """Raises `IndexError` if no request waits."""
        scan = self._scan
        if scan.active:
            request = self._peeked or self.peek_request()
            self._peeked = None
            self._passed += 1
            self._queue.set_aside(CallId(request.request_id))
            scan.popped, scan.popped_from = request, self
        else:
            request = self.peek_request()
            self.started(self._clock(), request)
        return request

    def peek_request(self) -> Request:
        """Raises `IndexError` if no request waits."""
        popped = self._scan.popped
        if popped is not None and popped.status is RequestStatus.RUNNING:
            self._scan.settle()
        try:
            self._peeked = self._requests[self._queue.peek().call.id]
        except EmptyQueue:
            raise IndexError("the queue is empty") from None
        return self._peeked

    def prepend_request(self, request: Request) -> None:
        """vLLM calls this for a preempted request: it comes back before its equals, with its recomputation as work."""
        self._queue.remove(CallId(request.request_id))
        self._requests[request.request_id] = request
        self._queue.push_preempted(self._preempted(request))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM calls this for the requests that the step skipped, last first. Those that were popped here have kept their
        place; those that were popped from the other queue come before or behind them, as they were popped."""
        self._scan.settle()
        requests = list(requests)
        if len(requests) == self._passed and not self._scan.passed_elsewhere(self):
            self.end_scan()  # they are those that were popped here
            return
        behind: list[Request] = []
        before: list[Request] = []
        for request in requests:
            if request.request_id not in self._requests:
                before.append(request)
            elif before:
                behind += before
                before = []
        for request in before:
            self._queue.push_preempted(self._moved(request))
        for request in reversed(behind):
            self._queue.push(self._moved(request))
        self.end_scan()  # vLLM counts the returned requests at once

    def _moved(self, request: Request) -> QueuedRequest:
        self._scan.moved(self, request)
        self._requests[request.request_id] = request
        return self._admit(request)

    def remove_request(self, request: Request) -> None:
        """Raises `ValueError` if the request does not wait here."""
        if self._requests.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id!r} does not wait here")
        self._queue.remove(CallId(request.request_id))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Removes those of `requests` that wait here."""
        for request in requests:
            if self._requests.pop(request.request_id, None) is not None:
                self._queue.remove(CallId(request.request_id))

    def started(self, now: float, request: Request) -> None:
        """A request that was popped in this scan runs."""
        self._peeked = None
        self._passed = max(self._passed - 1, 0)
        del self._requests[request.request_id]
        self._queue.start(now, CallId(request.request_id))

    def end_scan(self) -> None:
        self._peeked = None
        self._passed = 0
        self._queue.end_scan()

    def __contains__(self, request: object) -> bool:
        return self._requests.get(getattr(request, "request_id", "")) is request

    def __bool__(self) -> bool:
        """The last request that was popped does not count, whether it starts or not."""
        return len(self._requests) > self._passed

    def __len__(self) -> int:
        self._scan.settle()
        return self._queue.candidates

    def __getitem__(self, place: int) -> Request:
        """As in vLLM's own queue under FCFS, which is a deque. It costs the order of all requests before the place."""
        return list(self)[place]

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[item.call.id] for item in self._queue)
