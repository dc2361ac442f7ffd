"""What does a request say beside its body? Typed values in, checked `RequestFields` out; one validation for both wires.

A wire (`http_headers` for HTTP, `edge.grpc_requests` for gRPC) finds each field and converts it into a Python value. The
validators here check the value and name the field as its wire does, so that an error tells a client which of its own fields
is wrong.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy import immutable
from tidegate_policy.model import LEAST_URGENT, MOST_URGENT

LONGEST_MS = 7 * 24 * 3600 * 1000
"""Deadlines and targets beyond a week are taken for mistakes."""

_NAME = re.compile(r"[A-Za-z0-9._~:@+=-]{1,128}")
_TEXT = re.compile(r"[\x20-\x7e]{1,256}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Field = Literal[
    "request_id",
    "tenant",
    "slo_class",
    "urgency",
    "deadline",
    "slo_ttft",
    "slo_tpot",
    "workflow",
    "stage",
    "session",
    "idempotency_key",
    "traceparent",
]
Find = Callable[[Field], tuple[str, object] | None]
"""The name of a field on its wire, and its value as Python has it; None if the request does not have the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """How one wire calls the fields that later errors are about."""

    slo_class: str
    deadline: str
    workflow: str
    stage: str
    idempotency_key: str


HTTP_NAMES = FieldNames(
    slo_class="x-tidegate-class",
    deadline="x-tidegate-deadline-ms",
    workflow="x-tidegate-workflow",
    stage="x-tidegate-stage",
    idempotency_key="Idempotency-Key",
)
GRPC_NAMES = FieldNames(
    slo_class="slo_class",
    deadline="deadline_ms",
    workflow="workflow",
    stage="stage",
    idempotency_key="idempotency_key",
)


@immutable.value(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The fields of a request beside its body, checked."""

    names: FieldNames = HTTP_NAMES
    request_id: str | None = None
    tenant: str = ""
    slo_class: str | None = None
    urgency: int | None = None
    deadline_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    workflow: str | None = None
    stage: str | None = None
    """Set if and only if `workflow` is."""
    session: str | None = None
    idempotency_key: str | None = None
    """Names a workflow's call, so that a client may repeat the call when its answer was lost."""
    traceparent: str | None = None
    ignored: tuple[str, ...] = ()
    """Names that only the gateway may set."""


def read(find: Find, names: FieldNames, ignored: tuple[str, ...] = ()) -> RequestFields:
    """The fields that `find` finds. Raises `BadRequest` with the field that is wrong and its allowed values."""
    workflow, stage = _name(find("workflow")), _name(find("stage"))
    if stage is not None and workflow is None:
        raise BadRequest(f"{names.stage} needs {names.workflow} beside it", param=names.stage)
    traceparent = find("traceparent")
    return RequestFields(
        names=names,
        request_id=_text(find("request_id")),
        tenant=_text(find("tenant")) or "",
        slo_class=_text(find("slo_class")),
        urgency=_urgency(find("urgency")),
        deadline_s=_duration_s(find("deadline")),
        ttft_s=_duration_s(find("slo_ttft")),
        tpot_s=_duration_s(find("slo_tpot")),
        workflow=workflow,
        stage=(stage or "main") if workflow is not None else None,
        session=_text(find("session")),
        idempotency_key=_text(find("idempotency_key")) if workflow is not None else None,
        traceparent=None if traceparent is None else _traceparent(traceparent[1]),
        ignored=ignored,
    )


def text(value: object, param: str) -> str:
    """A tenant's name, an idempotency key or the like. Raises `BadRequest`."""
    if not isinstance(value, str) or not _TEXT.fullmatch(value):
        raise BadRequest(f"{param} must be 1 to 256 printable ASCII characters", param=param)
    return value


def name(value: object, param: str) -> str:
    """A workflow's id or a stage's name: usable in paths, headers and metrics. Raises `BadRequest`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{param} must be 1 to 128 of A-Z a-z 0-9 . _ ~ : @ + = -", param=param)
    return value


def duration_s(value: object, param: str) -> float:
    """Milliseconds from a client, as seconds. Raises `BadRequest`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LONGEST_MS:
        raise BadRequest(f"{param} must be a whole number of milliseconds from 1 to {LONGEST_MS} (7 days)", param=param)
    return value / 1000


def _text(found: tuple[str, object] | None) -> str | None:
    return None if found is None else text(found[1], found[0])


def _name(found: tuple[str, object] | None) -> str | None:
    return None if found is None else name(found[1], found[0])


def _duration_s(found: tuple[str, object] | None) -> float | None:
    return None if found is None else duration_s(found[1], found[0])


def _urgency(found: tuple[str, object] | None) -> int | None:
    if found is None:
        return None
    param, value = found
    if not isinstance(value, int) or isinstance(value, bool) or not MOST_URGENT <= value <= LEAST_URGENT:
        sentence = f"{param} must be a whole number from {MOST_URGENT} (most urgent) to {LEAST_URGENT}"
        raise BadRequest(sentence, param=param)
    return value


def _traceparent(value: object) -> str | None:
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None
