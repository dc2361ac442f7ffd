"""The fit of a cost model to timings of an engine whose coefficients are known."""

import random

import pytest

from tidegate_policy.cost import CostModel
from tidegate_policy.predict import cost_fit
from tidegate_policy.predict.cost_fit import Timing

TRUE = CostModel(step_s=0.01, prefill_s=5e-5, attention_s=2e-9, decode_s=2e-4, context_s=1e-7, kv_tokens=5000)


def timing(rng: random.Random, noise: float, **work: int) -> Timing:
    requests = work.pop("requests", 0)
    steps = work.pop("steps", 1)
    seconds = TRUE.step_seconds(**{"uncached": 0, "decodes": 0, "context": 0, **work})  # type: ignore[arg-type]
    seconds += (steps - 1) * TRUE.step_s + 0.003 * requests
    return Timing(seconds=seconds * rng.lognormvariate(0, noise), steps=steps, requests=requests, **work)


def timings(noise: float) -> list[Timing]:
    rng = random.Random(4)
    prefills = [
        timing(rng, noise, uncached=n, attended=n * (n + 1) // 2, requests=1, steps=-(-n // 2048))
        for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    ]
    decodes = [
        timing(rng, noise, decodes=batch, context=batch * context)
        for batch in (1, 4, 16, 64)
        for context in (64, 512, 2048)
    ]
    every = prefills + decodes
    rng.shuffle(every)
    return every


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.001), (0.03, 0.06)])
def test_the_fit_predicts_timings_that_it_has_not_seen(noise: float, within: float) -> None:
    fitted = cost_fit.fit(timings(noise), TRUE)
    assert fitted.mean_error < within
    assert fitted.p95_error < 2.5 * within
    assert fitted.cost.step_s == pytest.approx(TRUE.step_s, rel=0.01 + 5 * noise)
    assert fitted.cost.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.01 + 5 * noise)
    assert fitted.cost.kv_tokens == 5000


def test_no_coefficient_is_negative() -> None:
    rng = random.Random(9)
    odd = [
        Timing(seconds=rng.uniform(0.01, 1), uncached=rng.randrange(1000), decodes=rng.randrange(9), requests=1)
        for _ in range(30)
    ]
    fitted = cost_fit.fit(odd, TRUE)
    cost = fitted.cost
    assert min(cost.step_s, cost.prefill_s, cost.attention_s, cost.decode_s, cost.context_s, fitted.request_s) >= 0


def test_too_few_timings_are_no_fit() -> None:
    with pytest.raises(cost_fit.TooFewTimings, match="at least 9"):
        cost_fit.fit(timings(0.0)[:8], TRUE)
