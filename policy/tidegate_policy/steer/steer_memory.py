"""The state of the loop as JSON, as the status of a ServingPool keeps it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tidegate_policy.steer import guards, switch_regret

_SEQUENCES = ("switched_at_s", "alternatives")


def written(state: guards.SteerState) -> dict[str, Any]:
    """The state without its empty fields."""
    memory = {**asdict(state), **{name: list(getattr(state, name)) for name in _SEQUENCES}}
    return {key: value for key, value in memory.items() if value not in (None, {}, [], "")}


def read(kept: Mapping[str, Any]) -> guards.SteerState:
    """The state that `written` wrote, in this version or an earlier one. Raises `KeyError`, `TypeError`, `ValueError`."""
    baseline = kept.get("baseline")
    return guards.SteerState(
        **{
            **kept,
            **{name: tuple(kept.get(name, ())) for name in _SEQUENCES},
            "kind": guards.Kind(kept["kind"]),
            "baseline": None if baseline is None else switch_regret.Baseline(**baseline),
        }
    )
