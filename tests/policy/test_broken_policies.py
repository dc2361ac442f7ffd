"""The rules of `test_policy_conformance` and the bounds of `test_starvation` can fail: each finds a policy or a queue that
breaks it on purpose. `test_fair_policies` has the broken policies of the shares between tenants."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
import small_engine
import test_policy_conformance as conformance
import test_starvation as starvation
from hypothesis import Phase, given, settings

from tidegate_policy import policies
from tidegate_policy.model import CallId
from tidegate_policy.waiting_queue import WaitingQueue

FIND = settings(conformance.SETTINGS, max_examples=200, database=None, derandomize=True, phases=[Phase.generate])
"""Enough examples to find a broken policy, the same in each run. No example is made smaller, because nobody reads it."""


class Counting(policies.StaticPolicy):
    """Counts the steps, and says of none that a call's key or lane has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_tokens(self, now, computed) -> policies.Changed:
        self.steps += 1
        return policies.NONE_CHANGED


class Forgetful(Counting):
    """Keys change with service, and the policy does not say so."""

    name = "forgetful"
    keys_change = True

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float((hash(item.call.prompt_tokens) * 31 + self.steps * item.call.output_predicted) % 17),)


class Turning(Counting):
    """The whole order turns around with each step, and the policy does not say so."""

    name = "turning"
    keys_change = True

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return ((-1.0 if self.steps % 2 else 1.0) * item.call.prompt_tokens,)


class Aging(policies.StaticPolicy):
    """A call that has waited for five seconds goes first, and the policy does not say so."""

    name = "aging"
    keys_change = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float(self.now - item.call.arrived_at_s <= 5), -float(item.call.prompt_tokens))

    def on_tokens(self, now, computed) -> policies.Changed:
        self.now = now
        return policies.NONE_CHANGED


class Roaming(Counting):
    """Calls move to other lanes with each step, and the policy does not say so."""

    name = "roaming"

    def lane(self, item: policies.QueuedRequest) -> int:
        return (item.call.urgency + self.steps) % 3

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (-float(item.call.prompt_tokens),)


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
    """The order does not follow from the seed: every second object has the reverse order."""

    name = "chance"
    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.sign = -1.0 if next(self.made) % 2 else 1.0

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (self.sign * item.call.prompt_tokens,)


class Deaf(policies.StaticPolicy):
    """Shortest first, by what was predicted first: later predictions count nothing."""

    name = "deaf"

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[CallId, int] = {}

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float(self.first.setdefault(item.call.id, item.call.output_predicted)),)


class Hoarder(policies.StaticPolicy):
    """Remembers each call for ever."""

    name = "hoarder"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[CallId] = []

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (item.call.arrived_at_s,)

    def on_end(self, now, call_id) -> policies.Changed:
        self.seen.append(call_id)
        return policies.NONE_CHANGED


class OneState:
    """Turns between two lanes whose copy is the same object, so listing the next starts uses their turns up."""

    def __init__(self) -> None:
        self.last = 0

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        return next((lane for lane in sorted(lanes) if lane != self.last), self.last)

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        self.last = lane

    def copy(self) -> "OneState":
        return self


class UsedUpByListing(policies.StaticPolicy):
    """Long and short prompts take turns, and whoever lists the queue takes the turns."""

    name = "used-up-by-listing"

    def __init__(self) -> None:
        super().__init__()
        self.turns = OneState()

    def lane(self, item: policies.QueuedRequest) -> int:
        return int(item.call.prompt_tokens > 1000)

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (item.call.arrived_at_s,)


class DueOrNever(policies.StaticPolicy):
    """Earliest deadline first, without patience: a call without a deadline waits for all that have one."""

    name = "due-or-never"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (1e18 if item.call.due_at_s is None else item.call.due_at_s,)


class NewestFirst(policies.StaticPolicy):
    name = "newest-first"

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (-item.call.arrived_at_s,)


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
        conformance.check_many_calls_are_answered_as_each(Hasty(), Hasty(), 0.0, [{}, {}])


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Forgetful, conformance.check_the_queue_holds_present_keys),
        (Moody, conformance.check_positions_can_be_compared),
        (Incomparable, conformance.check_positions_can_be_compared),
        (UsedUpByListing, conformance.check_the_list_is_the_order_of_starts),
    ],
)
def test_a_broken_policy_breaks_a_rule_of_every_instant(broken, check) -> None:
    @FIND
    @given(conformance.histories())
    def holds(history) -> None:
        conformance.play(broken(), history, check)

    with pytest.raises(AssertionError):
        holds()


@pytest.mark.parametrize("broken", [Forgetful, Turning, Aging, Roaming])
def test_a_policy_whose_order_changes_without_a_word_is_found_while_a_crowd_waits(broken) -> None:
    with pytest.raises(AssertionError):
        conformance.play_crowd(broken(), 0, conformance.check_the_queue_holds_present_keys)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Chance, conformance.check_the_same_seed_gives_the_same_result),
        (Hoarder, conformance.check_every_call_ends_and_nothing_of_it_is_kept),
    ],
)
def test_a_broken_policy_breaks_a_rule_of_whole_histories(broken, check) -> None:
    @FIND
    @given(conformance.histories())
    def holds(history) -> None:
        check(broken, history)

    with pytest.raises(AssertionError):
        holds()


REGISTERED = """
from tidegate_policy import policies

class Raising(policies.StaticPolicy):
    name = "raising"

    def key(self, item):
        if item.call.urgency == 3:
            raise KeyError("level")
        return (item.call.arrived_at_s,)

policies.POLICIES["raising"] = Raising
"""
"""A broken policy in the registry."""


def test_a_broken_policy_in_the_registry_fails_its_own_tests_with_a_sentence_and_no_others(tmp_path) -> None:
    (tmp_path / "registers_a_policy.py").write_text(REGISTERED)
    tests = [conformance.__file__, "-p", "registers_a_policy", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    outcomes = {}
    for name in ("fcfs", "raising"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *tests, "-k", f"under_any_history and lost and {name}"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        outcomes[name] = done.stdout
    assert "1 passed" in outcomes["fcfs"]
    assert (
        "The policy 'raising' raises KeyError('level') in a test of the rule 'No call is lost or" in outcomes["raising"]
    )
    assert "The history is [(" in outcomes["raising"]
    assert f"{conformance.PAGE} describes the rule under '{conformance.SECTION}'." in outcomes["raising"]


def test_a_policy_that_remembers_each_call_grows() -> None:
    with pytest.raises(AssertionError):
        conformance.check_nothing_grows_in_steady_state(Hoarder())


class Unread(policies.StaticPolicy):
    """Declares a parameter and does not read it."""

    name = "unread"
    PARAMETERS = (
        policies.Parameter(name="patience_s", default=30.0, low=1.0, high=60.0, unit="seconds", meaning="Nothing."),
    )

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (float(item.call.prompt_tokens),)


def test_a_policy_that_ignores_its_parameter_is_found() -> None:
    with pytest.raises(AssertionError, match="the parameter 'patience_s' changes nothing"):
        conformance.check_each_parameter_has_an_effect(lambda values: Unread(**values))


def test_a_policy_that_does_not_hear_late_predictions_is_found() -> None:
    with pytest.raises(AssertionError):
        conformance.check_a_late_prediction_counts_as_an_early_one(
            Deaf, [{"output_predicted": 10}, {"output_predicted": 20}], [20, 10]
        )


# Bounds of starvation.


@pytest.mark.parametrize(
    ("broken", "claims"),
    [(NewestFirst, "fcfs"), (NewestFirst, "augmented"), (DueOrNever, "edf"), (DueOrNever, "urgency")],
)
def test_a_policy_that_lets_calls_pass_for_ever_is_found(broken, claims: str) -> None:
    @FIND
    @given(starvation.ARRIVALS)
    def holds(arrivals) -> None:
        engine = small_engine.SmallEngine(broken(), places=1)
        starvation.check_no_call_passes_a_call_that_came_long_before_it(
            engine, starvation.no_pass_after(claims), arrivals
        )

    with pytest.raises(AssertionError):
        holds()


def test_a_lane_with_less_than_its_share_is_found() -> None:
    with pytest.raises(AssertionError):
        starvation.check_the_slow_lane_gets_its_share(
            starvation.engine_of("two-lane", fast_share=0.9), 0.7, [True, False] * 10
        )


def test_a_level_with_less_than_its_share_is_found() -> None:
    with pytest.raises(AssertionError):
        starvation.check_each_level_gets_its_share(starvation.engine_of("semantic", level_share=0.05), 0.1)


def test_a_policy_without_turns_between_tenants_is_found() -> None:
    with pytest.raises(AssertionError):
        starvation.check_a_tenant_starts_its_call_soon(starvation.engine_of("fcfs"))


def test_a_call_that_is_boosted_too_late_is_found() -> None:
    with pytest.raises(AssertionError):
        starvation.check_a_call_is_boosted_after_20_s(starvation.engine_of("mlfq", boost_s=40.0))


def test_a_group_that_waits_for_longer_than_its_patience_is_found() -> None:
    with pytest.raises(AssertionError):
        starvation.check_a_large_group_waits_for_2_s_a_call(starvation.engine_of("relquery", patience_s=4.0))


# Calls that are lost or doubled.


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
    engine = small_engine.SmallEngine(conformance.create("mlfq"), places=1)
    engine.queue = LosesCalls(engine.policy)
    names = {engine.arrive(small_engine.call(f"c{number}", output_predicted=200)).call.id for number in range(20)}
    engine.run(70.0)  # calls are boosted, so they are keyed again
    with pytest.raises(AssertionError):
        conformance.check_no_call_is_lost_or_doubled(engine, names - set(engine.ended))


def test_a_scheduler_that_keeps_a_started_call_is_found() -> None:
    engine = small_engine.SmallEngine(conformance.create("fcfs"), places=1)
    names = {engine.arrive(small_engine.call(f"c{number}")).call.id for number in range(3)}
    engine.step()
    (running,) = engine.running.values()
    engine.queue.push(running.item)
    with pytest.raises(AssertionError):
        conformance.check_no_call_is_lost_or_doubled(engine, names)
