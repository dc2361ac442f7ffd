"""How many sequences saturate the pool, and how many may a tenant have that is alone?

The places follow Little's law (`saturation`), as in `workflow_gate`: the pool completes one call in `demand_s` seconds when
its engines batch as much as they may, and a call alone takes `service_s` seconds. Until that is known, the places are those
of the engines' limits.
"""

import math
from collections.abc import Callable

from tidegate_policy.admit import saturation

FIRST_CALLS = 16
"""Answers before the places are measured."""
LEAST_OF_LIMITS = 1 / 16
"""Of the sequences that the engines may have together, at least these are places. The learned number is a mean over the
calls of all tenants, and many calls of one token, or an engine that reports false usage, would else leave the others next
to nothing."""
MOST_OF_LIMITS = 3 / 4
"""Of the same sequences, at most these are places. Where engines batch without a loss the learned number is all that they
can run. Then a flood would leave no place in a batch for the next call of another tenant until an answer ends."""
MEMORY_OF_PLACES = 5 / 9
"""Of the KV memory, for the places together: with their headroom (`tenant_shares.HEADROOM`) tenants have all of it."""
ALONE_OF_LIMITS = 5 / 6
"""Of the same sequences, for a tenant that is alone where another one may come. Limits exceed batches by an eighth
(`engine_table.max_inflight`), so these are 15 of 16 places of each batch."""

LITTLE = 0.5
"""Of its part of full engines: a tenant that has less is owed places. Tenants that flood the pool have about their parts of
it, so what they send is not owed."""


class PoolPlaces:
    """What the calls of one gateway have shown, and those of the others."""

    def __init__(self, limits: Callable[[], float]) -> None:
        """`limits` gives the sequences that the engines may have together."""
        self._limits = limits
        self._means = saturation.Means()
        """Of the calls that were answered."""
        self._expected = saturation.Means()
        """Of the calls that came before those answers, by their predictions."""
        self.told: float | None = None
        """The places that the answers of other gateways have shown."""

    @property
    def is_new(self) -> bool:
        """Too few calls were answered to tell the places."""
        return self._means.count < FIRST_CALLS

    @property
    def places(self) -> float:
        """Sequences that saturate the pool."""
        if self.is_new and self.told is not None:
            return self.told
        limits = self._limits()
        places = _within(limits, self._expected if self.is_new else self._means)
        return limits if places is None else places

    @property
    def shown(self) -> float | None:
        """The places that answers here have shown; None while this gateway is new."""
        return None if self.is_new else _within(self._limits(), self._means)

    def observe(self, place_s: float, demand_s: float) -> None:
        """A call was answered whose sequences take `place_s` seconds together if it is alone in an engine, and which takes
        `demand_s` seconds of the whole pool."""
        self._means.observe(place_s, demand_s)

    def expect(self, place_s: float, demand_s: float) -> None:
        """As `observe`, of a call that has come in. Counts while this gateway is new."""
        self._expected.observe(place_s, demand_s)

    def work_s(self, place_s: float) -> float | None:
        """Seconds of the whole pool for a call with so many seconds of places; None while no call has come."""
        means = self._expected if self.is_new else self._means
        return means.demand_s * place_s / means.alone_s if means.alone_s > 0.0 else None


def alone(limits: float) -> float:
    """Sequences for a tenant that is alone where another one may come, of those that the engines may have together."""
    return limits if math.isinf(limits) else math.ceil(ALONE_OF_LIMITS * limits)


def lacks(has: float, part: float, taken: float, serving: float) -> bool:
    """Whether a tenant has little of its `part` by weight, 0 to 1, of engines that are full: tenants have `taken` places of
    the `serving` that these may have, this one `has` of them."""
    return taken >= MOST_OF_LIMITS * serving and has < LITTLE * part * serving


def tokens_of_place(memory: float, limits: float, places: float | None) -> float:
    """KV tokens of one place, of the `memory` of engines that may have `limits` sequences together. Tenants that compete
    for `places` have `MEMORY_OF_PLACES` of it together; None = a tenant is alone, and has `ALONE_OF_LIMITS` of it."""
    most = limits if places is None else places / MEMORY_OF_PLACES
    return memory / most if memory > 0.0 and 0.0 < most < math.inf else math.inf


def _within(limits: float, means: saturation.Means) -> float | None:
    places = means.places
    if places is None or math.isinf(limits):
        return places
    return min(max(places, limits * LEAST_OF_LIMITS), limits * MOST_OF_LIMITS)
