"""The profiles with which a gateway starts, right or wrong, for benchmarks of what it learns."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId

Beliefs = Literal["exact", "equal", "none", "wrong-20", "wrong-40"]
COEFFICIENTS = ("step_s", "prefill_s", "attention_s", "decode_s", "context_s")


def of(beliefs: Beliefs, pool: Mapping[EngineId, CostModel], seed: int) -> dict[EngineId, CostModel | None]:
    """The profile of each engine. `equal`: all have the profile of the first engine. `none`: there is none. `wrong-40`:
    each coefficient of each engine is 40% too small or too large, at random."""
    if beliefs == "exact":
        return dict(pool)
    if beliefs == "none":
        return dict.fromkeys(pool)
    if beliefs == "equal":
        return dict.fromkeys(pool, next(iter(pool.values())))
    error = int(beliefs.removeprefix("wrong-")) / 100
    rng = random.Random(f"{beliefs} {seed}")
    return {
        name: replace(
            model,
            **{field: getattr(model, field) * rng.choice((1 - error, 1 + error)) for field in COEFFICIENTS},
        )
        for name, model in pool.items()
    }
