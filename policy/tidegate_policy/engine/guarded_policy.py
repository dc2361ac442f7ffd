"""Keeps exceptions in the code of policies and regulators away from the engine.

A `GuardedPolicy` answers in place of a policy. When a hook raises, or answers with a value that cannot be used, the calls
of the present step are served in the order of their arrival, as vLLM serves them. The next step tries the policy again. A
waiting call without a usable key is asked for again at each step. Until it has a key, or has started, steps are served by
arrival. A regulator that raises changes nothing in the plan. `Failures` counts each exception and reports the first of
each hook; the core does not log.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from tidegate_policy import policies
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan
from tidegate_policy.model import CallId
from tidegate_policy.policies import Changed, Computed, Key, Policy, QueuedRequest, Turns, policy_contract

RETRIES = 64
"""Waiting calls without a key that one step asks for again."""
NO_KEY: Key = (math.inf,)
"""The key of a call to which the policy gave none. It is not compared while the policy fails."""


class BadAnswer(ValueError):
    """A policy or regulator returned a value that cannot be used."""


class Failures:
    """Counts exceptions by hook."""

    def __init__(self, report: Callable[[str, Exception], object] | None = None) -> None:
        """`report` receives the first exception of each hook, with its traceback."""
        self.counts: Counter[str] = Counter()
        self._report = report
        self._caught: dict[str, _Caught] = {}

    def caught(self, hook: str) -> "_Caught":
        """A context that keeps the exceptions of code beside the policy, such as a counter, from the engine."""
        found = self._caught.get(hook)
        if found is None:
            found = self._caught[hook] = _Caught(self, hook)
        return found

    def add(self, hook: str, error: Exception) -> None:
        self.counts[hook] += 1
        if self.counts[hook] == 1 and self._report is not None:
            self._report(hook, error)


class _Caught:
    """A context that counts an exception of its body in place of raising it."""

    __slots__ = ("_failures", "_hook")

    def __init__(self, failures: Failures, hook: str) -> None:
        self._failures = failures
        self._hook = hook

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.add(self._hook, error)
        return True


def shaped(regulator: Regulator, engine: EngineSnapshot, plan: StepPlan, failures: Failures) -> StepPlan:
    """The regulator's plan, or `plan` if the regulator raises."""
    try:
        shaped = regulator.shape(engine, plan)
        return plan if shaped is plan else _usable_plan(shaped)
    except Exception as error:
        failures.add(f"{type(regulator).__name__}.shape", error)
        return plan


def _usable_plan(plan: object) -> StepPlan:
    """The plan, if its fields have the types that a step needs. The limits of a plan are `bounds.safe`'s affair."""
    if not isinstance(plan, StepPlan):
        raise BadAnswer(f"a regulator must return a plan, not {plan!r}")
    starts, call_tokens = plan.max_starts, plan.max_call_tokens
    optional = 0 if starts is None else starts, 0 if call_tokens is None else call_tokens
    for number in (plan.max_running, plan.max_step_tokens, *optional):
        if type(number) is not int:
            raise BadAnswer(f"the bounds of a plan must be integers, not {number!r}")
    if type(plan.preempt) is not tuple or type(plan.paused) is not frozenset:
        raise BadAnswer("a plan preempts a tuple of calls, and pauses a frozenset of calls")
    if plan.preempt or plan.paused:
        for call_id in chain(plan.preempt, plan.paused):
            if not isinstance(call_id, str):
                raise BadAnswer(f"a call in a plan must be an id, not {call_id!r}")
    return plan


def observed(regulator: Regulator, facts: StepFacts, failures: Failures) -> None:
    """Tells a regulator of a step."""
    try:
        regulator.observe(facts)
    except Exception as error:
        failures.add(f"{type(regulator).__name__}.observe", error)


def failure_of(action: Callable[[], object]) -> Exception | None:
    """The exception that an action of a policy raises; None if it raises none."""
    try:
        action()
    except Exception as error:
        return error
    return None


class GuardedPolicy:
    """A policy whose hooks do not raise."""

    def __init__(self, unguarded: Policy, failures: Failures) -> None:
        self.unguarded = unguarded
        self.name = unguarded.name
        self.parameters: Mapping[str, float] = unguarded.parameters
        self.failing = False
        """Whether the calls of this step are served in the order of their arrival."""
        self.events = 0
        """Events that may have changed the order of calls; a choice of a lane holds while no further one comes."""
        self.turns: Turns = _GuardedTurns(unguarded.turns, self)
        self._failures = failures
        self._keyless: dict[CallId, str] = {}
        """The waiting calls to which the policy gave no usable lane or key, with the hook that failed."""

    @property
    def lane_names(self) -> Mapping[int, str]:
        return self.unguarded.lane_names

    @property
    def keys_change(self) -> bool:
        return self.unguarded.keys_change

    @property
    def protects_progress(self) -> bool:
        return self.unguarded.protects_progress

    @property
    def rank_falls(self) -> bool:
        return self.unguarded.rank_falls

    def begin_step(self) -> Changed:
        """Trusts the policy again. The caller must re-key the returned calls."""
        if not self.failing:
            return policies.NONE_CHANGED
        self.failing = len(self._keyless) > RETRIES
        return tuple(islice(self._keyless, RETRIES))

    def failed(self, hook: str, error: Exception) -> None:
        self.failing = True
        self.events += 1
        self._failures.add(f"{self.name}.{hook}", error)

    def lane(self, item: QueuedRequest) -> int:
        try:
            lane = self.unguarded.lane(item)
            if lane.__class__ is not int:
                raise BadAnswer(f"a lane must be an integer, not {lane!r}")
        except Exception as error:
            self._keyless[item.call.id] = "lane"
            self.failed("lane", error)
            return 0
        if self._keyless:
            self._keyless.pop(item.call.id, None)
        return lane

    def key(self, item: QueuedRequest) -> Key:
        try:
            key = _usable(self.unguarded.key(item))
        except Exception as error:
            self._keyless.setdefault(item.call.id, "key")
            self.failed("key", error)
            return NO_KEY
        return key

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        """The lanes of many calls. The policy is asked for each of them again if one of its answers cannot be used."""
        try:
            lanes = self.unguarded.lanes(items)
            if len(lanes) == len(items) and set(map(type, lanes)) <= {int}:
                return lanes
        except Exception as error:
            self.failed("lane", error)
        return list(map(self.lane, items))

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        """The keys of many calls, as `lanes`."""
        try:
            keys = self.unguarded.keys(items)
            if len(keys) == len(items) and _all_usable(keys):
                return keys
        except Exception as error:
            self.failed("key", error)
        return list(map(self.key, items))

    def rank(self, item: QueuedRequest) -> Key:
        """The position among the running calls; the greatest is preempted first."""
        try:
            return _usable(self.unguarded.rank(item))
        except Exception as error:
            self.failed("rank", error)
            return NO_KEY

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        self.events += 1
        try:
            return _changed(self.unguarded.on_arrival(now, item))
        except Exception as error:
            self.failed("on_arrival", error)
            return policies.NONE_CHANGED

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        return [call_id for item in items for call_id in self.on_arrival(now, item)]

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        self.events += 1
        if self._keyless:
            self._keyless.pop(item.call.id, None)
        try:
            return _changed(self.unguarded.on_start(now, item))
        except Exception as error:
            self.failed("on_start", error)
            return policies.NONE_CHANGED

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        self.events += 1
        try:
            return _changed(self.unguarded.on_tokens(now, computed))
        except Exception as error:
            self.failed("on_tokens", error)
            return policies.NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        self.events += 1
        try:
            return _changed(self.unguarded.on_preemption(now, item))
        except Exception as error:
            self.failed("on_preemption", error)
            return policies.NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        self.events += 1
        if self._keyless:
            self._keyless.pop(call_id, None)
        try:
            return _changed(self.unguarded.on_end(now, call_id))
        except Exception as error:
            self.failed("on_end", error)
            return policies.NONE_CHANGED


class _GuardedTurns:
    """The turns of a guarded policy. A copy tells the policy nothing, because its reader may be in another thread."""

    def __init__(self, unguarded: Turns, policy: GuardedPolicy | None) -> None:
        """`policy` is None in a copy."""
        self._unguarded = unguarded
        self._policy = policy

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        try:
            lane = self._unguarded.next_lane(lanes)
            if lane in lanes:
                return lane
            raise BadAnswer(f"no call waits in lane {lane!r}")
        except Exception as error:
            self._failed("turns.next_lane", error)
            return min(lanes)

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        if self._policy is not None:
            self._policy.events += 1
        try:
            self._unguarded.take(lane, lanes)
        except Exception as error:
            self._failed("turns.take", error)

    def copy(self) -> Turns:
        try:
            return _GuardedTurns(self._unguarded.copy(), None)
        except Exception as error:
            self._failed("turns.copy", error)
            return policy_contract.SingleLane()

    def _failed(self, hook: str, error: Exception) -> None:
        if self._policy is not None:
            self._policy.failed(hook, error)


def _usable(key: Key) -> Key:
    """The key, if it can be compared with every other key. Raises `BadAnswer`."""
    if key.__class__ is tuple:
        for part in key:
            if not (part.__class__ is float or part.__class__ is int) or part != part:
                break
        else:
            return key
    raise BadAnswer(f"a key must be a tuple of numbers, not {key!r}")


def _all_usable(keys: list[Key]) -> bool:
    """Whether each key is a tuple of numbers, none of which is NaN."""
    parts = list(chain.from_iterable(keys)) if set(map(type, keys)) <= {tuple} else [None]
    return set(map(type, parts)) <= {int, float} and not any(map(operator.ne, parts, parts))


def _changed(ids: Iterable[CallId]) -> Changed:
    """The ids, if they can be looked up. Raises `TypeError`."""
    return policies.NONE_CHANGED if ids is policies.NONE_CHANGED else dict.fromkeys(ids)
