"""Which places may each of several competing tenants have? A max-min division of the places by weight, with headroom.

The tenants that want the least for their weight come first, and what they leave goes to the others.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tidegate_policy.admit.tenant_record import TenantRecord, by_wants

FLOODING = 2.0
"""A tenant that wants more than so many times its bound floods the pool."""
FLOODS_PART = 0.6
"""Of its max-min share, for a tenant that floods the pool: at the knee batches are deeper than in a quiet pool."""
LIGHT = 1 / 4
"""Of its part of the pool's time, for the work that a light tenant sends."""
MARGIN = 1e-6
"""Of sequences and seconds; errors of rounding are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How places are divided."""

    headroom: float
    """A bound is at least so many times the tenant's part of the places by weight."""
    keeps: float
    """The factor of the headroom of a tenant that sends no more work than its part."""
    least: int
    """Places of each tenant at least."""
    most: float
    """The most that the places can be. The calls of a light tenant take less work than those of which the places are the
    mean, so more of them saturate the pool."""


@dataclass(frozen=True, slots=True)
class Division:
    """Places of each tenant, and the tenants that flood the pool while others do not."""

    bounds: dict[str, float]
    flooding: Collection[str]
    until_s: float
    """From then on the bounds change with time alone; infinite if they do not."""


def standing(sent: float) -> tuple[bool, bool]:
    """Whether a tenant that has `sent` so many times the work of its part keeps to its part, and whether it is light."""
    return sent <= 1.0, 0.0 < sent <= LIGHT


def divide(
    tenants: Mapping[str, TenantRecord],
    names: list[str],
    weight: float,
    places: float,
    rules: Rules,
    sent: Callable[[TenantRecord], float],
    lacks: Callable[[str], bool],
) -> Division:
    """Divides the places among the tenants of these names, which have this `weight` together. `sent` tells how many times
    the work of its part a tenant sent of late. One that `lacks` places of full engines does not flood the pool, whatever
    it wants: its calls are many because they wait. Neither does a light one. Notes in each record whether the tenant keeps
    to its part, whether it is light, and within which wants the bounds of all stay as they are."""
    left, part, each = places, rules.headroom * places / weight, 1 / weight
    until_s = math.inf
    bounds: dict[str, float] = {}
    flooding: dict[str, float] = {}
    level_is_known = False
    for name in by_wants(tenants, names):
        tenant = tenants[name]
        wanted, share = tenant.wanted, left * tenant.weight / weight
        parts = sent(tenant)
        tenant.keeps, tenant.light = standing(parts)
        headroom = part * tenant.weight * (rules.keeps if tenant.keeps else 1.0)
        if tenant.light:
            headroom = max(headroom, rules.headroom * rules.keeps * rules.most * tenant.weight * each)
        bounds[name] = bound = max(share, headroom, rules.least)
        floods = wanted > FLOODING * bound and not ((tenant.light and rules.headroom) or lacks(name))
        if floods:
            flooding[name] = max(FLOODS_PART * share, rules.least)
        if parts > LIGHT:
            most = each * tenant.weight * (LIGHT if tenant.keeps else 1.0)
            until_s = min(until_s, tenant.keeps_at_s(most) - MARGIN)
        if not level_is_known and wanted <= share:
            left, weight = left - wanted, weight - tenant.weight
            continue
        level_is_known = True  # this tenant and all that follow want more than what is left for each unit of weight
        tenant.above, tenant.below = share + MARGIN, math.inf
        if floods:
            tenant.above = max(tenant.above, FLOODING * bound + MARGIN)
        else:
            tenant.below = FLOODING * bound - MARGIN
    if len(flooding) < len(names):
        return Division(bounds | flooding, flooding, until_s)
    return Division(bounds, (), until_s)
