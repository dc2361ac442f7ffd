"""The headers by which a call tells the gateway its tenant, targets and place in a workflow (docs/http.md)."""

import math
from typing import TypeVar

import openai

Client = TypeVar("Client", openai.OpenAI, openai.AsyncOpenAI)


def headers(
    *,
    tenant: str | None = None,
    slo_class: str | None = None,
    urgency: int | None = None,
    deadline_s: float | None = None,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    session: str | None = None,
    workflow: str | None = None,
    stage: str | None = None,
) -> dict[str, str]:
    """The headers of the given values, for `default_headers` of a client or `extra_headers` of a call. Raises `ValueError`
    for a value that no header can have."""
    values = {
        "x-tidegate-tenant": _text("tenant", tenant),
        "x-tidegate-class": _text("slo_class", slo_class),
        "x-tidegate-urgency": urgency,
        "x-tidegate-deadline-ms": milliseconds("deadline_s", deadline_s),
        "x-tidegate-slo-ttft-ms": milliseconds("ttft_s", ttft_s),
        "x-tidegate-slo-tpot-ms": milliseconds("tpot_s", tpot_s),
        "x-session-id": _text("session", session),
        "x-tidegate-workflow": _text("workflow", workflow),
        "x-tidegate-stage": _text("stage", stage),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def milliseconds(name: str, seconds: float | None) -> int | None:
    """Whole milliseconds, as the gateway counts. Raises `ValueError` for a value of the argument `name` that is no time."""
    if seconds is None:
        return None
    try:
        is_time = 0.001 <= seconds < math.inf
    except TypeError:
        is_time = False
    if not is_time:
        raise ValueError(f"{name} must be a number of seconds, at least 0.001, not {seconds!r}")
    return round(seconds * 1000)


def _text(name: str, value: str | None) -> str | None:
    if value is not None and not (value and value.isascii() and value.isprintable()):
        raise ValueError(f"{name} must be printable ASCII text, not {value!r}")
    return value


def with_headers(client: Client, added: dict[str, str]) -> Client:
    """A copy of the client that adds these headers to its requests. It shares the connections of the client.

    Each of its POST requests has an `Idempotency-Key` of its own, and its retries have the same key: the SDK makes and
    keeps the keys, and sends them where a client names the header.
    """
    copy = client.with_options(default_headers=added)
    copy._idempotency_header = "idempotency-key"
    return copy
