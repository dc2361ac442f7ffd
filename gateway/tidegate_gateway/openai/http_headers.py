"""Which header carries which field of a request? Ours, and the aliases of llm-d, Gateway API and Dynamo clients.

gRPC metadata uses the same names, so `edge.grpc_requests` reads it through here too.
"""

from collections.abc import Iterable, Mapping

from tidegate_gateway.openai import request_fields
from tidegate_gateway.openai.error_table import BadRequest

Headers = Mapping[str, str]
"""The headers of one request; their names in lower case."""

ALIASES: dict[request_fields.Field, tuple[str, ...]] = {
    "tenant": ("x-tidegate-tenant", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
    "slo_class": ("x-tidegate-class", "x-llm-d-inference-objective", "x-gateway-inference-objective"),
    "slo_ttft": ("x-tidegate-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "slo_tpot": ("x-tidegate-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "deadline": ("x-tidegate-deadline-ms",),
    "urgency": ("x-tidegate-urgency",),
    "workflow": ("x-tidegate-workflow",),
    "stage": ("x-tidegate-stage",),
    "session": ("x-session-id", "x-session-token", "session-id", "x-claude-code-session-id", "x-dynamo-session-id"),
    "request_id": ("x-request-id",),
    "idempotency_key": ("idempotency-key",),
    "traceparent": ("traceparent",),
}
"""Ours comes first. Two names of one field with different values are an error, except for sessions, where the first name
that a request has counts: a session is a hint."""

OURS = "x-tidegate-"
"""A header with this beginning that does not exist is an error: a typing error would be ignored otherwise."""
CONTROL = frozenset(("x-vllm-priority", "x-gateway-destination-endpoint"))
"""Headers that would control an engine or a proxy directly. They are ignored, and counted."""
NUMBERS = ("urgency", "deadline", "slo_ttft", "slo_tpot")
_FIELD_OF: dict[str, request_fields.Field] = {name: field for field, names in ALIASES.items() for name in names}
_READ_ONCE = frozenset(name for field, names in ALIASES.items() if field != "traceparent" for name in names)
_ONE_VALUE = {name: field for name, field in _FIELD_OF.items() if field not in ("session", "traceparent")}
"""The headers whose field has one value in a request, whatever names it has there."""


def headers_of(pairs: Iterable[tuple[str, str]]) -> Headers:
    """The headers of a request, or the metadata of a gRPC call.

    Raises `BadRequest` for a header that the gateway reads and that has two different values, under one name or under two
    names of its field: a proxy may have added one of them to the client's own.
    """
    found: dict[str, str] = {}
    names: dict[request_fields.Field, str] = {}
    for given, value in pairs:
        name = given.lower()
        if found.setdefault(name, value) != value and name in _READ_ONCE:
            raise BadRequest(f"{name} comes twice with different values; send one", param=name)
        field = _ONE_VALUE.get(name)
        if field is not None and found[first := names.setdefault(field, name)] != value:
            raise BadRequest(
                f"{first} and {name} are names of one field and have different values; send one", param=name
            )
    return found


def find(headers: Headers, field: request_fields.Field) -> tuple[str, object] | None:
    """The name and the value of the header that carries `field`; None if there is none."""
    for name in ALIASES[field]:
        value = headers.get(name)
        if value is not None:
            return name, whole_number(value) if field in NUMBERS else value
    return None


def read(headers: Headers) -> request_fields.RequestFields:
    """The fields of an HTTP request. Raises `BadRequest`."""
    refuse_unknown(headers)
    present: set[request_fields.Field] = set()
    ignored: tuple[str, ...] = ()
    for name in headers:
        if name in _FIELD_OF:
            present.add(_FIELD_OF[name])
        elif name in CONTROL:
            ignored += (name,)
    found = {field: find(headers, field) for field in present}
    return request_fields.read(found.get, request_fields.HTTP_NAMES, ignored)


def refuse_unknown(headers: Headers) -> None:
    """Raises `BadRequest` for the first header that looks like ours and is none."""
    for name in headers:
        if name.startswith(OURS) and name not in _FIELD_OF:
            shown = name[:80]
            raise BadRequest(f"{shown} is no header of ours; the nearest is {_nearest(shown)}", param=shown)


def _nearest(name: str) -> str:
    """The header of ours that has most letters at its beginning and end in common with this name."""

    return max(
        (known for known in _FIELD_OF if known.startswith(OURS)),
        key=lambda known: _common(known, name) + _common(known[::-1], name[::-1]),
    )


def _common(one: str, other: str) -> int:
    """The letters that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def tenant(headers: Headers) -> str | None:
    """The tenant that a request names. Raises `BadRequest`."""
    found = find(headers, "tenant")
    return None if found is None else request_fields.text(found[1], found[0])


def named_tenant(pairs: Iterable[tuple[str, str]]) -> str:
    """The tenant that unchecked headers name in lower case, "" if they name none: for bounds, before a request is read."""
    named = {name: value for name, value in pairs if _FIELD_OF.get(name) == "tenant"}
    return next((named[name] for name in ALIASES["tenant"] if name in named), "") if named else ""


def whole_number(value: str) -> int | None:
    """A whole number as a client writes it; None for anything else."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 12 else None
