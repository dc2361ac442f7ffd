"""What a tenant has at a gateway, as gateways tell each other."""

from typing import NamedTuple


class TenantLoad(NamedTuple):
    """The calls of one tenant at other gateways."""

    entered: int
    """Sequences in their queues or at engines."""
    waiting: int
    """Calls that wait for the share of the tenant."""
    weight: float
