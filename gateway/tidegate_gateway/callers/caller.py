"""A caller whose key or token is known: its tenant binds all that it sends.

All later code reads the tenant of the bound headers, as it does without authentication.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tidegate_gateway.openai import error_table, http_headers

ANY_TENANT = "*"
"""The tenant of a key whose caller names the tenant of each request, such as an authenticating proxy."""
_TENANTS = frozenset(http_headers.ALIASES["tenant"])
_CLASSES = frozenset(http_headers.ALIASES["slo_class"])

Pairs = Iterable[tuple[str, str]]
"""Headers or metadata; the names are in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller."""

    tenant: str
    classes: tuple[str, ...] | None
    """The classes that it may name; None = all. A call that names none is of the first one, and without any of the
    default class."""

    def bound(self, pairs: Pairs) -> list[tuple[str, str]]:
        """The headers with the caller's tenant. Raises `GatewayError` for another tenant, or a class of others."""
        kept = []
        names_class = False
        for pair in pairs:
            name, value = pair
            if name in _CLASSES:
                self.check_class(value, name)
                if not value:
                    continue
                names_class = True
            elif name in _TENANTS and self.tenant != ANY_TENANT:
                if value != self.tenant:
                    raise forbidden(f"{name} is not the tenant of this API key or token; leave it out", param=name)
                continue
            kept.append(pair)
        if self.tenant != ANY_TENANT:
            kept.append((http_headers.ALIASES["tenant"][0], self.tenant))
        if self.classes and not names_class:
            kept.append((http_headers.ALIASES["slo_class"][0], self.classes[0]))
        return kept

    def check_class(self, slo_class: str, param: str) -> None:
        """Raises `GatewayError` if the caller must not name this class."""
        if slo_class and self.classes is not None and slo_class not in self.classes:
            known = ", ".join(sorted(self.classes)) or "none"
            raise forbidden(f"{param} must be a class of this API key or token: {known}", param=param)


def forbidden(message: str, *, param: str | None = None) -> error_table.GatewayError:
    return error_table.GatewayError("forbidden", message, param=param)


def unauthenticated(message: str) -> error_table.GatewayError:
    return error_table.GatewayError("invalid_api_key", message)
