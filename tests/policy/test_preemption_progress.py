"""A call without progress since its last preemption is preempted again only if every running call is one, in any history.

Progress is an output token. An engine preempts while a running call lacks memory, and takes the first of the core's
victims. The core lists the calls without progress behind all others (`EngineSnapshot.victims`), so this bound is exact:
with another call to take, no call is preempted twice without progress. It does not hold under `priority`, which is vLLM's
own priority schedule, nor under `fcfs`, which is vLLM's own schedule: there the call that started last yields.

The histories run on the fast model of vLLM's scheduler, which drives the same engine core as production.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import session_hold
from tidegate_policy.model import CallId
from tidegate_sim import fast_plugin
from tidegate_sim.fast_scheduler import FastRequest

NAMES = sorted(name for name in policies.POLICIES if name != "fcfs" and policies.create(name).protects_progress)
LIMITS = CostModel(step_s=0.02, prefill_s=0.05, decode_s=1e-4, kv_tokens=500, max_batch=12, max_step_tokens=48)
"""Memory is short, so steps preempt. A long prompt takes several steps. Prompts are dear, so it pays to hold a context."""
MOST_STEPS = 20_000

CALLS = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 150),
        "output": st.integers(1, 120),
        "tg.out_pred": st.integers(1, 200),
        "tg.tenant": st.sampled_from(["a", "b", "c"]),
        "tg.urgency": st.integers(0, 4),
        "tg.budget_ms": st.integers(1, 20_000),
        "tg.relquery": st.sampled_from(["", "g", "h"]),
        "tg.session": st.sampled_from(["", "s", "t"]),
        "tg.tool": st.sampled_from(["", "tool"]),
        "tg.tool_ms": st.integers(1, 5000),
    }
)
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.lists(CALLS, min_size=1, max_size=8)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 1000)),
    st.tuples(st.just("switch"), st.sampled_from(NAMES)),
)
HISTORIES = st.lists(EVENTS, min_size=5, max_size=40)
SETTINGS = settings(max_examples=10, suppress_health_check=list(HealthCheck))


class Watched(fast_plugin.FastPlugin):
    """An engine that keeps a count of the preemptions, and the calls that were preempted against the rule."""

    def __init__(self, policy: str, victim: Callable[["Watched"], FastRequest] | None = None) -> None:
        """`victim` replaces the engine's choice of the call that yields."""
        self.now = 0.0
        super().__init__(LIMITS, policy=policy, clock=lambda: self.now, hold=session_hold.Settings())
        self.choice = victim
        self.preempted_at: dict[str, int] = {}
        """Output tokens of each call at its last preemption."""
        self.count = 0
        self.broken: list[str] = []

    def progressed(self, request: FastRequest) -> bool:
        return request.output > self.preempted_at.get(request.id, -1)

    def _victim(self) -> FastRequest:
        found = super()._victim() if self.choice is None else self.choice(self)
        if not self.progressed(found) and any(map(self.progressed, self.running)):
            self.broken.append(found.id)
        self.preempted_at[found.id] = found.output
        self.count += 1
        return found

    def step(self) -> None:
        step = self.schedule()
        self.now += step.seconds(LIMITS)
        self.finish(step)


def play(engine: Watched, history: list[tuple[str, Any]]) -> None:
    """The history, and then steps until all calls have ended."""
    for number, (event, argument) in enumerate(history):
        if event == "arrive":
            for place, fields in enumerate(argument):
                sent = {key: value for key, value in fields.items() if key.startswith("tg.") and value != ""}
                engine.arrive(engine.request(f"c{number}-{place}", fields["prompt"], fields["output"]), sent)
        elif event == "step":
            for _ in range(argument):
                engine.step()
        elif event == "abort" and engine.requests:
            engine.abort(sorted(engine.requests)[argument % len(engine.requests)])
        elif event == "switch":
            engine.set_policy(argument, "a test", {})
    for _ in range(MOST_STEPS):
        if not engine.requests:
            return
        engine.step()
    raise AssertionError(f"{len(engine.requests)} calls never ended")


@pytest.mark.parametrize("name", NAMES)
def test_no_call_is_preempted_twice_without_progress_while_another_can_yield(name: str) -> None:
    @SETTINGS
    @given(HISTORIES)
    def holds(history: list[tuple[str, Any]]) -> None:
        engine = Watched(name)
        play(engine, history)
        assert not engine.broken

    holds()


CROWD = [("arrive", [{"prompt": 20, "output": 110, "tg.out_pred": 5 + 20 * number} for number in range(12)])] * 2
"""More calls than memory, of one size: they grow together."""


@pytest.mark.parametrize("name", NAMES)
def test_the_histories_preempt(name: str) -> None:
    engine = Watched(name)
    play(engine, CROWD)
    assert engine.count >= 10
    assert not engine.broken


# Proof that the rule can fail.


def newest(engine: Watched) -> FastRequest:
    """vLLM's own choice, which does not look at progress."""
    return engine.running[-1]


def greatest_rank(engine: Watched) -> FastRequest:
    """The reverse of the order without the protection of calls that made no progress."""
    found = {known.call.id: known for known in engine.core.snapshot(engine.now).running}
    left = engine.core.snapshot(engine.now).left
    return max(engine.running, key=lambda request: engine.core.policy.rank(left(found[CallId(request.id)])))


def without_progress(engine: Watched) -> FastRequest:
    """The worst choice: calls that made no progress yield first."""
    return min(engine.running, key=engine.progressed)


@pytest.mark.parametrize("victim", [newest, greatest_rank, without_progress])
def test_a_broken_choice_of_victims_is_found(victim: Callable[[Watched], FastRequest]) -> None:
    @settings(SETTINGS, max_examples=100, database=None, derandomize=True, phases=[Phase.generate])
    @given(HISTORIES)
    def holds(history: list[tuple[str, Any]]) -> None:
        engine = Watched("sjf", victim)
        play(engine, history)
        assert not engine.broken

    with pytest.raises(AssertionError):
        holds()
