"""The calls of one tenant that wait for its share of the places (`tenant_shares`), in the order of a scheduling policy."""

from collections.abc import Iterator

from tidegate_policy import policies
from tidegate_policy.admit import held_memory
from tidegate_policy.model import CallId
from tidegate_policy.policies import Policy, QueuedRequest
from tidegate_policy.waiting_queue import WaitingQueue


class HeldCalls:
    """The held calls of one tenant, under a policy object of their own: no turn of a lane is shared with other tenants."""

    def __init__(self, policy: Policy) -> None:
        self._queue = WaitingQueue(policy)
        self._tokens_of: dict[CallId, int] = {}
        """KV tokens that each call wants; the one that arrived last is the last."""
        self.tokens = 0
        """Those of all of them."""

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queue)

    def push(self, now: float, item: QueuedRequest) -> None:
        self._queue.rekey(self._queue.policy.on_arrival(now, item))
        self._queue.push(item)
        self._count(item)

    def peek(self) -> QueuedRequest:
        """The next call of the policy."""
        return self._queue.peek()

    def pop(self, now: float) -> QueuedRequest:
        """The next call of the policy leaves."""
        item = self._queue.pop(now)
        self._ended(now, item.call.id)
        return item

    def remove(self, now: float, call_id: CallId) -> QueuedRequest | None:
        item = self._queue.remove(call_id)
        if item is not None:
            self._ended(now, call_id)
        return item

    def remove_newest(self, now: float) -> QueuedRequest | None:
        return self.remove(now, next(reversed(self._tokens_of)))

    def update(self, item: QueuedRequest) -> bool:
        if item.call.id not in self._queue:
            return False
        self._queue.update(item)
        self.tokens -= self._tokens_of[item.call.id]
        self._count(item)
        return True

    def switch(self, now: float, policy: Policy) -> None:
        policies.replay(policy, now, list(self._queue), ())
        self._queue.switch(policy)

    def _count(self, item: QueuedRequest) -> None:
        self._tokens_of[item.call.id] = tokens = held_memory.tokens_of(item.call)
        self.tokens += tokens

    def _ended(self, now: float, call_id: CallId) -> None:
        self.tokens -= self._tokens_of.pop(call_id)
        self._queue.rekey(self._queue.policy.on_end(now, call_id))
