"""What tenants have at a gateway, as gateways tell each other."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_RATE = 1e-3
"""Of the pool's time; who sends less work, and has no calls, is not told of."""
MOST_TOLD = 64
"""Tenants of which a gateway tells the others."""


class TenantLoad(NamedTuple):
    """The calls of one tenant at other gateways."""

    entered: int
    """Places of those in their queues or at engines."""
    waiting: int
    """Places that those want that wait for the share of the tenant."""
    weight: float
    rate: float
    """The part of the pool's time that the work takes that it sent of late."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What gateways tell of all tenants."""

    tenants: Mapping[str, TenantLoad] = field(default_factory=dict)
    places: float | None = None
    """Sequences that saturate the pool, as its answers have shown; None = they have shown nothing yet."""
    parts: Mapping[str, Mapping[str, TenantLoad]] = field(default_factory=dict)
    """The tenants of parts of the pool to which calls are confined. The key of a part is that of its engines."""
    long_prompts: frozenset[str] = frozenset()
    """The tenants with long prompts that engines have still to compute."""


NO_LOAD = PoolLoad()


def merged(loads: Iterable[PoolLoad]) -> PoolLoad:
    """What several gateways tell, as one: the sums of what tenants have and send, and the mean of the places."""
    tenants: dict[str, TenantLoad] = {}
    parts: dict[str, dict[str, TenantLoad]] = {}
    places: list[float] = []
    long_prompts: set[str] = set()
    for load in loads:
        _add(tenants, load.tenants)
        for key, there in load.parts.items():
            _add(parts.setdefault(key, {}), there)
        if load.places is not None:
            places.append(load.places)
        long_prompts |= load.long_prompts
    return PoolLoad(tenants, statistics.fmean(places) if places else None, parts, frozenset(long_prompts))


def _add(sums: dict[str, TenantLoad], loads: Mapping[str, TenantLoad]) -> None:
    """The weight of a tenant is the one that the first gateway tells."""
    for name, more in loads.items():
        known = sums.get(name, TenantLoad(0, 0, more.weight, 0.0))
        sums[name] = TenantLoad(
            known.entered + more.entered, known.waiting + more.waiting, known.weight, known.rate + more.rate
        )
