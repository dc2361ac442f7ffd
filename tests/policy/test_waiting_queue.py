"""The queue keeps each call, once, in the order of the active policy."""

import itertools
from collections.abc import Collection, Mapping, Set

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tidegate_policy import policies, waiting_queue
from tidegate_policy.engine import guarded_policy
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import policy_contract
from tidegate_policy.waiting_queue import DuplicateCall, EmptyQueue, WaitingQueue


class Attained(policies.StaticPolicy):
    """A policy of this test whose keys change with service: the call with the least output goes first."""

    name = "attained"
    keys_change = True

    def __init__(self, **parameters: float) -> None:
        super().__init__(**parameters)
        self.output: dict[CallId, int] = {}

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float(self.output.get(item.call.id, 0)),)

    def on_tokens(self, now: float, computed: Mapping[CallId, policies.Computed]) -> policies.Changed:
        for call_id, tokens in computed.items():
            self.output[call_id] = self.output.get(call_id, 0) + tokens.output_tokens
        return list(computed)


class Broken(policies.StaticPolicy):
    """A policy that cannot give a key to one call."""

    name = "broken"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        if item.call.id == "cursed":
            raise RuntimeError("no key")
        return (item.service_s,)


def made(name: str) -> policies.Policy:
    return Attained() if name == "attained" else policies.create(name)


NAMES = [*sorted(policies.POLICIES), "attained"]


def item(
    name: str,
    *,
    due_at_s: float | None = None,
    service_s: float = 1.0,
    urgency: int = 2,
    tenant: str = "",
    marks: Set[str] = frozenset(),
) -> policies.QueuedRequest:
    call = Call(
        id=CallId(name),
        arrived_at_s=0.0,
        prompt_tokens=10,
        output_predicted=10,
        due_at_s=due_at_s,
        urgency=urgency,
        tenant=tenant,
        yields="yields" in marks,
        owed="owed" in marks,
        ahead="ahead" in marks,
    )
    return policies.QueuedRequest(call=call, service_s=service_s)


ITEMS = st.builds(
    item,
    st.uuids().map(str),
    due_at_s=st.none() | st.floats(-10, 1000),
    service_s=st.floats(0, 100),
    urgency=st.integers(0, 4),
    tenant=st.sampled_from("ab"),
    marks=st.sampled_from((frozenset(), frozenset({"yields"}), frozenset({"owed"}), frozenset({"ahead"}))),
)


Row = tuple[int, policies.QueuedRequest]
"""Rank of arrival, and the call."""


def of_least_turn(rows: Collection[Row]) -> list[Row]:
    least = min((each.call.turn for _, each in rows), default=0)
    return [(rank, each) for rank, each in rows if each.call.turn == least]


class QueueAgainstList(RuleBasedStateMachine):
    """The queue against the plainest model of it: a list of (rank, item) that is sorted whenever it is read.

    The model owns a second policy object, so that shared state cannot hide a missing call of the queue."""

    waiting = Bundle("waiting")
    started = Bundle("started")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(self.ordering("fcfs"))
        self.twin = policies.create("fcfs")
        self.model: dict[str, tuple[int, policies.QueuedRequest]] = {}
        self.passed: set[str] = set()
        self.back = self.front = 0

    def ordering(self, name: str) -> policies.Policy:
        """The policy of the queue."""
        return made(name)

    def coming_lanes(self, lanes: set[int]) -> list[int]:
        """The lanes of the next starts while calls wait in `lanes`."""
        turns, coming = self.queue.policy.turns.copy(), []
        for _ in range(8):
            coming.append(turns.next_lane(lanes))
            turns.take(coming[-1], lanes)
        return coming

    def candidates(self) -> list[Row]:
        return [row for name, row in self.model.items() if name not in self.passed]

    def lanes(self) -> set[int]:
        return {self.twin.lane(each) for _, each in of_least_turn(self.candidates())}

    def expected(self) -> policies.QueuedRequest:
        lane, rows = self.twin.turns.next_lane(self.lanes()), of_least_turn(self.candidates())
        return min(
            ((self.twin.key(each), rank, each) for rank, each in rows if self.twin.lane(each) == lane),
            key=lambda row: row[:2],
        )[2]

    @rule(target=waiting, new=ITEMS)
    def push(self, new: policies.QueuedRequest) -> str:
        self.queue.push(new)
        self.back += 1
        self.model[new.call.id] = (self.back, new)
        return new.call.id

    @rule(target=started)
    def pop(self) -> object:
        if not self.candidates():
            with pytest.raises(EmptyQueue):
                self.queue.pop(0.0)
            return multiple()
        expected, lanes = self.expected(), self.lanes()
        assert self.queue.peek() == expected
        assert self.queue.pop(0.0) == expected
        self.twin.turns.take(self.twin.lane(expected), lanes)
        del self.model[expected.call.id]
        return expected

    @rule()
    def pass_over(self) -> None:
        if self.candidates():
            lanes = self.lanes()
            expected, coming = self.expected(), self.coming_lanes(lanes)
            assert self.queue.pass_over() == expected
            self.passed.add(expected.call.id)
            assert self.coming_lanes(lanes) == coming

    @rule()
    def end_scan(self) -> None:
        self.queue.end_scan()
        self.passed.clear()

    @rule(target=started, name=consumes(waiting))
    def start(self, name: str) -> object:
        if name not in self.model:
            with pytest.raises(KeyError):
                self.queue.start(0.0, CallId(name))
            return multiple()
        _, known = self.model[name]
        beside = [each for _, each in self.candidates() if each.call.turn == known.call.turn]
        lanes = {self.twin.lane(each) for each in (known, *beside)}
        assert self.queue.start(0.0, CallId(name)) == known
        self.twin.turns.take(self.twin.lane(known), lanes)
        del self.model[name]
        self.passed.discard(name)
        return known

    @rule(target=waiting, taken=consumes(started), service_s=st.floats(0, 100))
    def preempt(self, taken: policies.QueuedRequest, service_s: float) -> str:
        again = policies.QueuedRequest(call=taken.call, service_s=service_s)
        self.queue.push_preempted(again)
        self.front -= 1
        self.model[again.call.id] = (self.front, again)
        return again.call.id

    @rule(name=consumes(waiting))
    def remove(self, name: str) -> None:
        removed = self.queue.remove(CallId(name))
        known = self.model.pop(name, None)
        self.passed.discard(name)
        assert removed == (None if known is None else known[1])

    @rule(name=waiting, service_s=st.floats(0, 100))
    def update(self, name: str, service_s: float) -> None:
        if name not in self.model:
            with pytest.raises(KeyError):
                self.queue.update(item(name))
            return
        rank, old = self.model[name]
        new = policies.QueuedRequest(call=old.call, service_s=service_s)
        self.queue.update(new)
        self.model[name] = (rank, new)

    @rule(name=waiting, tokens=st.integers(1, 9))
    def serve_tokens(self, name: str, tokens: int) -> None:
        computed = {CallId(name): policies.Computed(output_tokens=tokens)}
        self.queue.rekey(self.queue.policy.on_tokens(0.0, computed))
        self.twin.on_tokens(0.0, computed)

    @rule(policy=st.sampled_from(NAMES))
    def switch(self, policy: str) -> None:
        self.queue.switch(self.ordering(policy))
        self.twin = made(policy)

    @invariant()
    def no_call_is_lost_or_doubled(self) -> None:
        listed = [each.call.id for each in self.queue]
        assert sorted(listed) == sorted(self.model)
        assert len(self.queue) == len(self.model)
        assert self.queue.candidates == len(self.candidates())

    @invariant()
    def the_first_k_calls_are_the_next_k_pops(self) -> None:
        turns, left = self.twin.turns.copy(), dict(self.model)
        later = self.queue.later()
        assert later(3) == self.queue.first(3)
        for seen in self.queue.first(3):
            first = of_least_turn(left.values())
            lanes = {self.twin.lane(each) for _, each in first}
            lane = turns.next_lane(lanes)
            rows = [(self.twin.key(e), r, e.call.id) for r, e in first if self.twin.lane(e) == lane]
            assert seen.call.id == min(rows)[2]
            turns.take(lane, lanes)
            del left[seen.call.id]


QueueAgainstList.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestQueueAgainstList = QueueAgainstList.TestCase


class GuardedQueueAgainstList(QueueAgainstList):
    """The queue of an engine, which keeps the choice of a lane until an event comes."""

    def ordering(self, name: str) -> policies.Policy:
        return guarded_policy.GuardedPolicy(made(name), guarded_policy.Failures())


GuardedQueueAgainstList.TestCase.settings = QueueAgainstList.TestCase.settings
TestGuardedQueueAgainstList = GuardedQueueAgainstList.TestCase


@pytest.mark.parametrize(
    ("policy", "lanes"),
    [
        ("two-lane", {"fast": 2, "slow": 1}),
        ("semantic", {"urgency 0": 1, "urgency 2": 2}),
        ("urgency", {"one lane": 3}),
        ("wfq", {"one lane": 3}),
    ],
)
def test_waiting_calls_are_counted_by_the_name_of_their_lane(policy: str, lanes: dict[str, int]) -> None:
    queue = WaitingQueue(policies.create(policy))
    assert queue.by_lane() == {}
    for each in (item("a"), item("b", service_s=900.0), item("c", urgency=0)):
        queue.policy.on_arrival(0.0, each)
        queue.push(each)
    assert queue.by_lane() == lanes


def test_many_lanes_without_fixed_names_are_counted_together() -> None:
    queue = WaitingQueue(policies.create("wfq"))
    for tenant in ("acme", "other"):
        call = Call(id=CallId(tenant), arrived_at_s=0.0, prompt_tokens=1, output_predicted=1, tenant=tenant)
        each = policies.QueuedRequest(call=call, service_s=1.0)
        queue.policy.on_arrival(0.0, each)
        queue.push(each)
    assert queue.by_lane() == {"several lanes": 2}


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_iteration_gives_exactly_the_calls_that_pops_give(policy: str) -> None:
    queue = WaitingQueue(policies.create(policy))
    for index in range(50):
        queue.push(item(str(index), due_at_s=(index * 37) % 50, service_s=(index * 13) % 11, urgency=index % 5))
    listed = list(queue)
    assert queue.first(7) == listed[:7]
    assert [queue.pop(0.0) for _ in range(50)] == listed


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_calls_that_are_owed_a_place_go_first_and_calls_that_yield_go_last_in_all_lanes_together(policy: str) -> None:
    """Each tenant may have a lane of its own, and the turns may prefer the one whose calls yield."""
    marks = {"yields": frozenset({"yields"}), "owed": frozenset({"owed"}), "plain": frozenset[str]()}
    for order in itertools.permutations(marks):
        for late in order:
            queue = WaitingQueue(policies.create(policy))
            for name in order:
                service_s = 900.0 if name == late else 1.0
                each = item(name, tenant=name, urgency=0 if name == late else 2, service_s=service_s, marks=marks[name])
                queue.policy.on_arrival(0.0, each)
                queue.push(each)
            assert [each.call.id for each in queue] == ["owed", "plain", "yields"]
            assert [queue.pop(0.0).call.id for _ in order] == ["owed", "plain", "yields"]


def test_a_preempted_call_goes_before_its_equals() -> None:
    queue = WaitingQueue(policies.create("fcfs"))
    for name in "abc":
        queue.push(item(name))
    queue.pop(0.0)
    second = queue.pop(0.0)
    queue.push_preempted(second)
    assert [each.call.id for each in queue] == ["b", "c"]


def test_a_switch_to_a_policy_that_raises_changes_nothing() -> None:
    queue = WaitingQueue(policies.create("fcfs"))
    for name in ("b", "cursed", "a"):
        queue.push(item(name))
    before = queue.policy
    with pytest.raises(RuntimeError, match="no key"):
        queue.switch(Broken())
    assert queue.policy is before
    assert [each.call.id for each in queue] == ["b", "cursed", "a"]


def test_two_queues_switch_together_or_not_at_all() -> None:
    shared = policies.create("fcfs")
    first, second = WaitingQueue(shared), WaitingQueue(shared)
    first.push(item("a"))
    second.push(item("cursed"))
    with pytest.raises(RuntimeError, match="no key"):
        waiting_queue.switch([first, second], Broken())
    assert first.policy is second.policy is shared


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_a_list_that_is_read_later_shows_the_order_of_its_request(policy: str) -> None:
    queue = WaitingQueue(policies.create(policy))
    for index in range(40):
        known = item(str(index), due_at_s=(index * 37) % 50, service_s=(index * 13) % 11, urgency=index % 5)
        queue.rekey(queue.policy.on_arrival(0.0, known))
        queue.push(known)
    listed, later = list(queue), queue.later()
    for index in range(40, 50):
        queue.push(item(str(index)))
    assert later(40) == listed


def test_two_queues_of_one_scheduler_share_the_turns_of_the_lanes() -> None:
    shared = policies.create("two-lane", {"fast_share": 0.5})
    queues = [WaitingQueue(shared), WaitingQueue(shared)]
    for index, queue in enumerate(queues):
        for count in range(4):
            queue.push(item(f"fast{index}{count}", service_s=1.0))
            queue.push(item(f"slow{index}{count}", service_s=60.0))
    lanes = [queues[turn % 2].pop(0.0).call.id[:4] for turn in range(4)]
    assert lanes == ["fast", "slow", "fast", "slow"], "with turns of its own, each queue would start with its fast lane"


def test_a_blocked_head_of_the_slow_lane_does_not_block_the_slow_calls_behind_it() -> None:
    queue = WaitingQueue(policies.create("two-lane"))
    for index in range(200):
        queue.push(item(f"fast{index}", service_s=0.5))
        queue.push(item(f"slow{index}", service_s=60.0))
    started = []
    for _ in range(100):  # in each scan the first ten slow calls cannot start, and one other call starts
        while (head := queue.peek().call.id).startswith("slow") and int(head[4:]) < 10:
            queue.pass_over()
        started.append(queue.pop(0.0).call.id)
        queue.end_scan()
    assert sum(name.startswith("slow") for name in started) == 25
    assert "slow10" in started


def test_calls_that_were_passed_over_are_not_sorted_again() -> None:
    queue = WaitingQueue(policies.create("edf"))
    for index in range(1000):
        queue.push(item(str(index), due_at_s=float(index * 7 % 1000)))
    for _ in range(3):
        seen = [queue.pass_over().call.due_at_s for _ in range(500)]
        assert seen == list(range(500))
        queue.end_scan()
        (lane,) = queue._heaps.lanes.values()
        assert (len(lane.front), len(lane.heap)) == (499, 501), "the last one moves when the next is looked at"
    assert [each.call.due_at_s for each in queue] == list(range(1000))


def test_a_passed_call_that_moves_back_in_the_same_scan_stands_behind_the_calls_before_its_new_place() -> None:
    queue = WaitingQueue(policies.create("edf"))
    for name, due_at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        queue.push(item(name, due_at_s=due_at_s))
    for _ in range(2):
        queue.pass_over()
    queue.peek()  # a and b stand before the heap now
    queue.end_scan()
    assert queue.pass_over().call.id == "a"
    queue.update(item("a", due_at_s=2.5))
    assert queue.peek().call.id == "b"
    queue.end_scan()
    assert [queue.pop(0.0).call.id for _ in range(3)] == ["b", "a", "c"]


def test_a_list_that_is_read_later_holds_the_calls_that_left_or_moved_since_its_request() -> None:
    queue = WaitingQueue(policies.create("edf"))
    for index in range(40):
        queue.push(item(str(index), due_at_s=(index * 37) % 50))
    queue.remove(CallId("7"))
    listed, later = list(queue), queue.later()
    queue.pop(0.0)
    queue.remove(CallId("9"))
    queue.update(item("3", due_at_s=1000.0))
    assert later(40) == listed


class BrokenTurns(policy_contract.SingleLane):
    """Turns whose copies cannot be used."""

    def copy(self) -> "BrokenTurns":
        return BrokenCopy()


class BrokenCopy(BrokenTurns):
    def next_lane(self, lanes: Set[int]) -> int:
        raise RuntimeError("no lane")

    def take(self, lane: int, lanes: Set[int]) -> None:
        raise RuntimeError("no turn")


def test_a_reader_of_the_order_changes_nothing_in_the_guard_of_the_policy() -> None:
    unguarded = policies.create("two-lane")
    unguarded.turns = BrokenTurns()  # type: ignore[misc]
    guarded = guarded_policy.GuardedPolicy(unguarded, guarded_policy.Failures())
    queue = WaitingQueue(guarded)
    for name, service_s in (("fast", 1.0), ("slow", 60.0), ("slower", 70.0)):
        queue.push(item(name, service_s=service_s))
    later, events = queue.later(), guarded.events
    assert len(later(3)) == len(queue.first(3)) == 3
    assert (guarded.events, guarded.failing) == (events, False)


def test_a_reader_of_the_order_gives_no_lane_of_the_lottery_tickets() -> None:
    queue = WaitingQueue(policies.create("lottery"))
    for tenant in "abc":
        call = Call(id=CallId(tenant), arrived_at_s=0.0, prompt_tokens=10, output_predicted=10, tenant=tenant)
        queue.push(policies.QueuedRequest(call=call, service_s=1.0))
    tickets = dict(queue.policy.tickets)  # type: ignore[attr-defined]
    assert len(list(queue)) == 3
    assert queue.policy.tickets == tickets  # type: ignore[attr-defined]


def test_only_the_calls_that_the_policy_names_are_sorted_again() -> None:
    policy = Attained()
    queue = WaitingQueue(policy)
    for name in "abcd":
        queue.push(item(name))
    queue.rekey(policy.on_tokens(0.0, {CallId("b"): policies.Computed(output_tokens=3)}))
    policy.on_tokens(0.0, {CallId("a"): policies.Computed(output_tokens=9)})  # the queue is not told
    assert [each.call.id for each in queue] == ["a", "c", "d", "b"]
    queue.rekey([CallId("a"), CallId("not here")])
    assert [each.call.id for each in queue] == ["c", "d", "b", "a"]


def test_the_same_call_cannot_wait_twice() -> None:
    queue = WaitingQueue(policies.create("edf"))
    queue.push(item("a"))
    with pytest.raises(DuplicateCall, match="'a' already waits"):
        queue.push(item("a"))


def test_cancelled_calls_leave_no_garbage_behind() -> None:
    queue = WaitingQueue(policies.create("edf"))
    queue.push(item("last", due_at_s=1.0))
    for index in range(10_000):
        queue.push(item(str(index), due_at_s=5.0))
        queue.remove(CallId(str(index)))
    assert sum(len(lane.heap) + len(lane.front) for lane in queue._heaps.lanes.values()) < 200
    assert queue.pop(0.0).call.id == "last"
