"""What does the client ask for? Headers and JSON in, an `Ask` out; and the body that goes to the engine.

One validation for HTTP and gRPC: `rpc` brings its fields in the same shape. Bodies pass through unchanged but for the
knobs that are ours to turn (`priority`, `tg.*` labels, usage in streams). Only what the gateway itself reads is checked
here; the engine checks the rest, and what it refuses reaches the client in its words. `admit` turns an Ask into a `Call`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from tidegate_gateway import errors
from tidegate_gateway.errors import BadRequest
from tidegate_policy import labels
from tidegate_policy.model import LEAST_URGENT, MOST_URGENT, Call

Kind = Literal["chat", "completion"]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

LONGEST_MS = 7 * 24 * 3600 * 1000
"""Deadlines and targets beyond a week are taken for mistakes."""
PRIORITY_EPOCH_S = 1_767_225_600.0
"""2026-01-01: vLLM's `priority` is the latest start in milliseconds since then, so that gateways agree on it."""
ENGINE_KNOBS = ("priority", "request_id", "kv_transfer_params", "kv_hints", "session_id", "data_parallel_rank")
"""Body fields that address the engine behind the gateway; nobody but the gateway turns them."""

_NAME = re.compile(r"[A-Za-z0-9._~:@+=-]{1,128}")
_TEXT = re.compile(r"[\x20-\x7e]{1,256}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

ALIASES: dict[str, tuple[str, ...]] = {
    "tenant": ("x-tidegate-tenant", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
    "class": ("x-tidegate-class", "x-llm-d-inference-objective", "x-gateway-inference-objective"),
    "ttft": ("x-tidegate-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tpot": ("x-tidegate-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "deadline": ("x-tidegate-deadline-ms",),
    "urgency": ("x-tidegate-urgency",),
    "workflow": ("x-tidegate-workflow",),
    "stage": ("x-tidegate-stage",),
    "session": (
        "x-session-id",
        "x-session-token",
        "session-id",
        "x-claude-code-session-id",
        "x-dynamo-session-id",
    ),
    "request": ("x-request-id",),
    "idempotency": ("idempotency-key",),
}
"""Ours first; the first that is present counts."""


Headers = Mapping[str, str]
"""Of a request; names in lower case."""
_OURS = frozenset(name for names in ALIASES.values() for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A chat or completion request as the client made it, checked."""

    kind: Kind
    body: dict[str, Any]
    """The request for the engine, without the knobs."""
    model: str
    stream: bool
    wants_usage: bool
    """The client asked for usage in its stream."""
    max_tokens: int | None
    choices: int
    """Sequences that the engine generates: prompts times `n`."""
    characters: int
    """Of all prompts; what the token estimate starts from."""
    messages: int
    request_id: str | None
    tenant: str = ""
    slo_class: str | None = None
    urgency: int | None = None
    deadline_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    workflow: str | None = None
    stage: str | None = None
    session: str | None = None
    idempotency: str | None = None
    """Of a workflow's call: names it, so that it may be repeated when its answer was lost."""
    traceparent: str | None = None


def headers_of(pairs: Iterable[tuple[str, str]]) -> Headers:
    """A request's headers, or a call's metadata. Raises `BadRequest` for one that we read and that says two things: a proxy
    may have added it to the client's own."""
    found: dict[str, str] = {}
    for given, value in pairs:
        name = given.lower()
        if found.setdefault(name, value) != value and name in _OURS:
            raise BadRequest(f"{name} comes twice with different values; send one", param=name)
    return found


def read(kind: Kind, headers: Headers, raw: bytes, *, most_choices: int = 16) -> Ask:
    """The request in `raw`. Raises `BadRequest` with the field that is wrong and what would be right."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return read_body(kind, headers, body, most_choices=most_choices)


def read_body(kind: Kind, headers: Headers, body: object, *, most_choices: int = 16) -> Ask:
    """As `read`, for a body that is decoded already."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options goes with stream: true", param="stream_options")
    prompts, characters, messages = _chat(body) if kind == "chat" else _prompt(body)
    choices = prompts * (_count(body, "n", 1, most_choices) or 1)
    if choices > most_choices:
        raise BadRequest(
            f"n times the number of prompts must be at most {most_choices}, not {choices}; send several calls",
            param="prompt",
        )
    most = _count(body, "max_completion_tokens", 1, 10_000_000) if kind == "chat" else None
    if most is None:
        most = _count(body, "max_tokens", 1, 10_000_000)
    traceparent = headers.get("traceparent")
    stage, workflow = _name(headers, "stage"), _name(headers, "workflow")
    if stage is not None and workflow is None:
        raise BadRequest("x-tidegate-stage goes with x-tidegate-workflow", param="x-tidegate-stage")
    deadline_s = _ms(headers, "deadline")
    return Ask(
        kind=kind,
        body=_without_knobs(body),
        model=_model(body),
        stream=stream,
        wants_usage=bool(options and options.get("include_usage")),
        max_tokens=most,
        choices=choices,
        characters=characters,
        messages=messages,
        request_id=_text(headers, "request"),
        tenant=_text(headers, "tenant") or "",
        slo_class=_text(headers, "class"),
        urgency=_urgency(headers),
        deadline_s=deadline_s,
        ttft_s=_ms(headers, "ttft"),
        tpot_s=_ms(headers, "tpot"),
        workflow=workflow,
        stage=(stage or "main") if workflow is not None else None,
        session=_text(headers, "session"),
        idempotency=_text(headers, "idempotency") if workflow is not None else None,
        traceparent=traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else None,
    )


def write(now: float, wall_s: float, ask: Ask, call: Call, service_s: float) -> bytes:
    """The body for the engine: the client's, with our labels, and the latest start as vLLM's `priority` (lower = sooner).

    `wall_s` is the wall time at the instant `now`; `service_s` the seconds that the call takes on its engine.
    """
    body = dict(ask.body)
    body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), **labels.write(now, call)}
    latest_start_s = wall_s + (call.due_or_patience_s - service_s - now)
    body["priority"] = round((latest_start_s - PRIORITY_EPOCH_S) * 1000)
    if ask.stream:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:  # orjson reads deeper than it writes
        raise BadRequest("the body is nested too deeply") from error


def _without_knobs(body: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in body.items() if key not in ENGINE_KNOBS}
    arguments = kept.pop("vllm_xargs", None)
    if arguments is not None:
        if not isinstance(arguments, dict):
            raise BadRequest("vllm_xargs must be an object", param="vllm_xargs")
        kept["vllm_xargs"] = {key: value for key, value in arguments.items() if not key.startswith(labels.PREFIX)}
    return kept


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be the name of a model; GET /v1/models lists them", param="model")
    return model


def _chat(body: Mapping[str, Any]) -> tuple[int, int, int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    characters = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role", param=f"messages[{i}]")
        characters += _content(message.get("content"), i)
    return 1, characters, len(messages)


def _content(content: object, i: int) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        raise BadRequest(f"messages[{i}].content must be text or a list of parts", param=f"messages[{i}].content")
    total = 0
    for part in content:
        if not isinstance(part, dict):
            raise BadRequest(f"messages[{i}].content: every part must be an object", param=f"messages[{i}].content")
        text = part.get("text")
        total += len(text) if isinstance(text, str) else _OTHER_PART
    return total


_OTHER_PART = 2000
"""Characters that an image or sound counts for, until the engine's usage corrects the estimate."""


def _prompt(body: Mapping[str, Any]) -> tuple[int, int, int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return 1, len(prompt), 0
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return len(prompt), sum(map(len, prompt)), 0
        if all(_is_token(item) for item in prompt):
            return 1, 4 * len(prompt), 0
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in prompt):
            return len(prompt), 4 * sum(map(len, prompt)), 0
    raise BadRequest("prompt must be text, a list of texts, or token ids", param="prompt")


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false", param=key)
    return bool(value)


def _count(body: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{key} must be a whole number from {low} to {high}", param=key)
    return value


def _header(headers: Headers, what: str) -> tuple[str, str] | None:
    for name in ALIASES[what]:
        value = headers.get(name)
        if value is not None:
            return name, value
    return None


def _text(headers: Headers, what: str) -> str | None:
    found = _header(headers, what)
    return None if found is None else text_of(found[1], found[0])


def text_of(value: object, param: str) -> str:
    """A tenant's name, an Idempotency-Key or the like. Raises `BadRequest`."""
    if not isinstance(value, str) or not _TEXT.fullmatch(value):
        raise BadRequest(f"{param} must be 1 to 256 printable ASCII characters", param=param)
    return value


def _name(headers: Headers, what: str) -> str | None:
    found = _header(headers, what)
    return None if found is None else name_of(found[1], found[0])


def name_of(value: object, param: str) -> str:
    """A workflow's id or a stage's name: usable in paths, headers and metrics. Raises `BadRequest`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{param} must be 1 to 128 of A-Z a-z 0-9 . _ ~ : @ + = -", param=param)
    return value


def _ms(headers: Headers, what: str) -> float | None:
    found = _header(headers, what)
    return None if found is None else duration_s(digits(found[1]), found[0])


def duration_s(value: object, param: str) -> float:
    """Milliseconds from a client, as seconds. Raises `BadRequest`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LONGEST_MS:
        raise BadRequest(f"{param} must be a whole number of milliseconds from 1 to {LONGEST_MS} (7 days)", param=param)
    return value / 1000


def tenant(headers: Headers) -> str | None:
    """The tenant that a request names. Raises `BadRequest`."""
    return _text(headers, "tenant")


def _urgency(headers: Headers) -> int | None:
    found = _header(headers, "urgency")
    if found is None:
        return None
    value = digits(found[1])
    if value is None or not MOST_URGENT <= value <= LEAST_URGENT:
        raise BadRequest(
            f"{found[0]} must be a whole number from {MOST_URGENT} (most urgent) to {LEAST_URGENT}", param=found[0]
        )
    return value


def digits(value: str) -> int | None:
    """A whole number as a client writes it; None for anything else."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 12 else None


def unknown_model(name: str, known: list[str]) -> errors.GatewayError:
    return BadRequest(
        f"model {name[:80]!r} is not served here; GET /v1/models lists {', '.join(known) or 'none yet'}",
        param="model",
        code="model_not_found",
    )
