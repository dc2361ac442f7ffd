"""Rules that every policy keeps under any history, with the broken policies that break them, in one file to be read
together.

The histories mix arrivals, steps, blocked starts, preemptions, aborts, late predictions and switches between all policies.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import small_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import WaitingQueue

NAMES = sorted(policies.POLICIES)

CALLS = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(1, 3000),
        "output_predicted": st.integers(1, 200),
        "tenant": st.sampled_from(["", "a", "b", "c"]),
        "weight": st.sampled_from([0.5, 1.0, 4.0]),
        "urgency": st.integers(0, 4),
        "due_at_s": st.none() | st.floats(-10, 1000),
        "group": st.none() | st.sampled_from(["g", "h"]),
        "group_size": st.sampled_from([0, 1, 3, 10_000_000]),
        "session": st.none() | st.sampled_from(["s", "t"]),
        "tool_s": st.none() | st.floats(0, 1e9),
        "left_s": st.floats(0, 1e9),
    }
)
PICK = st.integers(0, 1000)
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), CALLS, st.integers(1, 60)),
    st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("preempt"), PICK),
    st.tuples(st.just("abort"), PICK),
    st.tuples(st.just("predict"), PICK, st.integers(1, 500)),
    st.tuples(st.just("switch"), st.sampled_from(NAMES)),
)
HISTORIES = st.lists(EVENTS, min_size=5, max_size=60)
SETTINGS = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def create(name: str, seed: int = 7) -> policies.Policy:
    return policies.create(name, context=small_engine.context(random=random.Random(seed)))


def chosen(names: list[CallId], number: int) -> CallId | None:
    return names[number % len(names)] if names else None


def play(policy: policies.Policy, history, check=lambda engine, alive: None) -> small_engine.SmallEngine:
    """An engine after a history; `check` sees it and the ids of the calls that must be in it after each event."""
    engine = small_engine.SmallEngine(policy, places=3, kv_tokens=6000)
    alive: set[CallId] = set()
    for number, (event, *arguments) in enumerate(history):
        if event == "arrive":
            fields, output = arguments
            alive.add(engine.arrive(small_engine.call(f"c{number}", **fields), output=output).call.id)
        elif event == "step":
            blocked, steps = arguments
            names = [item.call.id for item in engine.queue.first(blocked)]
            for _ in range(steps):
                engine.step(blocked=names)
        elif event == "preempt":
            name = chosen(list(engine.running), arguments[0])
            if name:
                engine.preempt(name)
        elif event == "abort":
            name = chosen(sorted(alive), arguments[0])
            if name:
                engine.abort(name)
                alive.remove(name)
        elif event == "predict":
            name = chosen(sorted(item.call.id for item in engine.queue), arguments[0])
            if name:
                engine.predict(name, arguments[1])
        elif event == "switch":
            engine.switch(create(arguments[0]))
        alive -= set(engine.ended)
        check(engine, alive)
    return engine


def check_no_call_is_lost_or_doubled(engine: small_engine.SmallEngine, alive: set[CallId]) -> None:
    listed = [item.call.id for item in engine.queue]
    assert sorted([*listed, *engine.running]) == sorted(alive)
    assert len(set(engine.ended)) == len(engine.ended)


def check_positions_can_be_compared(engine: small_engine.SmallEngine, alive: set[CallId]) -> None:
    """Keys of a lane and ranks form total orders, are numbers, and are the same when asked twice."""
    policy = engine.policy
    items = list(engine.queue)
    ranked = [*items, *(each.item for each in engine.running.values())]
    keys = [(policy.lane(item), *policy.key(item)) for item in items]
    ranks = [policy.rank(item) for item in ranked]
    for position in itertools.chain(keys, ranks):
        assert all(type(part) in (int, float) and part == part for part in position)
    assert sorted(ranks)[::-1] == sorted(ranks, reverse=True)
    assert keys == [(policy.lane(item), *policy.key(item)) for item in items]
    assert ranks == [policy.rank(item) for item in ranked]
    for lane in {policy.lane(item) for item in items}:
        assert sorted(policy.key(item) for item in items if policy.lane(item) == lane)


def check_the_queue_holds_present_keys(engine: small_engine.SmallEngine, alive: set[CallId]) -> None:
    """A policy names every call whose lane or key an event changed: a queue that is built anew has the same order."""
    fresh = WaitingQueue(engine.policy)
    before = list(engine.queue)
    ranks = {item.call.id: number for number, item in enumerate(before)}
    for lane in {engine.policy.lane(item) for item in before}:
        listed = [engine.policy.key(item) for item in before if engine.policy.lane(item) == lane]
        assert listed == sorted(listed)
    for item in before:
        fresh.push(item)
    assert [item.call.id for item in fresh] == sorted(ranks, key=ranks.__getitem__)


def check_the_list_is_the_order_of_starts(engine: small_engine.SmallEngine, alive: set[CallId]) -> None:
    """The queue lists the calls in the order of the next starts, and listing changes nothing."""
    first = [item.call.id for item in engine.queue.first(3)]
    assert [item.call.id for item in engine.queue.first(3)] == first
    if first:
        assert engine.queue.peek().call.id == first[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "check",
    [
        check_no_call_is_lost_or_doubled,
        check_positions_can_be_compared,
        check_the_queue_holds_present_keys,
        check_the_list_is_the_order_of_starts,
    ],
)
def test_every_policy_keeps_its_calls_and_their_order_under_any_history(name: str, check) -> None:
    @SETTINGS
    @given(HISTORIES)
    def holds(history) -> None:
        play(create(name), history, check)

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_ends_every_call_and_keeps_nothing_of_it(name: str) -> None:
    @SETTINGS
    @given(HISTORIES)
    def holds(history) -> None:
        engine = play(create(name), [event for event in history if event[0] != "switch"])
        for _ in range(20_000):
            if not len(engine.queue) and not engine.running:
                break
            engine.step()
        assert not len(engine.queue)
        assert not engine.running
        assert kept(engine.policy) == kept(create(name))

    holds()


def kept(policy: policies.Policy) -> dict[str, int]:
    """The sizes of the collections in which a policy keeps calls; sessions, means and debts outlive calls on purpose."""
    outlive = {"accounts", "places", "tickets", "parameters"}
    outlive |= {"_idle", "_sessions", "_mean_s", "_heads", "_quanta", "_to_probe", "_uncharged", "_unchecked"}
    return {
        field: len(value) for field, value in vars(policy).items() if hasattr(value, "__len__") and field not in outlive
    }


def sizes(value: object, depth: int = 3) -> int:
    """The size of the largest collection in an object of ours and in the objects that it holds."""
    own = len(value) if hasattr(value, "__len__") else 0
    if not depth or not type(value).__module__.startswith("tidegate_policy"):
        return own
    return max([own, *(sizes(each, depth - 1) for each in getattr(value, "__dict__", {}).values())])


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_grows_in_steady_state(name: str) -> None:
    engine = small_engine.SmallEngine(create(name), places=4)
    engine.arrive(small_engine.call("first", output_predicted=1))
    for number in range(4000):
        arrived = engine.arrive(
            small_engine.call(
                f"c{number}",
                output_predicted=1 + number % 3,
                prompt_tokens=1 + number % 50,
                tenant=f"t{number % 7}",
                urgency=number % 5,
                group=f"g{number // 10}" if number % 2000 > 1000 else None,
                session=f"s{number % 5}",
            )
        )
        if number % 3:
            engine.abort(arrived.call.id)
        engine.step()
    assert len(engine.queue) < 20
    assert sizes(engine.policy) < 250


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_gives_the_same_result_for_the_same_seed(name: str) -> None:
    @SETTINGS
    @given(HISTORIES)
    def holds(history) -> None:
        first, second = play(create(name), history), play(create(name), history)
        assert first.started == second.started
        assert first.preemptions == second.preemptions

    holds()


def check_many_calls_are_answered_as_each(
    one: policies.Policy, many: policies.Policy, now: float, calls: list[dict[str, object]]
) -> None:
    """Arrivals, lanes and keys of many calls at once are those of each call in its turn."""
    known = [small_engine.call(f"c{number}", **fields) for number, fields in enumerate(calls)]
    items = [policies.QueuedRequest(call=call, service_s=small_engine.COST.call_seconds(call)) for call in known]
    changed = [call_id for item in items for call_id in one.on_arrival(now, item)]
    assert sorted(many.on_arrivals(now, items)) == sorted(changed)
    queues = WaitingQueue(one), WaitingQueue(many)
    for item in items:
        for queue in queues:
            queue.push(item)
    for policy in (one, many):
        assert policy.lanes(items) == [one.lane(item) for item in items]
        assert policy.keys(items) == [one.key(item) for item in items]
        assert [policy.rank(item) for item in items] == [one.rank(item) for item in items]
    assert list(queues[0]) == list(queues[1])


ARRIVED = st.builds(dict, CALLS, arrived_at_s=st.floats(0, 100))


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_answers_for_many_calls_as_for_each(name: str) -> None:
    @SETTINGS
    @given(st.floats(0, 200), st.lists(ARRIVED, max_size=40))
    def holds(now, calls) -> None:
        check_many_calls_are_answered_as_each(create(name), create(name), now, calls)

    holds()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(NAMES, NAMES)))
def test_a_switch_between_any_two_policies_keeps_every_call(before: str, after: str) -> None:
    engine = small_engine.SmallEngine(create(before), places=3)
    for number in range(12):
        engine.arrive(
            small_engine.call(
                f"c{number}",
                tenant="ab"[number % 2],
                urgency=number % 5,
                group=[None, "g", "h"][number % 3],
                session=[None, "s"][number % 2],
                output_predicted=5 + number,
            )
        )
        engine.step(blocked=[CallId("c1")])
    engine.preempt(next(iter(engine.running)))
    engine.switch(create(after))
    waiting = len(engine.queue)
    assert waiting + len(engine.running) + len(engine.ended) == 12
    fresh = create(after)
    assert type(engine.policy) is type(fresh)
    engine.run(5.0)
    assert sorted(engine.ended) == sorted(f"c{number}" for number in range(12))


# Proof that the rules can fail.


class Forgetful(policies.StaticPolicy):
    """Keys change with service, and the policy does not say so."""

    name = "forgetful"
    keys_change = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float((hash(item.call.prompt_tokens) * 31 + self.steps * item.call.output_predicted) % 17),)

    def on_tokens(self, now, computed) -> policies.Changed:
        self.steps += 1
        return policies.NONE_CHANGED


class Moody(policies.StaticPolicy):
    """The same question has different answers."""

    name = "moody"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (self.context.random.random(),)


class Incomparable(policies.StaticPolicy):
    """Some keys cannot be compared."""

    name = "incomparable"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float("nan"),) if item.call.urgency == 3 else (1.0,)


class Chance(policies.StaticPolicy):
    """The order does not follow from the seed."""

    name = "chance"
    chance = random.Random(1)

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[CallId, float] = {}

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (self.drawn.setdefault(item.call.id, self.chance.random()),)


class Hasty(policies.StaticPolicy):
    """Of many calls that arrive at once, the policy notices only the first."""

    name = "hasty"

    def __init__(self) -> None:
        super().__init__()
        self.noticed: set[CallId] = set()

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float(item.call.id in self.noticed),)

    def on_arrival(self, now, item) -> policies.Changed:
        self.noticed.add(item.call.id)
        return policies.NONE_CHANGED

    def on_arrivals(self, now, items) -> policies.Changed:
        return self.on_arrival(now, items[0])


def test_a_policy_that_answers_for_many_calls_otherwise_than_for_each_is_found() -> None:
    with pytest.raises(AssertionError):
        check_many_calls_are_answered_as_each(Hasty(), Hasty(), 0.0, [{}, {}])


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Forgetful, check_the_queue_holds_present_keys),
        (Moody, check_positions_can_be_compared),
        (Incomparable, check_positions_can_be_compared),
    ],
)
def test_a_broken_policy_breaks_a_rule(broken, check) -> None:
    @settings(SETTINGS, max_examples=200, database=None, derandomize=True)
    @given(HISTORIES)
    def holds(history) -> None:
        play(broken(), [event for event in history if event[0] != "switch"], check)

    with pytest.raises(AssertionError):
        holds()


def test_a_policy_that_does_not_follow_its_seed_is_found() -> None:
    rows = [small_engine.call(f"c{number}") for number in range(20)]
    orders = []
    for _ in range(2):
        engine = small_engine.SmallEngine(Chance(), places=1)
        for row in rows:
            engine.arrive(dataclasses.replace(row))
        engine.run(5.0)
        orders.append(engine.started)
    assert orders[0] != orders[1]


class LosesCalls:
    """A queue that loses a call on each re-key. It is no subclass, because a compiled queue has none."""

    def __init__(self, policy: policies.Policy) -> None:
        self._queue = WaitingQueue(policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, call_id: CallId) -> bool:
        return call_id in self._queue

    def __iter__(self) -> Iterator[policies.QueuedRequest]:
        return iter(self._queue)

    def rekey(self, changed: policies.Changed) -> None:
        for call_id in list(changed)[:1]:
            self._queue.remove(call_id)


def test_a_scheduler_that_loses_a_call_is_found() -> None:
    engine = small_engine.SmallEngine(create("mlfq"), places=1)
    engine.queue = LosesCalls(engine.policy)
    names = {engine.arrive(small_engine.call(f"c{number}", output_predicted=200)).call.id for number in range(20)}
    engine.run(70.0)  # calls are boosted, so they are keyed again
    with pytest.raises(AssertionError):
        check_no_call_is_lost_or_doubled(engine, names - set(engine.ended))
