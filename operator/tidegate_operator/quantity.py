"""Quantities of Kubernetes: 1000m and 1 are equal, and so are 1024Mi and 1Gi. The API server rewrites them."""

from collections.abc import Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any

_FACTORS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_LONGEST, _MOST_POWER = 64, 30
"""Characters of a quantity, and its power of ten. Kubernetes itself counts none above 2^63 - 1 and below 1n."""
_OBJECTS = ("limits", "requests")
"""Names of the objects whose values are quantities."""
_FIELDS = ("sizeLimit",)
"""Names of the fields that are quantities."""


def number(value: object) -> Decimal | None:
    """The value of a quantity; None for anything else, also for a number that no machine has: one such as 1e999999 takes
    seconds to write."""
    text = str(value)
    if len(text) > _LONGEST:
        return None
    suffix = next((known for known in (text[-2:], text[-1:]) if known in _FACTORS), "")
    try:
        found = Decimal(text.removesuffix(suffix)) * _FACTORS.get(suffix, 1)
    except DecimalException:
        return None
    return found if found.is_finite() and abs(found.adjusted()) <= _MOST_POWER else None


def text(amount: Decimal) -> str:
    """A quantity as people write it."""
    for suffix in ("Ti", "Gi", "Mi"):
        if amount and not amount % (factor := _FACTORS[suffix]):
            return f"{amount / factor:f}{suffix}"
    return f"{amount.normalize():f}"


def normalised(body: Any, *, within: bool = False) -> Any:
    """A copy of a piece of an object in which equal quantities are equal strings. `within` tells that its fields are
    quantities."""
    if isinstance(body, (str, int)):  # most values; the checks below are slower
        return body
    if isinstance(body, Mapping):
        return {
            key: _normal(value) if within or key in _FIELDS else normalised(value, within=key in _OBJECTS)
            for key, value in body.items()
        }
    if isinstance(body, Sequence):
        return [normalised(item) for item in body]
    return body


def _normal(value: Any) -> Any:
    found = number(value)
    return value if found is None else f"{found.normalize():f}"
