"""The state of the loop as JSON, as the status of a ServingPool keeps it."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tidegate_policy.steer import guards, switch_regret, trial

_SEQUENCES = ("switched_at_s", "alternatives")
MOST_STRIKES = 1_000_000
LARGEST = 1e11
"""No instant and no figure is larger: in seconds, this is the year 5138."""


def written(state: guards.SteerState) -> dict[str, Any]:
    """The state without its empty fields."""
    parts = {name: list(getattr(state, name)) for name in _SEQUENCES}
    memory = {**asdict(state), **parts, "trial": None if state.trial is None else trial.written(state.trial)}
    return {key: value for key, value in memory.items() if value not in (None, {}, [], "")}


def read(kept: Mapping[str, Any]) -> guards.SteerState:
    """The state that `written` wrote, in this version or an earlier one. Raises `KeyError`, `TypeError`, `ValueError` for
    anything else."""
    baseline, held, interrupted = (kept.get(name) for name in ("baseline", "trial", "interrupted"))
    state = guards.SteerState(
        **{
            **kept,
            **{name: tuple(kept.get(name, ())) for name in _SEQUENCES},
            "kind": guards.Kind(kept["kind"]),
            "baseline": None if baseline is None else switch_regret.Baseline(**baseline),
            "trial": None if held is None else trial.read(held),
            "interrupted": None if interrupted is None else _interrupted(interrupted),
        }
    )
    by_policy = (state.strikes, state.banned_until_at_s, state.left_at_s)
    _each_is(Mapping, *by_policy, state.memory)
    _each_is(Mapping, *state.memory.values())
    _each_is(str, state.active, state.reason, state.expected, state.effect, state.before or "", *state.alternatives)
    _each_is(str, *state.memory, *state.strikes, *state.banned_until_at_s, *state.left_at_s)
    instants = [state.since_at_s, state.ends_at_s or 0.0, *state.switched_at_s]
    _are_numbers(*instants, *state.banned_until_at_s.values(), *state.left_at_s.values())
    if state.bypass_ended_at_s is not None:
        _are_numbers(state.bypass_ended_at_s)
    if state.trial is not None:
        _are_numbers(state.trial.seen_at_s, state.trial.unseen_s)
    for each in (state.baseline, None if state.interrupted is None else state.interrupted.baseline):
        if each is not None:
            _are_numbers(*[number for number in asdict(each).values() if number is not None])
    _each_is(int, state.returns, state.bypasses, *state.strikes.values())
    if not (0 <= state.returns <= guards.MAX_RETURNS and 0 <= state.bypasses <= guards.MAX_RETURNS):
        raise ValueError("a count is out of its range")
    if not all(0 <= count <= MOST_STRIKES for count in state.strikes.values()):
        raise ValueError("a count of strikes is out of its range")
    return state


def _interrupted(kept: Mapping[str, Any]) -> guards.Interrupted:
    found = guards.Interrupted(**{**kept, "baseline": switch_regret.Baseline(**kept["baseline"])})
    _each_is(str, found.policy, found.before)
    _are_numbers(found.at_s)
    return found


def _each_is(kind: type, *values: object) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind.__name__}")


def _are_numbers(*values: object) -> None:
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > LARGEST:
            raise ValueError(f"{value!r} is no instant and no figure")
