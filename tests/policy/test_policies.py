"""Each policy puts calls into the order that its page in docs/policies promises.

The expectations are written down independently of the policies: as numbers worked out by hand from the definitions in the
papers, never by calling the method under test.
"""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.engine import guarded_policy
from tidegate_policy.model import PATIENCE_S, Call, CallId
from tidegate_policy.policies import two_lane
from tidegate_policy.waiting_queue import WaitingQueue


def item(
    name: str, *, arrived_at_s: float = 0.0, due_at_s: float | None = None, service_s: float = 1.0, urgency: int = 2
) -> policies.QueuedRequest:
    call = Call(
        id=CallId(name),
        arrived_at_s=arrived_at_s,
        prompt_tokens=1,
        output_predicted=1,
        due_at_s=due_at_s,
        urgency=urgency,
    )
    return policies.QueuedRequest(call=call, service_s=service_s)


def served(policy: str, *items: policies.QueuedRequest, **parameters: float) -> list[str]:
    queue = WaitingQueue(policies.create(policy, parameters))
    for each in items:
        queue.push(each)
    return [queue.pop(0.0).call.id for _ in items]


def test_fcfs_serves_in_the_order_of_arrival() -> None:
    assert served("fcfs", item("a", due_at_s=9.0), item("b", due_at_s=1.0)) == ["a", "b"]


def test_edf_serves_the_earliest_deadline() -> None:
    assert served("edf", item("late", due_at_s=9.0), item("soon", due_at_s=1.0)) == ["soon", "late"]


def test_sjf_serves_the_shortest() -> None:
    assert served("sjf", item("long", service_s=9.0), item("short", service_s=1.0)) == ["short", "long"]


def test_priority_serves_urgency_zero_first() -> None:
    assert served("priority", item("calm", urgency=4), item("urgent", urgency=0)) == ["urgent", "calm"]


def test_urgency_serves_the_call_that_must_start_first() -> None:
    soon_but_short = item("short", due_at_s=10.0, service_s=1.0)
    later_but_long = item("long", due_at_s=12.0, service_s=8.0)
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

    items = {
        str(index): item(str(index), arrived_at_s=row[0], due_at_s=row[0] + row[1], service_s=row[2])
        for index, row in enumerate(rows)
    }
    in_order = [urgency(rows[int(name)]) for name in served("urgency", *items.values())]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(in_order))


def test_calls_without_a_deadline_go_last_but_age() -> None:
    old = item("old", arrived_at_s=-PATIENCE_S, service_s=0.0)
    fresh = item("fresh", arrived_at_s=0.0, service_s=0.0)
    due = item("due", due_at_s=30.0, service_s=0.0)
    assert served("edf", fresh, due, old) == ["old", "due", "fresh"]


def pair_of_lanes(count: int, **parameters: float) -> WaitingQueue:
    queue = WaitingQueue(policies.create("two-lane", parameters))
    for index in range(count):
        queue.push(item(f"fast{index}", service_s=0.5))
        queue.push(item(f"slow{index}", service_s=60.0))
    return queue


@pytest.mark.parametrize(("parameters", "fast"), [({}, 300), ({"fast_share": 0.5}, 200), ({"fast_share": 0.25}, 100)])
def test_the_fast_lane_gets_its_share_and_the_slow_lane_the_rest(parameters: dict[str, float], fast: int) -> None:
    queue = pair_of_lanes(400, **parameters)
    first = [queue.pop(0.0).call.id for _ in range(400)]
    assert sum(name.startswith("fast") for name in first) == fast


def test_the_threshold_of_two_lane_decides_which_calls_are_fast() -> None:
    mixed = [item("slow", service_s=3.0, due_at_s=1.0), item("fast", service_s=0.5, due_at_s=900.0)]
    assert served("two-lane", *mixed) == ["slow", "fast"], "both are fast, so the smaller slack goes first"
    assert served("two-lane", *mixed, threshold_s=1.0) == ["fast", "slow"]


def test_a_lane_that_is_alone_is_served_without_building_up_credit() -> None:
    queue = WaitingQueue(two_lane.TwoLane())
    for index in range(50):
        queue.push(item(f"slow{index}", service_s=60.0))
    for _ in range(40):
        queue.pop(0.0)
    for index in range(4):
        queue.push(item(f"fast{index}", service_s=0.5))
    assert [queue.pop(0.0).call.id[:4] for _ in range(5)].count("fast") >= 3


def test_a_blocked_head_of_the_slow_lane_does_not_use_up_the_share_of_its_lane() -> None:
    queue = pair_of_lanes(200)
    served_from: list[str] = []
    for _ in range(100):  # in each step the first slow call cannot start, and one other call starts
        while queue.peek().call.id == "slow0":
            queue.pass_over()
        served_from.append(queue.pop(0.0).call.id[:4])
        queue.end_scan()
    assert served_from.count("slow") == pytest.approx(25, abs=3)


def test_an_unknown_policy_is_rejected_with_the_list_of_known_policies() -> None:
    with pytest.raises(policies.UnknownPolicy, match=r"unknown policy 'lifo'; known are augmented, cfs, edf, fcfs"):
        policies.create("lifo")


@pytest.mark.parametrize(
    ("policy", "parameters", "sentence"),
    [
        ("fcfs", {"speed": 1.0}, "policy 'fcfs' has no parameter 'speed'; it has none"),
        ("two-lane", {"speed": 1.0}, "policy 'two-lane' has no parameter 'speed'; known are fast_share, threshold_s"),
        (
            "two-lane",
            {"fast_share": 1.0},
            "parameter 'fast_share' of policy 'two-lane' must be between 0.01 and 0.99 (share of the starts), not 1",
        ),
        (
            "two-lane",
            {"threshold_s": float("nan")},
            "parameter 'threshold_s' of policy 'two-lane' must be between 0.01 and 3600 (seconds), not nan",
        ),
    ],
)
def test_a_bad_parameter_is_named_with_its_range(policy: str, parameters: dict[str, float], sentence: str) -> None:
    with pytest.raises(policies.BadParameter, match=re.escape(sentence)):
        policies.create(policy, parameters)


def test_parameters_that_are_not_given_take_their_default() -> None:
    assert policies.create("two-lane", {"fast_share": 0.5}).parameters == {"threshold_s": 4.0, "fast_share": 0.5}


EXPECTED = {
    #          fast and due late, slow and due soon, fast without deadline, slow and due last, fast and due first
    "fcfs": ["a", "b", "c", "d", "e"],
    "edf": ["e", "b", "a", "d", "c"],  # due at 50, 80, 200, 300, 600
    "sjf": ["e", "c", "a", "d", "b"],  # 0.5, 1, 2, 40, 60 seconds of work
    "two-lane": ["e", "a", "c", "b", "d"],  # the fast lane has the first three turns; slack 49.5, 198, 599 and 20, 260
    "urgency": ["b", "e", "a", "d", "c"],  # latest start at 20, 49.5, 198, 260, 599
    "priority": ["d", "b", "a", "c", "e"],  # levels 0, 1, 2, 2, 4
    "llf": ["b", "e", "a", "d", "c"],  # no workflow, so as urgency
    "srtf": ["e", "c", "a", "d", "b"],  # nothing was served, so as sjf
    "wfq": ["a", "b", "c", "d", "e"],  # one tenant, so the order of arrival, here and in the next four
    "stride": ["a", "b", "c", "d", "e"],
    "lottery": ["a", "b", "c", "d", "e"],
    "cfs": ["a", "b", "c", "d", "e"],
    "rr": ["a", "b", "c", "d", "e"],
    "mlfq": ["a", "b", "c", "d", "e"],  # all prompts fit into the first quantum
    "semantic": ["d", "b", "c", "a", "e"],  # levels 0, 1, 2, 2, 4; 1 and 2 seconds within level 2
    "relquery": ["d", "e", "c", "a", "b"],  # urgency 0, then 0.5, 1, 2, 60 seconds of work
    "augmented": ["a", "b", "c", "d", "e"],  # equal sizes, so equal values
}
"""Worked out by hand for the five calls below. `tests/contracts` asks for a page of docs for each policy."""


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_policy_serves_five_calls_in_the_order_worked_out_by_hand(policy: str) -> None:
    calls = [
        item("a", due_at_s=200.0, service_s=2.0, urgency=2),
        item("b", due_at_s=80.0, service_s=60.0, urgency=1),
        item("c", service_s=1.0, urgency=2),
        item("d", due_at_s=300.0, service_s=40.0, urgency=0),
        item("e", due_at_s=50.0, service_s=0.5, urgency=4),
    ]
    assert served(policy, *calls) == EXPECTED.get(policy), "a new policy adds a row to EXPECTED"


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_policy_serves_equal_calls_in_the_order_of_arrival(policy: str) -> None:
    assert served(policy, *(item(name) for name in "zyxab")) == list("zyxab")


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_policy_has_its_registered_name_and_declares_defaults_within_their_range(policy: str) -> None:
    made = policies.create(policy)
    assert made.name == policy
    for parameter in policies.POLICIES[policy].PARAMETERS:
        assert parameter.low <= parameter.default <= parameter.high
        assert made.parameters[parameter.name] == parameter.default


def test_a_call_that_starts_while_semantic_fails_takes_no_share_that_another_one_earned() -> None:
    guarded = guarded_policy.GuardedPolicy(policies.create("semantic", {"level_share": 0.1}), guarded_policy.Failures())
    queue = WaitingQueue(guarded)
    names = ["calm0", "calm1", *(f"urgent{number}" for number in range(40))]
    for name in names:
        waiting = item(name, urgency=4 if name.startswith("calm") else 0)
        guarded.on_arrival(0.0, waiting)
        queue.push(waiting)
    earned = next(each for each in iter(lambda: queue.pop(0.0), None) if each.call.urgency == 4)
    guarded.failed("key", ValueError("broken"))
    in_order_of_arrival = queue.pop(0.0)
    assert [earned.call.id, in_order_of_arrival.call.id] == names[:2]
    assert guarded.rank(earned) < guarded.rank(in_order_of_arrival)
