"""An engine without a profile that restarts beside engines whose costs the gateway has learned."""

import collections
import random
from typing import Any

import pytest

from tidegate_policy import cost
from tidegate_policy.admit.promises import CallFacts
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.dispatch.engine_table import EngineFacts
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.gateway_core import CallResult, CoreSettings, GatewayCore
from tidegate_policy.model import Call, CallId, DropReason, EngineId
from tidegate_policy.predict import engine_cost

ENGINES, STREAMS = 4, 60
PARTS = 1.5
"""The restarted engine may draw so many times its part of the streams."""
TOKENS = 200
"""Of each answer from which the gateway learns."""


def promised(made: GatewayCore, now: float, name: str, *, characters: int, max_tokens: int) -> Call:
    facts = CallFacts(id=CallId(name), model="m", characters=characters, max_tokens=max_tokens)
    draft = made.draft(now, facts)
    assert not isinstance(draft, DropReason)
    return made.promise(draft, None)


def learned(rule: str, truth: cost.CostModel) -> tuple[GatewayCore, float]:
    """A core whose engines have no profile, and each answered calls as `truth` says; and the time after that."""
    made = GatewayCore(CoreSettings(dispatch=DispatchSettings(rule=rule)), random.Random(0))
    now, engines = 0.0, [EngineId(f"e{index}") for index in range(ENGINES)]
    for engine in engines:
        made.on_engine(now, EngineFacts(id=engine, cost=None))
    for index in range(12 * ENGINES):
        prompt, name = (200, 2000, 4000)[index // ENGINES % 3], f"learned {index}"
        call = promised(made, now, name, characters=4 * prompt, max_tokens=TOKENS)
        made.on_arrival(now, call, frozenset({engines[index % ENGINES]}))
        first_at_s = now + truth.prefill_seconds(prompt)
        made.on_first_token(first_at_s, call.id)
        now = first_at_s + (TOKENS - 1) * truth.step_s
        made.on_end(now, call.id, CallResult(ok=True, prompt_tokens=prompt, output_tokens=TOKENS))
    for engine in made.engines:
        assert engine.cost.step_s == pytest.approx(truth.step_s, rel=0.05)
    return made, now


@pytest.mark.parametrize("rule", ["least-delay", "score", "earliest-finish"])
@pytest.mark.parametrize("slower", [0.2, 1.0, 2.0, 5.0])
def test_a_restarted_engine_without_a_profile_draws_at_most_its_part(slower: float, rule: str, figure: Any) -> None:
    """`slower`: the seconds of the engines over those of `STARTING`."""
    made, now = learned(rule, cost.scaled(engine_cost.STARTING, slower))
    made.on_engine_gone(now, EngineId("e1"))
    made.on_engine(now + 10, EngineFacts(id=EngineId("e1"), cost=None))
    drawn: collections.Counter[str] = collections.Counter()
    for index in range(STREAMS):
        call = promised(made, now + 20, f"stream {index}", characters=2000, max_tokens=2000)
        for action in made.on_arrival(now + 20, call):
            assert isinstance(action, Send)
            drawn[action.decision.engine] += 1
    assert drawn.total() == STREAMS
    most = PARTS * STREAMS / ENGINES
    figure(
        f"{rule}, engines {slower:g} times as slow as a first guess: of {STREAMS} streams, a restarted one draws",
        str(drawn["e1"]),
        goal=f"at most {most:.0f}",
        met=drawn["e1"] <= most,
    )
    assert drawn["e1"] <= most
