"""The arithmetic of the learned coefficients stays sound whatever times it is told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.cost import CostModel
from tidegate_policy.predict import coefficients

FIRST = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=2e-4)
TRUE = CostModel(step_s=0.03, prefill_s=2e-4, decode_s=1e-4)
quantity = st.floats(0.0, 1e14)
times = st.tuples(
    st.tuples(st.floats(1.0, 1e6), quantity, quantity, quantity, quantity),
    st.floats(1e-6, 1e4),
    st.floats(0.0, 1e6),
)


def estimate() -> coefficients.Coefficients:
    return coefficients.Coefficients(FIRST, doubt=3.0, forgetting=0.995, trusting=32)


@given(told=st.lists(times, max_size=60))
def test_any_times_leave_finite_costs_from_which_the_true_ones_are_learned(
    told: list[tuple[coefficients.Terms, float, float]],
) -> None:
    costs = estimate()
    for terms, seconds, noise_s in told:
        costs.observe(terms, seconds, noise_s, 0.04)
        model = costs.model()
        values = (model.step_s, model.prefill_s, model.attention_s, model.decode_s, model.context_s)
        assert all(0.0 <= value < math.inf for value in values)
        assert costs.largest <= coefficients.MOST_S
    for step in range(400):
        steps, prompt, decodes = 5.0 + step % 40, 100.0 * (step % 30), (5.0 + step % 40) * (1 + step % 7)
        terms = (steps, prompt, prompt * prompt / 2, decodes, 300.0 * decodes)
        costs.observe(terms, steps * TRUE.step_s + prompt * TRUE.prefill_s + decodes * TRUE.decode_s, 0.01, 0.04)
    model = costs.model()
    found = model.step_seconds(uncached=1000, attended=500_000, decodes=8, context=2400)
    true = TRUE.step_seconds(uncached=1000, attended=500_000, decodes=8, context=2400)
    assert found == pytest.approx(true, rel=0.5)


def test_a_prompt_beyond_any_context_teaches_nothing() -> None:
    costs, tokens = estimate(), 2_000_000.0
    for _ in range(200):
        assert not costs.observe((250.0, tokens, tokens * tokens / 2, 0.0, 0.0), 0.02, 60.0, 0.04)
    assert costs.model() == estimate().model()
