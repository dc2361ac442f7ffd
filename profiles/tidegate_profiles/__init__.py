"""Cost profiles as data: one YAML file for each (model, accelerator, tensor-parallel degree).

Each file states its source, how it was derived and how it grows with the batch; `cost` holds the fields of
`tidegate_policy.cost.CostModel`. Shells read a profile here and hand its `cost` to `cost.from_mapping`, which checks it.
A profile that was fitted to measurements has `fit`, the errors on timings that were not fitted (`accuracy`). A profile of
which timings determine some coefficients names them in `timed`; the others are those of the card (`roofline`).
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tidegate_profiles import plain_yaml

FIELDS = ("model", "accelerator", "tensor_parallel", "source", "derivation", "fit", "timed", "facts", "cost")
"""The fields of a profile. Only `cost` is required."""
SUFFIXES = (".yaml", ".yml")
"""The endings of a file that holds a profile."""
SHORT_NAMES = {"a100": "a100-70b-tp8", "a6000": "a6000-70b-tp8", "l40": "l40-70b-tp8"}
"""Short names of shipped profiles on a command line."""
MOST_CHARACTERS = 16_384
"""Of the text of a profile: several times the longest that is shipped."""


class UnknownProfile(ValueError):
    """A profile that is not shipped, or a text that is not one; the message says what to do."""


def names() -> list[str]:
    """The shipped profiles."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load(name: str) -> dict[str, Any]:
    """A shipped profile. Raises `UnknownProfile` listing those that exist."""
    if name not in names():
        raise UnknownProfile(f"unknown profile {name!r}; shipped are {', '.join(names())}")
    return parse(resources.files(__name__).joinpath(f"{name}.yaml").read_text(), name)


def read(path: Path) -> dict[str, Any]:
    """A profile from a file. Raises `UnknownProfile`, or `OSError`."""
    return parse(path.read_text(), str(path))


def find(name: str) -> dict[str, Any]:
    """A profile from the file `name` if it ends in .yaml or .yml, else the shipped profile of that name. Raises
    `UnknownProfile`, or `OSError`."""
    path = Path(name)
    if path.suffix in SUFFIXES:
        return read(path)
    if name not in names() and path.is_file():
        raise UnknownProfile(f"the file {name} must end in .yaml or .yml to be a profile")
    return load(name)


def short(name: str) -> str:
    """The name of a profile that is shipped or comes from a file, without folder and ending."""
    path = Path(name)
    return path.stem if path.suffix in SUFFIXES else path.name


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


def parse(text: str, origin: str) -> dict[str, Any]:
    """The profile in `text`, which may come from anybody: neither its size nor its form can make this slow. Raises
    `UnknownProfile`, whose message begins with `origin`."""
    if len(text) > MOST_CHARACTERS:
        raise UnknownProfile(f"profile {origin} is longer than {MOST_CHARACTERS} characters")
    try:
        profile = plain_yaml.load(text)
    except plain_yaml.NotPlain as error:
        cause = f": {' '.join(str(error.__cause__).split())}" if error.__cause__ else ""
        raise UnknownProfile(f"profile {origin} {error}{cause}") from error
    if not isinstance(profile, dict) or not isinstance(profile.get("cost"), dict):
        raise UnknownProfile(f"profile {origin} has no mapping 'cost'")
    if not all(isinstance(key, str) for key in (*profile, *profile["cost"])):
        raise UnknownProfile(f"profile {origin} has a name that is no text")
    return profile
