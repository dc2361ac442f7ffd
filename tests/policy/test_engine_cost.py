"""What the gateway learns of an engine's step costs from streams of a small engine with known costs."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.cost import CostModel, scaled
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict.engine_cost import EngineCost, close

TRUE = CostModel(
    step_s=0.03, prefill_s=4e-4, attention_s=3e-9, decode_s=2e-4, context_s=5e-8, max_batch=64, max_step_tokens=2048
)
REPORT_TOKENS = 16
RATE = 0.2


def call(index: int, prompt: int, sequences: int = 1) -> Call:
    return Call(id=CallId(str(index)), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=1, sequences=sequences)


def serve(estimate: EngineCost, truth: CostModel, calls: int, *, seed: int = 1, streamed: bool = True) -> None:
    """An engine with chunked prefill serves calls that arrive at random; the estimate sees what a gateway sees."""
    rng = random.Random(seed)
    now, arrives_at_s, sent = 0.0, 0.0, 0
    prefilling: list[list[Any]] = []
    decoding: list[list[Any]] = []
    while sent < calls or prefilling or decoding:
        if not prefilling and not decoding:
            now = max(now, arrives_at_s)
        while sent < calls and arrives_at_s <= now:
            arrived = call(sent, rng.choice([300, 1000, 9000]))
            estimate.on_sent(now, arrived, 0, others=0)
            prefilling.append([arrived, 0, rng.choice([5, 40, 300])])
            sent += 1
            arrives_at_s += rng.expovariate(RATE)
        room = truth.max_step_tokens - len(decoding)
        uncached = attended = 0
        context = sum(item[0].prompt_tokens + item[1] for item in decoding)
        ready = []
        for item in prefilling:
            chunk = min(room, item[0].prompt_tokens - item[1])
            attended += sum((item[1] + chunk, -item[1])) * (2 * item[1] + chunk + 1) // 2 if chunk else 0
            item[1] += chunk
            room, uncached = room - chunk, uncached + chunk
            if item[1] == item[0].prompt_tokens:
                ready.append(item)
        step_s = truth.step_seconds(uncached=uncached, attended=attended, decodes=len(decoding), context=context)
        now += step_s * rng.lognormvariate(0, 0.05)
        for item in list(decoding):
            item[1] += 1
            if item[1] >= item[2]:
                decoding.remove(item)
                estimate.on_end(now, item[0].id, item[2], 1.0, streamed=streamed)
            elif streamed and item[1] % REPORT_TOKENS == 0:
                estimate.on_tokens(now, item[0].id, item[1], 1.0)
        for item in ready:
            prefilling.remove(item)
            if streamed:
                estimate.on_tokens(now, item[0].id, 1, 1.0)
            decoding.append([item[0], 1, item[2]])


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("first", [None, TRUE, scaled(TRUE, 3.0), scaled(TRUE, 0.6), replace(TRUE, prefill_s=1e-4)])
def test_an_engine_is_priced_within_a_tenth_after_two_hundred_calls(first: CostModel | None, *, streamed: bool) -> None:
    given_limits = None if first is None else first
    estimate = EngineCost(given_limits)
    serve(estimate, TRUE, 200, streamed=streamed)
    for prompt, output in ((300, 300), (9000, 40), (1000, 200)):
        assert estimate.cost.alone_seconds(prompt, output) == pytest.approx(
            replace(TRUE, max_step_tokens=estimate.cost.max_step_tokens).alone_seconds(prompt, output),
            rel=0.1 if streamed else 0.3,
        )


def test_an_engine_that_becomes_slower_is_priced_anew() -> None:
    estimate = EngineCost(TRUE)
    serve(estimate, TRUE, 100)
    before_s = estimate.cost.alone_seconds(1000, 300)
    serve(estimate, scaled(TRUE, 2.0), 200, seed=2)
    assert estimate.cost.alone_seconds(1000, 300) == pytest.approx(2 * before_s, rel=0.15)


def test_an_exact_estimate_is_kept_so_that_equal_engines_share_one_price() -> None:
    estimate = EngineCost(TRUE)
    assert close(estimate.cost, scaled(TRUE, 1.01), 0.02)
    assert not close(estimate.cost, scaled(TRUE, 1.05), 0.02)
    assert not close(TRUE, replace(TRUE, max_batch=8), 0.5), "the limits of the engine count too"


def test_calls_that_leave_without_an_answer_teach_nothing() -> None:
    estimate = EngineCost(TRUE)
    estimate.on_sent(0.0, call(0, 500), 0, others=0)
    estimate.on_tokens(1.0, CallId("0"), 1, 1.0)
    estimate.forget(CallId("0"))
    assert estimate.on_end(2.0, CallId("0"), 100, 1.0, streamed=True) is False
    assert estimate.learned == 0
    assert estimate.cost == TRUE


@given(
    events=st.lists(
        st.tuples(
            st.integers(1, 10**6),
            st.integers(0, 10**6),
            st.integers(0, 10**5),
            st.integers(1, 4),
            st.floats(0, 1e5),
            st.floats(1, 100),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_coefficients_are_never_negative(events: list[Any]) -> None:
    estimate = EngineCost(None)
    now = 0.0
    for index, (prompt, cached, tokens, sequences, seconds, crowd, streamed) in enumerate(events):
        estimate.on_sent(now, call(index, prompt, sequences), cached, others=round(crowd) - 1)
        estimate.on_tokens(now + seconds / 2, CallId(str(index)), tokens // 2, crowd)
        now += seconds
        estimate.on_end(now, CallId(str(index)), tokens, crowd, streamed=streamed)
    cost = estimate.cost
    assert min(cost.step_s, cost.prefill_s) > 0
    assert min(cost.attention_s, cost.decode_s, cost.context_s) >= 0
