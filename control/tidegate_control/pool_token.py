"""The token that the parts of one pool show each other: gateways and operator to engines, the operator to gateways.

Every part reads it from its environment, because arguments are visible to all processes of a machine. Clients send it as
gRPC metadata or as an HTTP header of the same form.
"""

import hmac
from collections.abc import Iterable, Mapping

VARIABLE = "TIDEGATE_POOL_TOKEN"
HEADER = "authorization"
"""In lower case, as gRPC metadata requires."""
SHORTEST = 16
"""Characters of a token at least. The operator and `tidegate up` make tokens of 43 characters (256 random bits)."""
_SCHEME = "Bearer "


class BadToken(ValueError):
    """The token cannot be used; the message does not repeat it."""


def from_environment(environ: Mapping[str, str]) -> str | None:
    """The token of this process; None when the variable is not set. Raises `BadToken`, also for an empty variable, because
    the port of a part with a broken Secret must not take calls without a token."""
    return None if VARIABLE not in environ else checked(environ[VARIABLE], VARIABLE)


def checked(text: str, name: str) -> str:
    """The token in `text`, which may end in a line break; `name` is the place that it comes from. Raises `BadToken`."""
    token = text.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise BadToken(f"{name} must have at least {SHORTEST} characters, of ASCII without spaces")
    return token


def header(token: str | None) -> dict[str, str]:
    """The header, or the metadata, of a call; empty without a token."""
    return {} if token is None else {HEADER: _SCHEME + token}


def problem(token: str | None, pairs: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Why a call with these headers or this metadata must be rejected; None when it may go on. A port without a token
    takes every call."""
    if token is None:
        return None
    given = [value for name, value in pairs if name == HEADER]
    if not given:
        return "this port requires the token of the pool"
    (value, *more) = given
    sent = value if isinstance(value, bytes) else value.encode(errors="replace")
    if more or not hmac.compare_digest(sent, (_SCHEME + token).encode()):
        return "the token of the call is not the token of this pool"
    return None
