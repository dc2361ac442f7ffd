"""Cost profiles as data: one YAML file for each (model, accelerator, tensor-parallel degree).

Each file states its source, how it was derived and how it grows with the batch; `cost` holds the fields of
`tidegate_policy.cost.CostModel`. Shells read a profile here and hand its `cost` to `cost.from_mapping`, which checks it.
A profile that was fitted to measurements has `fit`, the errors on timings that were not fitted (`accuracy`).
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml


class UnknownProfile(ValueError):
    """A profile that is not shipped, or a file that is not one; the message says what to do."""


def names() -> list[str]:
    """The shipped profiles."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load(name: str) -> dict[str, Any]:
    """A shipped profile. Raises `UnknownProfile` listing those that exist."""
    if name not in names():
        raise UnknownProfile(f"unknown profile {name!r}; shipped are {', '.join(names())}")
    return _parsed(resources.files(__name__).joinpath(f"{name}.yaml").read_text(), name)


def read(path: Path) -> dict[str, Any]:
    """A profile from a file. Raises `UnknownProfile`, or `OSError`."""
    return _parsed(path.read_text(), str(path))


def accuracy(profile: Mapping[str, Any]) -> str:
    """How well a profile is known, in one clause: the errors of its fit, or that nobody measured it."""
    try:
        fit = profile["fit"]
        mean, p95, timings = float(fit["mean_error"]), float(fit["p95_error"]), int(fit["held_out_timings"])
    except (TypeError, KeyError, ValueError):
        return "nobody measured this profile, so its error is unknown (tidegate profile measures one)"
    figure = f" of the {fit['of']}" if "of" in fit else ""
    left_out = f"on {timings} timings left out of the fit"
    return f"measured, with a mean error{figure} of {mean:.1%} (95th percentile {p95:.1%}) {left_out}"


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        profile = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UnknownProfile(f"profile {origin} is not YAML: {error}") from error
    if not isinstance(profile, dict) or not isinstance(profile.get("cost"), dict):
        raise UnknownProfile(f"profile {origin} has no mapping 'cost'")
    return profile
