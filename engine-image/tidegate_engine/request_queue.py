"""vLLM's `RequestQueue` over the policy library's `WaitingQueue`: who waits, in the order of the active policy.

vLLM 0.32 has two: `waiting`, and `kv_holding_waiting` for requests that wait while they hold KV blocks; `scheduler`
replaces both. The queue knows nothing of time or engines; the desk turns a request into a ticket.
"""

from collections.abc import Iterable, Iterator

from vllm.v1.core.sched import request_queue
from vllm.v1.request import Request

from tidegate_engine import vllm_labels as labels
from tidegate_policy.cost import CostModel
from tidegate_policy.policies import Policy, QueuedRequest
from tidegate_policy.waiting_queue import WaitingQueue


class Desk:
    """The tickets of all requests in the engine, waiting or running, from arrival to end."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._tickets: dict[str, QueuedRequest] = {}

    def admit(self, now: float, request: Request) -> QueuedRequest:
        ticket = labels.ticket(now, request, self._cost)
        self._tickets[ticket.call.id] = ticket
        return ticket

    def evicted(self, request: Request) -> None:
        """The request lost its KV and has more work ahead than it had."""
        self._tickets[request.request_id] = labels.after_eviction(self.of(request), request, self._cost)

    def dismiss(self, request: Request) -> None:
        self._tickets.pop(request.request_id, None)

    def of(self, request: Request) -> QueuedRequest:
        return self._tickets[request.request_id]


class OrderedQueue(request_queue.RequestQueue):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """Requests in the order of a policy that can be switched while they wait."""

    def __init__(self, order: Policy, desk: Desk) -> None:
        self._queue = WaitingQueue(order)
        self._desk = desk
        self._requests: dict[str, Request] = {}

    def switch(self, order: Policy) -> int:
        """Re-orders everybody in place; returns how many wait."""
        self._queue.switch(order)
        return len(self._queue)

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._queue.push(self._desk.of(request))

    def pop_request(self) -> Request:
        return self._requests.pop(self._queue.pop().call.id)

    def peek_request(self) -> Request:
        return self._requests[self._queue.peek().call.id]

    def prepend_request(self, request: Request) -> None:
        """For a preempted request: before its equals, with the work of the recomputation added to its ticket."""
        self._desk.evicted(request)
        self._return(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """For requests that a step has skipped: back to where they were. As in vLLM's queue, the last one goes first."""
        for request in requests:
            self._return(request)

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
        return (self._requests[ticket.call.id] for ticket in self._queue)

    def _return(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._queue.push_front(self._desk.of(request))
