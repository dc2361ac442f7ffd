"""Each policy starves exactly the calls that its page names, in one file so that no statement goes without a test.

The statements and bounds are those of the pages in docs/policies.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import small_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.model import PATIENCE_S, Call, CallId
from tidegate_policy.policies import two_lane

COVERED: set[str] = set()


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Notes that a test holds the starvation statement of these policies."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        COVERED.update(names)
        return test

    return note


def engine_of(name: str, *, places: int = 1, seed: int = 5, **parameters: float) -> small_engine.SmallEngine:
    context = small_engine.context(random=random.Random(seed))
    return small_engine.SmallEngine(policies.create(name, parameters, context), places=places)


def flood(engine: small_engine.SmallEngine, seconds: float, **fields) -> None:
    """Calls with these fields keep coming, so that some of them always wait."""
    end_s = engine.now + seconds
    count = len(engine.started)
    while engine.now < end_s:
        while sum(item.call.id.startswith("flood") for item in engine.queue) < 6:
            count += 1
            engine.arrive(small_engine.call(f"flood{engine.now:.2f}-{count}", **fields))
        engine.step()


# No call passes a call that came long before it.


def no_pass_after(name: str) -> Callable[[Call, float, Call, float], float] | None:
    """The instant after which an arriving call may not start before a waiting call: (waiting, work, arriving, work)."""

    def latest_start(waiting: Call, waiting_s: float, arriving: Call, arriving_s: float) -> float:
        return waiting.due_or_patience_at_s - waiting_s + PATIENCE_S + arriving_s

    def least_laxity(waiting: Call, waiting_s: float, arriving: Call, arriving_s: float) -> float:
        deadline_at_s = waiting.due_or_patience_at_s if waiting.deadline_at_s is None else waiting.deadline_at_s
        bounded = max(deadline_at_s - waiting.left_s, waiting.arrived_at_s - PATIENCE_S)
        return bounded - waiting_s + PATIENCE_S + arriving_s

    return {
        "fcfs": lambda waiting, waiting_s, arriving, arriving_s: waiting.arrived_at_s,
        "edf": lambda waiting, waiting_s, arriving, arriving_s: waiting.due_or_patience_at_s + PATIENCE_S,
        "llf": least_laxity,
        "urgency": latest_start,
        "augmented": lambda waiting, waiting_s, arriving, arriving_s: waiting.arrived_at_s + 120.0,
    }[name]


ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "gap_s": st.sampled_from([0.0, 0.1, 30.0, 400.0]),
            "prompt_tokens": st.integers(1, 4000),
            "output_predicted": st.integers(1, 4000),
            "due_in_s": st.none() | st.floats(-1e9, 1e4),
            "deadline_in_s": st.none() | st.floats(-1e9, 1e4),
            "left_s": st.floats(0, 1e9),
            "tool_s": st.none() | st.floats(0, 1e9),
            "session": st.none() | st.sampled_from(["s", "t"]),
        }
    ),
    min_size=2,
    max_size=25,
)


def check_no_call_passes_a_call_that_came_long_before_it(engine: small_engine.SmallEngine, bound, arrivals) -> None:
    for number, fields in enumerate(arrivals):
        row = dict(fields)
        engine.now += row.pop("gap_s")
        due_s, deadline_s = row.pop("due_in_s"), row.pop("deadline_in_s")
        engine.arrive(
            small_engine.call(
                str(number),
                due_at_s=None if due_s is None else engine.now + due_s,
                deadline_at_s=None if deadline_s is None else engine.now + deadline_s,
                **row,
            )
        )
    order = list(engine.queue)
    for place, first in enumerate(order):
        for passed in order[place + 1 :]:
            after_s = bound(passed.call, passed.service_s, first.call, first.service_s)
            assert first.call.arrived_at_s <= after_s + 1e-6 * max(abs(after_s), 1.0)


@covers("fcfs", "edf", "llf", "urgency", "augmented")
@pytest.mark.parametrize("name", ["fcfs", "edf", "llf", "urgency", "augmented"])
def test_no_call_passes_a_call_that_came_long_before_it(name: str) -> None:
    bound = no_pass_after(name)

    @settings(max_examples=80)
    @given(ARRIVALS)
    def holds(arrivals) -> None:
        check_no_call_passes_a_call_that_came_long_before_it(engine_of(name), bound, arrivals)

    holds()


# Policies that starve.


@covers("sjf", "srtf")
@pytest.mark.parametrize("name", ["sjf", "srtf"])
def test_a_long_call_starves_while_shorter_calls_keep_coming(name: str) -> None:
    engine = engine_of(name)
    engine.arrive(small_engine.call("long", output_predicted=2000))
    flood(engine, 200.0, output_predicted=10)
    assert "long" not in engine.started


@covers("priority")
def test_a_lower_level_starves_while_calls_of_a_more_urgent_level_keep_coming() -> None:
    engine = engine_of("priority")
    engine.arrive(small_engine.call("low", urgency=3))
    flood(engine, 200.0, urgency=2)
    assert "low" not in engine.started


def test_within_a_level_of_priority_the_order_is_the_order_of_arrival() -> None:
    engine = engine_of("priority")
    engine.arrive(small_engine.call("first", urgency=3, output_predicted=2000))
    flood(engine, 50.0, urgency=3)
    assert engine.started[0] == "first"


# Shares.


@covers("two-lane")
@given(st.floats(0.05, 0.95), st.lists(st.booleans(), min_size=20, max_size=120))
@settings(max_examples=50)
def test_the_slow_lane_gets_its_share_of_any_consecutive_starts(share: float, longs: list[bool]) -> None:
    check_the_slow_lane_gets_its_share(engine_of("two-lane", fast_share=share), share, longs)


def check_the_slow_lane_gets_its_share(engine: small_engine.SmallEngine, share: float, longs: list[bool]) -> None:
    queue = engine.queue
    for number in range(200):
        long = longs[number % len(longs)]
        for name, output in (("slow", 400 if long else 300), ("fast", 3)):
            engine.arrive(small_engine.call(f"{name}{number}", output_predicted=output))
    starts = [queue.pop(0.0).call.id.startswith("slow") for _ in range(200)]
    for count in (1, 5, 20, 100, 200):
        for begin in range(0, 200 - count + 1, 7):
            assert sum(starts[begin : begin + count]) >= count * (1 - share) - 1 - 1e-6


@covers("wfq", "stride", "cfs", "rr")
@pytest.mark.parametrize("name", ["wfq", "stride", "cfs", "rr"])
def test_a_tenant_starts_its_call_soon_whatever_the_others_send(name: str) -> None:
    check_a_tenant_starts_its_call_soon(engine_of(name))


def check_a_tenant_starts_its_call_soon(engine: small_engine.SmallEngine) -> None:
    flood(engine, 20.0, tenant="flood", weight=1000.0)
    for number in range(400):
        engine.arrive(small_engine.call(f"backlog{number}", tenant="flood", weight=1.0))
    engine.arrive(small_engine.call("small", tenant="small", weight=1.0))
    flood(engine, 20.0, tenant="flood", weight=1.0)
    assert "small" in engine.started


@pytest.mark.parametrize("name", ["wfq", "stride", "cfs"])
@settings(max_examples=40)
@given(
    backlog=st.lists(st.integers(1, 2000), min_size=20, max_size=80),
    served=st.integers(0, 10),
    output=st.integers(1, 2000),
)
def test_a_new_tenant_is_among_the_next_whatever_the_backlog_of_another(
    name: str, backlog: list[int], served: int, output: int
) -> None:
    """Equal weights. Under `fcfs`, `edf` or `urgency` its call would be behind the whole backlog. A turn of `rr` lasts for
    a quantum, which may be many short calls."""
    engine = engine_of(name)
    for number, tokens in enumerate(backlog):
        engine.arrive(small_engine.call(f"flood{number}", tenant="flood", output_predicted=tokens))
    for _ in range(served):
        engine.queue.pop(engine.now)
    engine.now += 1.0
    engine.arrive(small_engine.call("small", tenant="small", output_predicted=output))
    next_ones = [engine.queue.pop(engine.now).call.id for _ in range(2)]
    assert "small" in next_ones


@covers("lottery")
def test_a_tenant_of_the_lottery_waits_as_its_probability_says() -> None:
    """With a quarter of the tickets, (3/4)^n of the waits are longer than n starts."""
    waits = []
    for seed in range(400):
        engine = engine_of("lottery", seed=seed)
        for number in range(60):
            engine.arrive(small_engine.call(f"many{number}", tenant="many", weight=3.0))
        engine.arrive(small_engine.call("one", tenant="one", weight=1.0))
        starts = 0
        while len(engine.queue) and engine.queue.pop(0.0).call.id != "one":
            starts += 1
        waits.append(starts)
    for count in (1, 3, 6):
        assert sum(wait >= count for wait in waits) / len(waits) == pytest.approx(0.75**count, abs=0.07)


def seconds_of_start(engine: small_engine.SmallEngine, name: str, **fields) -> float:
    """The instant at which a call starts while calls with these fields keep coming."""
    while name not in engine.started:
        flood(engine, 1.0, **fields)
        assert engine.now < 2000.0, "starved"
    return engine.now


@covers("mlfq")
def test_mlfq_boosts_a_call_after_its_waiting_time() -> None:
    check_a_call_is_boosted_after_20_s(engine_of("mlfq", boost_s=20.0))


def check_a_call_is_boosted_after_20_s(engine: small_engine.SmallEngine) -> None:
    engine.arrive(small_engine.call("big", prompt_tokens=50_000))
    flood(engine, 15.0, prompt_tokens=10)
    assert "big" not in engine.started
    flood(engine, 15.0, prompt_tokens=10)
    assert "big" in engine.started


@covers("mlfq")
@given(st.lists(st.tuples(st.integers(1, 60_000), st.floats(0, 5)), min_size=2, max_size=30))
@settings(max_examples=50)
def test_an_overdue_call_of_mlfq_starts_before_each_call_that_came_later_and_is_not_overdue(
    arrivals: list[tuple[int, float]],
) -> None:
    engine = engine_of("mlfq", boost_s=10.0)
    for number, (prompt_tokens, gap_s) in enumerate(arrivals):
        engine.now += gap_s
        engine.arrive(small_engine.call(str(number), prompt_tokens=prompt_tokens))
    engine.queue.rekey(engine.policy.on_tokens(engine.now, {}))
    order = [item.call for item in engine.queue]
    overdue = [call for call in order if engine.now - call.arrived_at_s >= 10.0]
    assert order[: len(overdue)] == sorted(overdue, key=lambda call: (call.arrived_at_s, int(call.id)))


@covers("semantic")
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_each_level_of_semantic_gets_its_share_of_the_work_that_starts(share: float) -> None:
    check_each_level_gets_its_share(engine_of("semantic", level_share=share), share)


def check_each_level_gets_its_share(engine: small_engine.SmallEngine, share: float) -> None:
    work_s = dict.fromkeys(range(5), 0.0)
    sizes = {0: 20, 1: 40, 2: 10, 3: 80, 4: 30}
    for level, size in sizes.items():
        for number in range(3000 if not level else 300):
            engine.arrive(small_engine.call(f"{level}-{number}", urgency=level, output_predicted=size))
    for _ in range(1200):
        item = engine.queue.pop(0.0)
        work_s[item.call.urgency] += item.service_s
        total_s = sum(work_s.values())
        for level in range(1, 5):
            own_s = 300 * small_engine.COST.prefill_s + sizes[level] * small_engine.STEP_S
            most_s = 100 * small_engine.COST.prefill_s + 80 * small_engine.STEP_S
            assert work_s[level] >= share * (total_s - 5 * most_s) - 4 * own_s
    assert work_s[0] / sum(work_s.values()) > 1 - 4.5 * share


@covers("semantic")
def test_a_level_without_a_share_starves() -> None:
    engine = engine_of("semantic", level_share=0.0)
    engine.arrive(small_engine.call("low", urgency=4))
    flood(engine, 200.0, urgency=0)
    assert "low" not in engine.started


@covers("semantic")
def test_patience_lifts_a_long_call_within_its_level_and_never_over_a_more_urgent_one() -> None:
    engine = engine_of("semantic", level_share=0.0, patience_s=20.0)
    engine.arrive(small_engine.call("long", urgency=2, output_predicted=500))
    flood(engine, 15.0, urgency=2, output_predicted=5)
    assert "long" not in engine.started
    flood(engine, 30.0, urgency=1, output_predicted=50)
    assert "long" not in engine.started
    assert seconds_of_start(engine, "long", urgency=2, output_predicted=5) < 60.0


@covers("semantic")
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 4), st.integers(1, 500)), min_size=2, max_size=30),
    st.integers(0, 20),
)
@settings(max_examples=50)
def test_within_a_level_of_semantic_no_call_passes_one_that_has_lost_its_patience(
    arrivals: list[tuple[float, int, int]], starts: int
) -> None:
    engine = engine_of("semantic", patience_s=10.0)
    for number, (gap_s, level, output) in enumerate(arrivals):
        engine.now += gap_s
        engine.arrive(small_engine.call(str(number), urgency=level, output_predicted=output))
    engine.step(max_starts=min(starts, len(arrivals) - 1))
    for level in range(5):
        order = [item.call for item in engine.queue if item.call.urgency == level]
        overdue = [call for call in order if engine.now - call.arrived_at_s >= 10.0]
        assert set(order[: len(overdue)]) == set(overdue)


@covers("relquery")
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.5, 2.0]),
            st.sampled_from([None, "a", "b", "c", "d"]),
            st.integers(1, 400),
            st.integers(1, 60),
        ),
        min_size=5,
        max_size=40,
    )
)
@settings(max_examples=60)
def test_no_group_waits_behind_younger_ones_for_longer_than_its_patience(
    arrivals: list[tuple[float, str | None, int, int]],
) -> None:
    patience_s = 0.2
    engine = engine_of("relquery", patience_s=patience_s)
    came_at_s: dict[str, float] = {}
    since_s: dict[str, float] = {}
    """The last start of a group, or the instant from which a call of it waits. A call without a group is a group of one."""
    group_of = {str(number): group or str(number) for number, (_, group, _, _) in enumerate(arrivals)}
    present: Counter[str] = Counter()
    next_number, due_s = 0, arrivals[0][0]
    while next_number < len(arrivals) or present.total():
        while next_number < len(arrivals) and engine.now >= due_s:
            _, group, prompt_tokens, output = arrivals[next_number]
            name = group_of[str(next_number)]
            if not present[name]:
                came_at_s[name] = engine.now
            if all(group_of[item.call.id] != name for item in engine.queue):
                since_s[name] = engine.now
            present[name] += 1
            fields = {"group": group, "prompt_tokens": prompt_tokens, "output_predicted": output}
            engine.arrive(small_engine.call(str(next_number), **fields))
            next_number += 1
            due_s += arrivals[next_number][0] if next_number < len(arrivals) else 0.0
        if len(engine.queue) and not engine.running:
            first = group_of[engine.queue.peek().call.id]
            for name in {group_of[item.call.id] for item in engine.queue} - {first}:
                if came_at_s[name] < came_at_s[first]:
                    assert engine.now - since_s[name] <= patience_s * present[name] + 1e-9
            since_s[first] = engine.now
        ended = len(engine.ended)
        engine.step()
        present.subtract(group_of[call_id] for call_id in engine.ended[ended:])


@covers("relquery")
def test_a_large_group_waits_for_small_ones_only_as_long_as_its_patience() -> None:
    check_a_large_group_waits_for_2_s_a_call(engine_of("relquery", patience_s=2.0))


def check_a_large_group_waits_for_2_s_a_call(engine: small_engine.SmallEngine) -> None:
    for number in range(10):
        engine.arrive(small_engine.call(f"large{number}", group="large", group_size=10, output_predicted=100))
    flood(engine, 18.0, output_predicted=5)
    assert not any(name.startswith("large") for name in engine.started)
    flood(engine, 4.0, output_predicted=5)
    assert "large0" in engine.started
    begin = len(engine.started)
    engine.run(20.0)
    assert all(name.startswith("large") for name in engine.started[begin : begin + 8]), "a lifted group is completed"


@covers("relquery")
def test_a_lifted_group_to_which_calls_keep_coming_delays_a_call_that_lost_its_patience_by_one_lift() -> None:
    engine = engine_of("relquery", patience_s=2.0)
    for number in range(6):
        engine.arrive(small_engine.call(f"open{number}", group="open", output_predicted=100))
    flood(engine, 13.0, output_predicted=5)
    assert "open0" in engine.started, "the group is lifted"
    engine.arrive(small_engine.call("single", output_predicted=2000))
    end_s = engine.now + 60.0
    while engine.now < end_s and "single" not in engine.started:
        if sum(item.call.group == "open" for item in engine.queue) < 2:
            engine.arrive(small_engine.call(f"open-{engine.now:.2f}", group="open", output_predicted=100))
        engine.step()
    assert "single" in engine.started
    assert sum(name.startswith("open") for name in engine.started) == 6, "as many starts as the group had calls"


@covers("relquery")
def test_a_lifted_group_never_passes_urgency_0() -> None:
    engine = engine_of("relquery", patience_s=1.0)
    engine.arrive(small_engine.call("calm", group="calm"))
    flood(engine, 100.0, urgency=0)
    assert "calm" not in engine.started


def test_every_policy_has_a_test_of_its_starvation_statement() -> None:
    assert set(policies.POLICIES) == COVERED


# The victims of two-lane.


def preempted(seed: int, rank: Callable[[policies.Policy, policies.QueuedRequest], policies.Key]):
    """The preemptions of an engine that is short of memory: short calls with long prompts beside long calls."""
    random_source = random.Random(seed)
    policy = two_lane.TwoLane(small_engine.context())
    engine = small_engine.SmallEngine(policy, places=64, kv_tokens=10_000, rank=lambda item: rank(policy, item))
    due = 0.0
    for number in range(150):
        long = random_source.random() < 0.4
        prompt = random_source.randint(100, 200) if long else random_source.randint(800, 1500)
        output = random_source.randint(300, 800) if long else random_source.randint(50, 150)
        while engine.now < due:
            engine.step()
        work_s = output * small_engine.STEP_S
        engine.arrive(
            small_engine.call(
                f"{'slow' if long else 'fast'}{number}",
                prompt_tokens=prompt,
                output_predicted=output,
                due_at_s=engine.now + 5 + 3 * work_s,
            )
        )
        due += random_source.expovariate(4.0)
    while engine.running or len(engine.queue):
        engine.step()
    return engine.preemptions


def test_the_victims_of_two_lane_are_not_the_calls_that_its_turns_have_just_admitted() -> None:
    seeds = range(3)
    by_lane = [row for seed in seeds for row in preempted(seed, lambda p, item: (p.lane(item), *p.key(item)))]
    by_slack = [row for seed in seeds for row in preempted(seed, lambda p, item: p.rank(item))]
    assert len(by_slack) < len(by_lane)
    just_admitted = [
        sum(row.call.id.startswith("slow") and row.progress < 20 for row in rows) for rows in (by_slack, by_lane)
    ]
    assert just_admitted[0] < 0.9 * just_admitted[1]


def test_a_call_of_semantic_that_started_on_the_share_of_its_level_is_no_first_victim() -> None:
    engine = engine_of("semantic", places=60, level_share=0.2)
    for number in range(40):
        engine.arrive(small_engine.call(f"urgent{number}", urgency=0, output_predicted=300 + number))
        engine.arrive(small_engine.call(f"calm{number}", urgency=4, output_predicted=20))
    engine.step(max_starts=30)
    calm = [each.item for each in engine.running.values() if each.item.call.urgency == 4]
    assert calm
    victim = max(engine.running.values(), key=lambda each: engine.policy.rank(each.item))
    assert victim.item.call.urgency == 0


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_a_call_of_semantic_that_starts_beside_a_blocked_urgent_call_keeps_its_level(share: float) -> None:
    """It starts because the urgent call cannot, not on the guaranteed share of its level, so it yields first later."""
    engine = engine_of("semantic", level_share=share)
    engine.arrive(small_engine.call("blocked", urgency=0, output_predicted=5))
    engine.arrive(small_engine.call("calm", urgency=4, output_predicted=5))
    assert engine.queue.pass_over().call.id == "blocked"
    calm = engine.queue.pop(engine.now)
    assert calm.call.id == "calm"
    urgent = engine.queue.get(CallId("blocked"))
    assert urgent is not None
    assert engine.policy.rank(calm) > engine.policy.rank(urgent)
