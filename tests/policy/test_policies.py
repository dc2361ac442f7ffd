"""Each order answers its one question."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.model import PATIENCE_S, Call, CallId
from tidegate_policy.policies import two_lane
from tidegate_policy.waiting_queue import WaitingQueue


def ticket(name: str, *, arrival_s: float = 0.0, due_s: float | None = None, service_s: float = 1.0, urgency: int = 2):
    call = Call(id=CallId(name), arrival_s=arrival_s, prompt_tokens=1, output_predicted=1, due_s=due_s, urgency=urgency)
    return policies.QueuedRequest(call=call, service_s=service_s)


def served(policy: str, *tickets: policies.QueuedRequest) -> list[str]:
    queue = WaitingQueue(policies.named(policy))
    for each in tickets:
        queue.push(each)
    return [queue.pop().call.id for _ in tickets]


def test_fcfs_serves_in_the_order_of_arrival() -> None:
    assert served("fcfs", ticket("a", due_s=9.0), ticket("b", due_s=1.0)) == ["a", "b"]


def test_edf_serves_the_earliest_deadline() -> None:
    assert served("edf", ticket("late", due_s=9.0), ticket("soon", due_s=1.0)) == ["soon", "late"]


def test_sjf_serves_the_shortest() -> None:
    assert served("sjf", ticket("long", service_s=9.0), ticket("short", service_s=1.0)) == ["short", "long"]


def test_priority_serves_urgency_zero_first() -> None:
    assert served("priority", ticket("calm", urgency=4), ticket("urgent", urgency=0)) == ["urgent", "calm"]


def test_urgency_serves_the_call_that_must_start_first() -> None:
    soon_but_short = ticket("short", due_s=10.0, service_s=1.0)
    later_but_long = ticket("long", due_s=12.0, service_s=8.0)
    assert served("urgency", soon_but_short, later_but_long) == ["long", "short"]


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.1, 500), st.floats(0.01, 50)), min_size=2, max_size=20, unique=True
    ),
    st.floats(100, 1000),
)
def test_the_constant_key_orders_as_equation_6_does_at_any_instant(
    rows: list[tuple[float, float, float]], now: float
) -> None:
    def urgency(row: tuple[float, float, float]) -> float:
        enqueued_s, budget_s, service_s = row
        return service_s - (budget_s - (now - enqueued_s))

    tickets = {
        str(index): ticket(str(index), arrival_s=row[0], due_s=row[0] + row[1], service_s=row[2])
        for index, row in enumerate(rows)
    }
    in_order = [urgency(rows[int(name)]) for name in served("urgency", *tickets.values())]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(in_order))


def test_calls_without_a_deadline_go_last_but_age() -> None:
    old = ticket("old", arrival_s=-PATIENCE_S, service_s=0.0)
    fresh = ticket("fresh", arrival_s=0.0, service_s=0.0)
    due = ticket("due", due_s=30.0, service_s=0.0)
    assert served("edf", fresh, due, old) == ["old", "due", "fresh"]


def test_the_fast_lane_gets_its_share_and_the_slow_lane_the_rest() -> None:
    queue = WaitingQueue(policies.named("two-lane"))
    for index in range(400):
        queue.push(ticket(f"fast{index}", service_s=0.5))
        queue.push(ticket(f"slow{index}", service_s=60.0))
    first = [queue.pop().call.id for _ in range(400)]
    assert sum(name.startswith("fast") for name in first) == 300


def test_a_lane_that_is_alone_is_served_without_building_up_credit() -> None:
    queue = WaitingQueue(two_lane.TwoLane())
    for index in range(50):
        queue.push(ticket(f"slow{index}", service_s=60.0))
    for _ in range(40):
        queue.pop()
    for index in range(4):
        queue.push(ticket(f"fast{index}", service_s=0.5))
    assert [queue.pop().call.id[:4] for _ in range(5)].count("fast") >= 3


def test_an_unknown_policy_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(policies.UnknownPolicy, match=r"unknown policy 'lifo'; known are edf, fcfs"):
        policies.named("lifo")


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_order_is_total_and_free_of_time(policy: str) -> None:
    rng = random.Random(7)
    order = policies.named(policy)
    assert order.name == policy
    tickets = [
        ticket(str(i), due_s=rng.choice([None, rng.random() * 9]), service_s=rng.random(), urgency=rng.randrange(5))
        for i in range(50)
    ]
    assert [order.key(t) for t in tickets] == [order.key(t) for t in tickets]
    assert sorted(order.key(t) for t in tickets)
