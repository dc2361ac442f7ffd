"""Pools of unequal engines by name, each engine by its cost profile."""

from collections.abc import Iterable, Sequence

import tidegate_profiles
from tidegate_policy import cost
from tidegate_policy.model import EngineId

POOLS: dict[str, Sequence[str]] = {
    "hetero-1": ("a100-70b-tp8", "a100-70b-tp8", "a6000-70b-tp8", "a6000-70b-tp8"),
    "hetero-2": ("a100-70b-tp8", "a100-70b-tp8", "l40-70b-tp8", "a6000-70b-tp8"),
}
"""HexGen-Text2SQL 5.1: two instances on A100, two more on other cards; a 70B model, tensor parallel over eight cards."""


class UnknownPool(ValueError):
    """A pool that is neither known by name nor a list of profiles; the message lists the names."""


def accuracy(names: Iterable[str]) -> list[str]:
    """What is known of each profile in these pools, a sentence each."""
    profiles = sorted({profile for name in names for profile in POOLS.get(name) or name.split(",")})
    return [
        f"Profile {profile}: {tidegate_profiles.accuracy(tidegate_profiles.find(profile))}." for profile in profiles
    ]


def pool(name: str) -> dict[EngineId, cost.CostModel]:
    """A pool by name, or by its profiles separated by commas. Raises `UnknownPool`."""
    profiles = POOLS.get(name) or name.split(",")
    engines: dict[EngineId, cost.CostModel] = {}
    for number, profile in enumerate(profiles, 1):
        try:
            model = cost.from_mapping(tidegate_profiles.find(profile)["cost"])
        except OSError as error:
            raise UnknownPool(f"cannot read the profile {profile}: {error.strerror}") from error
        except cost.BadProfile as error:
            raise UnknownPool(f"the profile {profile} cannot be used: {error}") from error
        except tidegate_profiles.UnknownProfile as error:
            raise UnknownPool(f"no pool {name!r}; known are {', '.join(POOLS)}, or profiles: {error}") from error
        engines[EngineId(f"{number}-{tidegate_profiles.short(profile)}")] = model
    return engines
