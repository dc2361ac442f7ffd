"""Rules that every policy keeps under any history. `test_broken_policies` has the policies that break them.

The histories mix arrivals, steps, blocked starts, preemptions, aborts, late predictions and switches between policies. The
docstring of each check begins with its rule; docs/policies/README.md lists the rules, and a failure names its rule.
"""

import contextlib
import itertools
import math
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import small_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import WaitingQueue

NAMES = sorted(policies.POLICIES)
SHIPPED = (
    "augmented", "cfs", "edf", "fcfs", "llf", "lottery", "mlfq", "priority", "relquery", "rr", "semantic", "sjf", "srtf",
    "stride", "two-lane", "urgency", "wfq",
)  # fmt: skip
"""Histories switch between these and the policy under test, so a broken policy makes the tests of no other policy fail."""
PAGE, SECTION = "docs/policies/README.md", "The rules of every policy"

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
WITHOUT_SWITCH = (
    st.tuples(st.just("arrive"), CALLS, st.integers(1, 60)),
    st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("preempt"), PICK),
    st.tuples(st.just("abort"), PICK),
    st.tuples(st.just("predict"), PICK, st.integers(1, 500)),
)
SETTINGS = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def histories(*switched_to: str):
    """Histories with switches to these policies."""
    switches = (st.tuples(st.just("switch"), st.sampled_from(switched_to)),) if switched_to else ()
    return st.lists(st.one_of(*WITHOUT_SWITCH, *switches), min_size=5, max_size=60)


def histories_of(name: str):
    """Histories for the test of a policy."""
    return histories(*dict.fromkeys([*SHIPPED, name]))


@contextlib.contextmanager
def rule(name: str, check: Callable[..., object], history: object) -> Iterator[None]:
    """Adds to a failure which policy breaks which rule under which history, and where the rule is described."""
    try:
        yield
    except Exception as error:
        does = "breaks" if isinstance(error, AssertionError) else f"raises {error!r} in a test of"
        raise AssertionError(
            f"The policy {name!r} {does} the rule {sentence(check)!r}. The history is {history!r}. "
            f"{PAGE} describes the rule under {SECTION!r}."
        ) from error


def sentence(check: Callable[..., object]) -> str:
    """The rule of a check."""
    return str(check.__doc__).split(":")[0].split(".")[0].strip()


Create = Callable[[], policies.Policy]


def create(name: str, seed: int = 7, parameters: Mapping[str, float] | None = None) -> policies.Policy:
    return policies.create(name, parameters, context=small_engine.context(random=random.Random(seed)))


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
    """No call is lost or doubled."""
    listed = [item.call.id for item in engine.queue]
    assert sorted([*listed, *engine.running]) == sorted(alive)
    assert len(set(engine.ended)) == len(engine.ended)


def check_positions_can_be_compared(engine: small_engine.SmallEngine, alive: set[CallId]) -> None:
    """Lanes, keys and ranks are numbers, can be compared, and are the same when asked twice."""
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
    """An event method returns every call whose lane or key the event changed: a queue that is built anew has the same
    order."""
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
    """The queue lists the calls in the order of the next starts, and listing changes no later start."""
    first = [item.call.id for item in engine.queue.first(3)]
    assert [item.call.id for item in engine.queue.first(3)] == first
    if first:
        assert engine.queue.peek().call.id == first[0]


AT_EVERY_INSTANT = pytest.mark.parametrize(
    "check",
    [
        check_no_call_is_lost_or_doubled,
        check_positions_can_be_compared,
        check_the_queue_holds_present_keys,
        check_the_list_is_the_order_of_starts,
    ],
)


@pytest.mark.parametrize("name", NAMES)
@AT_EVERY_INSTANT
def test_every_policy_keeps_its_calls_and_their_order_under_any_history(name: str, check) -> None:
    @SETTINGS
    @given(histories_of(name))
    def holds(history) -> None:
        with rule(name, check, history):
            play(create(name), history, check)

    holds()


def call_fields(rng: random.Random) -> dict[str, object]:
    """As `CALLS`."""
    return {
        "prompt_tokens": rng.randint(1, 3000),
        "output_predicted": rng.randint(1, 200),
        "tenant": rng.choice(["", "a", "b", "c"]),
        "weight": rng.choice([0.5, 1.0, 4.0]),
        "urgency": rng.randint(0, 4),
        "due_at_s": rng.choice([None, rng.uniform(-10, 100)]),
        "group": rng.choice([None, "g", "h"]),
        "group_size": rng.choice([0, 1, 3, 10_000_000]),
        "session": rng.choice([None, "s", "t"]),
        "tool_s": rng.choice([None, 0.0, 1.0, 30.0]),
    }


def play_crowd(policy: policies.Policy, seed: int, check) -> small_engine.SmallEngine:
    """An engine at which some tens of calls wait at any time, under one policy. `check` sees it after each step, some of
    which take seconds."""
    rng, alive = random.Random(seed), set[CallId]()
    engine = small_engine.SmallEngine(policy, places=3, kv_tokens=6000)
    for number in range(120):
        for each in range(rng.choice([0, 0, 1, 3])):
            made = small_engine.call(f"c{number}-{each}", **call_fields(rng))
            alive.add(engine.arrive(made, output=rng.randint(1, 10)).call.id)
        happens, waiting = rng.random(), sorted(item.call.id for item in engine.queue)
        if happens < 0.05 and waiting:
            engine.predict(rng.choice(waiting), rng.randint(1, 500))
        elif happens < 0.10 and engine.running:
            engine.preempt(rng.choice(sorted(engine.running)))
        elif happens < 0.13 and alive:
            gone = rng.choice(sorted(alive))
            engine.abort(gone)
            alive.remove(gone)
        engine.step(blocked=[item.call.id for item in engine.queue.first(rng.choice([0, 0, 2]))])
        engine.now += rng.choice([0.0, 0.0, 2.0])
        alive -= set(engine.ended)
        check(engine, alive)
    return engine


@pytest.mark.parametrize("name", NAMES)
@AT_EVERY_INSTANT
def test_every_policy_keeps_its_calls_and_their_order_while_a_crowd_waits(name: str, check) -> None:
    for seed in range(10):
        with rule(name, check, f"the crowd of seed {seed}"):
            play_crowd(create(name), seed, check)


def check_every_call_ends_and_nothing_of_it_is_kept(made: Create, history) -> None:
    """Every call ends, and the policy keeps nothing of an ended call."""
    engine = play(made(), history)
    for _ in range(20_000):
        if not len(engine.queue) and not engine.running:
            break
        engine.step()
    assert not len(engine.queue)
    assert not engine.running
    assert kept(engine.policy) == kept(made())


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_ends_every_call_and_keeps_nothing_of_it(name: str) -> None:
    @SETTINGS
    @given(histories())
    def holds(history) -> None:
        with rule(name, check_every_call_ends_and_nothing_of_it_is_kept, history):
            check_every_call_ends_and_nothing_of_it_is_kept(lambda: create(name), history)

    holds()


def kept(policy: policies.Policy) -> dict[str, int]:
    """The sizes of the collections in which a policy keeps calls; sessions, means and debts outlive calls on purpose."""
    outlive = {"accounts", "places", "tickets", "parameters"}
    outlive |= {"_idle", "_sessions", "_mean_s", "_heads", "_quanta", "_to_probe", "_uncharged", "_unchecked"}
    return {
        field: len(value) for field, value in vars(policy).items() if hasattr(value, "__len__") and field not in outlive
    }


def sizes(value: object, depth: int = 3) -> int:
    """The size of the largest collection in a policy and in the objects of ours that it holds."""
    own = len(value) if hasattr(value, "__len__") else 0
    ours = isinstance(value, policies.StaticPolicy) or type(value).__module__.startswith("tidegate_policy")
    if not depth or not ours:
        return own
    return max([own, *(sizes(each, depth - 1) for each in getattr(value, "__dict__", {}).values())])


def check_nothing_grows_in_steady_state(policy: policies.Policy) -> None:
    """Nothing in a policy grows in steady state."""
    engine = small_engine.SmallEngine(policy, places=4)
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
def test_no_policy_grows_in_steady_state(name: str) -> None:
    with rule(name, check_nothing_grows_in_steady_state, "4,000 short calls, of which most are aborted"):
        check_nothing_grows_in_steady_state(create(name))


def values_of(parameter: policies.Parameter) -> list[float]:
    """Values from the whole range of a parameter."""
    low, middle, high = parameter.low, parameter.default, parameter.high
    return [low, mean(low, middle), middle, mean(middle, high), high]


def mean(low: float, high: float) -> float:
    return math.sqrt(low * high) if low > 0 else (low + high) / 2


def check_each_parameter_has_an_effect(made: Callable[[Mapping[str, float]], policies.Policy]) -> None:
    """Each parameter has an effect: some value of it gives other starts or preemptions than another one."""
    for parameter in made({}).PARAMETERS:
        least = {other.name: other.low for other in made({}).PARAMETERS if other is not parameter}
        assert any(
            len({outcome(made({**others, parameter.name: value}), seed) for value in values_of(parameter)}) > 1
            for seed in range(10)
            for others in ({}, least)
        ), f"the parameter {parameter.name!r} changes nothing"


def outcome(policy: policies.Policy, seed: int) -> tuple[CallId, ...]:
    """The starts of a crowd and its preempted calls."""
    engine = play_crowd(policy, seed, lambda engine, alive: None)
    return (*engine.started, *(preemption.call.id for preemption in engine.preemptions))


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_of_every_policy_has_an_effect(name: str) -> None:
    with rule(name, check_each_parameter_has_an_effect, "ten crowds"):
        check_each_parameter_has_an_effect(lambda values: create(name, parameters=values))


def check_the_same_seed_gives_the_same_result(made: Create, history) -> None:
    """The same seed gives the same starts and preemptions."""
    first, second = play(made(), history), play(made(), history)
    assert first.started == second.started
    assert first.preemptions == second.preemptions


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_gives_the_same_result_for_the_same_seed(name: str) -> None:
    @SETTINGS
    @given(histories_of(name))
    def holds(history) -> None:
        with rule(name, check_the_same_seed_gives_the_same_result, history):
            check_the_same_seed_gives_the_same_result(lambda: create(name), history)

    holds()


def check_a_late_prediction_counts_as_an_early_one(
    made: Create, calls: list[dict[str, object]], late: list[int]
) -> None:
    """A late prediction counts as an early one: while nothing has started, calls start in the order of calls that had their
    predictions at once."""
    orders = []
    for known in (True, False):
        engine = small_engine.SmallEngine(made(), places=1)
        predicted = list(zip(calls, itertools.cycle(late)))
        for number, (fields, tokens) in enumerate(predicted):
            engine.arrive(
                small_engine.call(f"c{number}", **{**fields, **({"output_predicted": tokens} if known else {})})
            )
        if not known:
            for number, (_, tokens) in enumerate(predicted):
                engine.predict(CallId(f"c{number}"), tokens)
        orders.append([item.call.id for item in engine.queue])
    assert orders[0] == orders[1]


BY_SUMS = {"lottery", "relquery", "rr", "wfq"}
"""They order tenants or groups by sums and means of what was predicted at the arrivals; starts correct them."""
WITHOUT_MEANS = {"semantic": {"level_share": 0.0}}
"""The guaranteed share of a level counts in means of what was predicted at the arrivals too."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_SUMS])
def test_a_policy_by_single_calls_follows_late_predictions(name: str) -> None:
    @SETTINGS
    @given(st.lists(CALLS, min_size=2, max_size=12), st.lists(st.integers(1, 500), min_size=1, max_size=12))
    def holds(calls, late) -> None:
        with rule(name, check_a_late_prediction_counts_as_an_early_one, (calls, late)):
            check_a_late_prediction_counts_as_an_early_one(
                lambda: create(name, parameters=WITHOUT_MEANS.get(name)), calls, late
            )

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
        with rule(name, check_many_calls_are_answered_as_each, (now, calls)):
            check_many_calls_are_answered_as_each(create(name), create(name), now, calls)

    holds()


def check_a_switch_keeps_every_call(before: str, after: str) -> None:
    """A switch between two policies keeps every call."""
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


SWITCHES = [pair for pair in itertools.product(NAMES, NAMES) if len({*pair}.difference(SHIPPED)) <= 1]
"""Each has at most one policy that is not shipped."""


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_a_switch_between_two_policies_keeps_every_call(before: str, after: str) -> None:
    tested = next((name for name in (before, after) if name not in SHIPPED), after)
    with rule(tested, check_a_switch_keeps_every_call, f"a switch from {before} to {after}"):
        check_a_switch_keeps_every_call(before, after)


CHECKS = [each for name, each in sorted(globals().items()) if name.startswith("check_")]


def test_the_page_of_the_policies_lists_the_rules() -> None:
    page = (pathlib.Path(__file__).resolve().parents[2] / PAGE).read_text()
    listed = page.split(f"## {SECTION}")[1].split("\n## ")[0]
    assert {line[2:].split(":")[0].rstrip(".") for line in listed.splitlines() if line.startswith("- ")} == {
        sentence(check) for check in CHECKS
    }
