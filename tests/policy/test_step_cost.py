"""The online estimate of an engine's cost model, on made-up step times of engines that differ from their profile."""

import random
from dataclasses import replace

import pytest

from tidegate_policy.cost import CostModel, scaled
from tidegate_policy.predict.step_cost import StepCost, StepWork

TRUE = CostModel(step_s=0.02, prefill_s=8e-5, attention_s=2e-9, decode_s=1e-4, context_s=1e-7)


def works(rng: random.Random) -> StepWork:
    """A step of a busy engine."""
    decodes = rng.randrange(0, 64)
    uncached = rng.choice([0, 0, rng.randrange(1, 2048)])
    return StepWork(
        uncached=uncached,
        attended=uncached * rng.randrange(1, 2000),
        decodes=decodes,
        context=decodes * rng.randrange(100, 2000),
    )


def seconds(model: CostModel, work: StepWork) -> float:
    return model.step_seconds(
        uncached=work.uncached, attended=work.attended, decodes=work.decodes, context=work.context
    )


def error(estimate: StepCost, rng: random.Random) -> float:
    """Mean relative error of the present model on fresh steps."""
    fresh = [works(rng) for _ in range(500)]
    return sum(abs(seconds(estimate.model, w) - seconds(TRUE, w)) / seconds(TRUE, w) for w in fresh) / 500


@pytest.mark.parametrize(
    "first",
    [
        scaled(TRUE, 1.4),
        scaled(TRUE, 0.6),
        replace(TRUE, decode_s=0.0, context_s=0.0),
        CostModel(step_s=0.02, prefill_s=1e-4),
    ],
)
def test_a_wrong_profile_is_corrected_within_a_few_hundred_noisy_steps(first: CostModel) -> None:
    rng = random.Random(1)
    estimate = StepCost(first)
    before = error(estimate, rng)
    for _ in range(600):
        work = works(rng)
        estimate.observe(work, seconds(TRUE, work) * rng.lognormvariate(0, 0.05))
    assert error(estimate, rng) < min(0.03, before)
    assert estimate.mean_error < 0.12


def test_outliers_are_not_learned_but_a_change_that_lasts_is() -> None:
    rng = random.Random(2)
    estimate = StepCost(TRUE)
    for number in range(600):
        work = works(rng)
        pause_s = 3.0 if number % 40 == 0 and number > 100 else 0.0
        estimate.observe(work, seconds(TRUE, work) * rng.lognormvariate(0, 0.05) + pause_s)
    assert error(estimate, rng) < 0.05
    slower = scaled(TRUE, 3.0)
    for _ in range(1500):
        work = works(rng)
        estimate.observe(work, seconds(slower, work) * rng.lognormvariate(0, 0.05))
    fresh = works(rng)
    assert seconds(estimate.model, fresh) == pytest.approx(seconds(slower, fresh), rel=0.1)


def test_no_coefficient_becomes_negative_and_none_explodes() -> None:
    """Step times without any relation to the work, then thousands of equal steps."""
    rng = random.Random(3)
    estimate = StepCost(TRUE)
    for _ in range(1000):
        estimate.observe(works(rng), rng.uniform(1e-4, 0.5))
    for _ in range(5000):
        estimate.observe(StepWork(decodes=3, context=900), 0.021)
    model = estimate.model
    assert min(model.step_s, model.prefill_s, model.attention_s, model.decode_s, model.context_s) >= 0.0
    assert seconds(model, StepWork(decodes=3, context=900)) == pytest.approx(0.021, rel=0.02)
    assert seconds(model, StepWork(uncached=2000, attended=2_000_000)) < 100.0


def test_steps_without_duration_are_ignored() -> None:
    estimate = StepCost(TRUE)
    estimate.observe(StepWork(uncached=5), 0.0)
    assert (estimate.steps, estimate.model) == (0, TRUE)
