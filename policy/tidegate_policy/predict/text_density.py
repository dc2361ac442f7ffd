"""How many characters has a token? Learned for each tenant and model from the usage that engines report.

What a tenant sends says nothing about the texts of another one, so only its own texts count for it. A tenant that is new to
a model gets the mean over the tenants of the model, with the usual value as one more of them: a tenant that sends odd texts
is one among several, however many calls it makes.
"""

from dataclasses import dataclass

from tidegate_policy.tenant_memory import TenantMemory

USUAL = 4.0
"""Characters of a token of English text."""
LEAST, MOST = 0.5, 8.0
"""Of a token, whatever was seen: an engine may leave out of a prompt what the gateway counts as characters, such as tools,
and a tenant whose long prompts seem short would fill the engines."""
NEWEST_WEIGHT = 0.04
"""Weight of the newest observation once a tenant is known."""
MAX_PAIRS = 4096
"""Pairs of a tenant and a model that are remembered."""


@dataclass(slots=True)
class _Texts:
    """The texts of one tenant for one model."""

    seen: int = 0
    per_token: float = USUAL


@dataclass(slots=True)
class _Model:
    """The tenants of one model together, with the usual value as one of them."""

    count: int = 1
    total: float = USUAL


class TextDensity:
    """Characters per token. All methods take constant time."""

    def __init__(self) -> None:
        self._tenants: TenantMemory[str, _Texts] = TenantMemory(MAX_PAIRS)
        """Of each tenant by model."""
        self._models: dict[str, _Model] = {}

    def characters_per_token(self, tenant: str, model: str) -> float:
        """The tenant's own mean, else that of the tenants of the model."""
        own = self._tenants.get(tenant, model)
        if own is not None:
            return own.per_token
        every = self._models.get(model)
        return USUAL if every is None else every.total / every.count

    def observe(self, tenant: str, model: str, per_token: float) -> None:
        """A prompt of the tenant had so many characters for each token."""
        own, every = self._tenants.get(tenant, model), self._models.setdefault(model, _Model())
        if own is None:
            own = _Texts()
            every.count += 1
            every.total += own.per_token
        own.seen += 1
        change = max(NEWEST_WEIGHT, 1 / (own.seen + 1)) * (min(max(per_token, LEAST), MOST) - own.per_token)
        own.per_token += change
        every.total += change
        gone = self._tenants.put(tenant, model, own)
        if gone is not None:
            _, model, own = gone
            every = self._models[model]
            every.count -= 1
            every.total -= own.per_token
            if every.count == 1:
                del self._models[model]
