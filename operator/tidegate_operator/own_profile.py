"""A cost profile that is not shipped: the text that somebody wrote, checked, and in the form in which engines read it."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

import tidegate_profiles
from tidegate_policy import cost

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class Unusable(ValueError):
    """The text is no profile; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProfile:
    name: str
    text: str
    """YAML. `parse` makes the same profile of it."""
    cost: cost.CostModel
    coefficients: str
    """The cost as the text gives it, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProfiles:
    """Those of a pool (`pool_profiles`), by node pool."""

    usable: Mapping[str, OwnProfile] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Why a node pool has none that can be used."""


@functools.lru_cache(maxsize=256)
def parse(text: str, name: str) -> OwnProfile:
    """The profile `name` in `text`. Raises `Unusable`."""
    try:
        profile = tidegate_profiles.parse(text, name)
        if unknown := sorted(set(profile) - set(tidegate_profiles.FIELDS)):
            raise Unusable(
                f"profile {name} has the unknown field {unknown[0][:40]!r}; known are {', '.join(tidegate_profiles.FIELDS)}"
            )
        model = cost.from_mapping(profile["cost"])
    except cost.BadProfile as error:
        raise Unusable(f"profile {name}: {error}") from error
    except tidegate_profiles.UnknownProfile as error:
        raise Unusable(str(error)) from error
    return OwnProfile(
        name=name,
        text=str(yaml.dump(_read(profile), Dumper=_DUMPER, sort_keys=False)),
        cost=model,
        coefficients=json.dumps(profile["cost"], sort_keys=True),
    )


def _read(profile: Mapping[str, Any]) -> dict[str, Any]:
    """What engines read of a profile or report."""
    kept: dict[str, Any] = {"cost": profile["cost"]}
    if isinstance(profile.get("source"), str):
        kept["source"] = profile["source"]
    if isinstance(profile.get("fit"), Mapping):
        kept["fit"] = {key: value for key, value in profile["fit"].items() if isinstance(key, str) and _is_plain(value)}
    return kept


def _is_plain(value: object) -> bool:
    """Whether a value is a text, or a number that can be written."""
    return isinstance(value, str) or (isinstance(value, int | float) and -cost.LARGEST <= value <= cost.LARGEST)
