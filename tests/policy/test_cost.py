"""Seconds: of steps, of calls, of backlogs."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import cost
from tidegate_policy.model import NO_BACKLOG, Call, CallId

MODEL = cost.CostModel(
    step_s=0.02, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-8, max_batch=8, max_step_tokens=1000
)


def call(prompt: int = 1000, output: int = 100, sequences: int = 1) -> Call:
    return Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=output, sequences=sequences)


def test_a_call_alone_takes_as_long_as_its_steps_one_by_one() -> None:
    prompt, output = 2500, 40
    seconds, seen = 0.0, 0
    while seen < prompt:
        chunk = min(MODEL.max_step_tokens, prompt - seen)
        seconds += MODEL.step_seconds(
            uncached=chunk, attended=chunk * seen + chunk * (chunk + 1) // 2, decodes=0, context=0
        )
        seen += chunk
    for done in range(1, output):
        seconds += MODEL.step_seconds(uncached=0, decodes=1, context=prompt + done)
    assert MODEL.call_seconds(call(prompt, output)) == pytest.approx(seconds)


def test_the_sequences_of_a_call_run_side_by_side() -> None:
    one, four = call(), call(sequences=4)
    assert MODEL.call_seconds(one) < MODEL.call_seconds(four) < 1.1 * MODEL.call_seconds(one)
    charge = MODEL.charge(four)
    assert (charge.calls, charge.output_tokens) == (4, 400)
    decode = MODEL.decode_charge(one, 0)
    assert charge.work_us - MODEL.charge(one).work_us == pytest.approx(3 * decode.work_us, abs=4)
    assert MODEL.decode_charge(four, 200).output_tokens == 200
    assert MODEL.decode_charge(four, 400) == dataclasses.replace(NO_BACKLOG, calls=4)


def test_cached_tokens_cost_no_prefill() -> None:
    assert MODEL.prefill_seconds(1000, 900) < MODEL.prefill_seconds(1000) / 3


def test_a_backlog_is_batched_and_not_added_up() -> None:
    one = MODEL.charge(call())
    eight = sum([one] * 8, NO_BACKLOG)
    serial = 8 * MODEL.call_seconds(call())
    assert MODEL.backlog_seconds(one) == pytest.approx(MODEL.call_seconds(call()), rel=0.02)
    assert MODEL.backlog_seconds(eight) < 0.5 * serial


def test_an_empty_backlog_takes_no_time() -> None:
    assert MODEL.backlog_seconds(NO_BACKLOG) == 0.0


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(1, 4000)), max_size=40))
def test_a_backlog_returns_to_exactly_zero(sizes: list[tuple[int, int]]) -> None:
    charges = [MODEL.charge(call(prompt, output)) for prompt, output in sizes]
    total = sum(charges, NO_BACKLOG)
    for charge in reversed(charges):
        total -= charge
    assert total == NO_BACKLOG
    assert not total


@given(st.integers(1, 20_000), st.integers(1, 2000), st.integers(0, 2500))
def test_what_is_left_of_a_charge_only_shrinks(prompt: int, output: int, done: int) -> None:
    before, after = MODEL.decode_charge(call(prompt, output), done), MODEL.decode_charge(call(prompt, output), done + 1)
    assert after.output_tokens <= before.output_tokens
    assert 0 <= after.work_us <= before.work_us


def test_twice_as_slow_takes_twice_as_long() -> None:
    assert cost.scaled(MODEL, 2.0).call_seconds(call()) == pytest.approx(2 * MODEL.call_seconds(call()))


def test_a_profile_round_trips() -> None:
    assert cost.from_mapping(dataclasses.asdict(MODEL)) == MODEL


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        pytest.param("step_s", -1, "step_s must be a finite number", id="negative"),
        pytest.param("prefill_s", float("nan"), "prefill_s must be a finite number", id="nan"),
        pytest.param("prefill_s", 0, "prefill_s is required", id="zero"),
        pytest.param("prefill_s", 1e300, "at most 1e\\+12, not 1e\\+300", id="products are not finite"),
        pytest.param("kv_tokens", 1 << 99_999, "not one with thousands of digits", id="long"),
        pytest.param("decode_s", "fast", "decode_s must be a finite number", id="text"),
        pytest.param("max_batch", 0, "max_batch must be at least 1", id="empty batch"),
        pytest.param("speed", 1, "unknown field 'speed'", id="unknown"),
    ],
)
def test_a_bad_profile_names_the_field(field: str, value: object, sentence: str) -> None:
    with pytest.raises(cost.BadProfile, match=sentence):
        cost.from_mapping({**dataclasses.asdict(MODEL), field: value})
