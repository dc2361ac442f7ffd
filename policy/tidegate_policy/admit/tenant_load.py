"""What tenants have at a gateway, as gateways tell each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class TenantLoad(NamedTuple):
    """The calls of one tenant at other gateways."""

    entered: int
    """Sequences in their queues or at engines."""
    waiting: int
    """Calls that wait for the share of the tenant."""
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


NO_LOAD = PoolLoad()
