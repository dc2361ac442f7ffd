"""The queue keeps everybody, once, in the order of the active policy."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tidegate_policy import policies
from tidegate_policy.model import Call, CallId
from tidegate_policy.waiting_queue import DuplicateCall, NobodyWaits, WaitingQueue

POLICIES = st.sampled_from(sorted(policies.POLICIES))


def ticket(
    name: str, *, due_s: float | None = None, service_s: float = 1.0, urgency: int = 2
) -> policies.QueuedRequest:
    call = Call(id=CallId(name), arrival_s=0.0, prompt_tokens=10, output_predicted=10, due_s=due_s, urgency=urgency)
    return policies.QueuedRequest(call=call, service_s=service_s)


TICKETS = st.builds(
    ticket,
    st.uuids().map(str),
    due_s=st.none() | st.floats(-10, 1000),
    service_s=st.floats(0, 100),
    urgency=st.integers(0, 4),
)


class QueueAgainstList(RuleBasedStateMachine):
    """The queue against the plainest model of it: a list of (rank, ticket), sorted when asked."""

    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(policies.named("fcfs"))
        self.gate = self.queue.policy.gate()
        self.model: dict[str, tuple[int, policies.QueuedRequest]] = {}
        self.back = self.front = 0

    def expected(self) -> policies.QueuedRequest:
        order = self.queue.policy
        lanes = {order.lane(t) for _, t in self.model.values()}
        lane = self.gate.next_lane(lanes)
        return min(
            ((order.key(t), rank, t) for rank, t in self.model.values() if order.lane(t) == lane),
            key=lambda row: row[:2],
        )[2]

    @rule(target=waiting, new=TICKETS)
    def push(self, new: policies.QueuedRequest) -> str:
        self.queue.push(new)
        self.back += 1
        self.model[new.call.id] = (self.back, new)
        return new.call.id

    @rule(target=waiting, new=TICKETS)
    def push_front(self, new: policies.QueuedRequest) -> str:
        self.queue.push_front(new)
        self.front -= 1
        self.model[new.call.id] = (self.front, new)
        return new.call.id

    @rule()
    def pop(self) -> None:
        if not self.model:
            with pytest.raises(NobodyWaits):
                self.queue.pop()
            return
        expected = self.expected()
        assert self.queue.peek() == expected
        lanes = {self.queue.policy.lane(t) for _, t in self.model.values()}
        assert self.queue.pop() == expected
        self.gate.on_pop(self.queue.policy.lane(expected), lanes)
        del self.model[expected.call.id]

    @rule(name=consumes(waiting))
    def remove(self, name: str) -> None:
        removed = self.queue.remove(CallId(name))
        known = self.model.pop(name, None)
        assert removed == (None if known is None else known[1])

    @rule(target=waiting, name=waiting, service_s=st.floats(0, 100))
    def rekey(self, name: str, service_s: float) -> object:
        if name not in self.model:
            with pytest.raises(KeyError):
                self.queue.rekey(ticket(name))
            return multiple()
        rank, old = self.model[name]
        new = policies.QueuedRequest(call=old.call, service_s=service_s)
        self.queue.rekey(new)
        self.model[name] = (rank, new)
        return multiple()

    @rule(policy=POLICIES)
    def switch(self, policy: str) -> None:
        order = policies.named(policy)
        self.queue.switch(order)
        self.gate = order.gate()

    @invariant()
    def nobody_is_lost_or_doubled(self) -> None:
        listed = [t.call.id for t in self.queue]
        assert sorted(listed) == sorted(self.model)
        assert len(self.queue) == len(self.model)

    @invariant()
    def iteration_is_the_order_of_pops(self) -> None:
        if self.model:
            assert next(iter(self.queue)) == self.queue.peek()


QueueAgainstList.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueAgainstList = QueueAgainstList.TestCase


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_iteration_gives_exactly_what_pops_give(policy: str) -> None:
    queue = WaitingQueue(policies.named(policy))
    for index in range(50):
        queue.push(ticket(str(index), due_s=(index * 37) % 50, service_s=(index * 13) % 11, urgency=index % 5))
    listed = list(queue)
    assert [queue.pop() for _ in range(50)] == listed


def test_a_call_that_came_back_goes_before_its_equals() -> None:
    queue = WaitingQueue(policies.named("fcfs"))
    queue.push(ticket("a"))
    queue.push(ticket("b"))
    first = queue.pop()
    queue.push_front(first)
    assert [t.call.id for t in queue] == ["a", "b"]


def test_the_same_call_cannot_wait_twice() -> None:
    queue = WaitingQueue(policies.named("edf"))
    queue.push(ticket("a"))
    with pytest.raises(DuplicateCall, match="'a' already waits"):
        queue.push(ticket("a"))


def test_cancelled_calls_leave_no_garbage_behind() -> None:
    queue = WaitingQueue(policies.named("edf"))
    queue.push(ticket("last", due_s=1.0))
    for index in range(10_000):
        queue.push(ticket(str(index), due_s=5.0))
        queue.remove(CallId(str(index)))
    assert sum(len(slots) for slots in queue._lanes.values()) < 200
    assert queue.pop().call.id == "last"
