"""A call whose prompt the gateway takes for much longer than it is: for how long does the error weigh on its engine?"""

import random

import pytest

from tidegate_policy import cost
from tidegate_policy.admit.promises import CallFacts
from tidegate_policy.admit.retries import Failure
from tidegate_policy.dispatch.core_actions import GiveUp, Send
from tidegate_policy.dispatch.engine_table import EngineFacts
from tidegate_policy.gateway_core import CallResult, CoreSettings, GatewayCore
from tidegate_policy.model import NO_BACKLOG, Backlog, CallId, DropReason, EngineId

COST = cost.CostModel(step_s=0.02, prefill_s=1e-4, decode_s=2e-4, context_s=5e-8, max_batch=64)
TRUE_TOKENS, TOO_HIGH = 2000, 10
OUTPUT = 50
CONTEXT = 8192


def core(engines: int = 1) -> GatewayCore:
    made = GatewayCore(CoreSettings(), random.Random(0))
    for index in range(engines):
        made.on_engine(0.0, EngineFacts(id=EngineId(f"e{index}"), cost=COST))
    return made


def sent(made: GatewayCore, name: str, prompt_tokens: int, now: float = 0.0, most: int | None = None) -> Send:
    """A call whose prompt the gateway takes for so many tokens, before it has learned better."""
    facts = CallFacts(
        id=CallId(name), model="m", characters=4 * prompt_tokens, max_tokens=OUTPUT, most_prompt_tokens=most
    )
    draft = made.draft(now, facts)
    assert not isinstance(draft, DropReason)
    (send,) = made.on_arrival(now, made.promise(draft, None))
    assert isinstance(send, Send)
    return send


def owed(made: GatewayCore) -> Backlog:
    total = NO_BACKLOG
    for engine in made.engines:
        total += engine.own
    return total


def test_after_the_first_token_a_prompt_weighs_by_the_context_of_the_tokens_to_come_only() -> None:
    wrong, right = core(), core()
    sent(wrong, "a", TOO_HIGH * TRUE_TOKENS)
    sent(right, "a", TRUE_TOKENS)
    error_tokens = (TOO_HIGH - 1) * TRUE_TOKENS
    assert owed(wrong).work_us - owed(right).work_us >= 1e6 * COST.prefill_s * error_tokens
    for made in (wrong, right):
        made.on_first_token(1.0, CallId("a"))
    left_us = owed(wrong).work_us - owed(right).work_us
    assert left_us <= 1.01e6 * COST.context_s * error_tokens * OUTPUT, "the tokens to come read the context"
    for made in (wrong, right):
        made.on_progress(2.0, CallId("a"), OUTPUT)
        assert owed(made).output_tokens == 0
    assert owed(wrong) == owed(right)


@pytest.mark.parametrize("ok", [True, False])
def test_after_its_end_a_call_weighs_nothing_and_the_next_one_is_taken_for_shorter(ok: bool) -> None:
    made = core()
    first = sent(made, "first", TOO_HIGH * TRUE_TOKENS).call.prompt_tokens
    made.on_end(1.0, CallId("first"), CallResult(ok=ok, prompt_tokens=TRUE_TOKENS, output_tokens=OUTPUT))
    assert owed(made) == NO_BACKLOG
    second = sent(made, "second", TOO_HIGH * TRUE_TOKENS).call.prompt_tokens
    assert second < first if ok else second == first


def test_a_silent_call_weighs_in_full_until_it_is_given_up_and_never_more_than_the_longest_context() -> None:
    made = core(engines=2)
    send = sent(made, "silent", TOO_HIGH * TRUE_TOKENS, most=CONTEXT)
    whole = owed(made)
    longest_s = COST.alone_seconds(CONTEXT, OUTPUT)
    assert whole.work_us / cost.MICROSECONDS <= send.decision.service_s <= longest_s
    for second in range(1, 60):
        made.on_tick(float(second))
        assert owed(made) == whole, "time alone takes nothing away: the watchdog ends a call without tokens"
    (again,) = made.on_attempt_failed(60.0, CallId("silent"), Failure.FAILED)
    assert isinstance(again, Send)
    assert again.decision.engine != send.decision.engine
    assert owed(made) == whole, "it weighs on one engine at a time"
    (end,) = made.on_attempt_failed(120.0, CallId("silent"), Failure.FAILED)
    assert isinstance(end, GiveUp)
    assert owed(made) == NO_BACKLOG
