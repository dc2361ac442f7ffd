"""The text of a cost profile, as `tidegate profile` writes it."""

from collections.abc import Mapping
from typing import Any

import yaml

DIGITS = 4
"""Significant digits of a coefficient."""


def text(
    opening: Mapping[str, Any],
    coefficients: Mapping[str, float],
    *,
    kv_tokens: int,
    max_batch: int,
    max_step_tokens: int,
) -> str:
    """The profile as YAML: what it says of itself, and then its `cost`."""
    cost: dict[str, float] = {name: float(f"{value:.{DIGITS}g}") for name, value in coefficients.items()}
    cost |= {"kv_tokens": kv_tokens, "max_batch": max_batch, "max_step_tokens": max_step_tokens}
    return str(yaml.safe_dump({**opening, "cost": cost}, sort_keys=False, width=120))
