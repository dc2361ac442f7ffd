"""What does the engine get? The client's body, our labels, and the latest start of the call as vLLM's `priority`.

Bodies pass through unchanged except for the fields that only the gateway may set: `priority`, the `tg.*` labels in
`vllm_xargs`, and the request for usage in streams.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy import labels
from tidegate_policy.model import Call

PRIORITY_EPOCH_S = 1_767_225_600.0
"""2026-01-01: `priority` is the latest start in milliseconds since then, so that all gateways agree on it."""
MOST_PRIORITY = 2.0**53
"""A larger number would not keep its value in JSON."""
ENGINE_KNOBS = (
    "priority",
    "request_id",
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_hints",
    "kv_cache_report_mode",
    "session_id",
    "data_parallel_rank",
)
"""Body fields that address the engine behind the gateway; the gateway removes them from a client's body."""

MERGED = ("vllm_xargs", "stream_options")
"""Fields to which `write` adds."""

TOO_DEEP = "the body is nested too deeply"


def engine_knobs(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a client's body that only the gateway may set."""
    arguments = body.get("vllm_xargs")
    found = tuple(name for name in ENGINE_KNOBS if name in body)
    if isinstance(arguments, dict) and any(map(_is_knob, arguments)):
        return (*found, "vllm_xargs")
    return found


def without_engine_knobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's body without the fields that only the gateway may set. Raises `BadRequest`."""
    cleaned = {key: value for key, value in body.items() if key not in ENGINE_KNOBS}
    arguments = cleaned.pop("vllm_xargs", None)
    if arguments is not None:
        if not isinstance(arguments, dict):
            raise BadRequest("vllm_xargs must be an object", param="vllm_xargs")
        cleaned["vllm_xargs"] = {key: value for key, value in arguments.items() if not _is_knob(key)}
    return cleaned


def _is_knob(key: str) -> bool:
    """vLLM merges some of its fields into `vllm_xargs`."""
    return key.startswith(labels.PREFIX) or key in ENGINE_KNOBS


def pack(body: dict[str, Any]) -> None:
    """Replaces the lists and objects of a body, such as its prompt and its tools, by their JSON. While a call waits, parsed
    token ids take fifteen times the memory of their JSON. Afterwards only `write` reads the body. Raises `BadRequest` for a
    body that can be read and not written."""
    packed = {
        key: orjson.Fragment(_dumps(value))
        for key, value in body.items()
        if isinstance(value, list | dict) and key not in MERGED
    }
    body.update(packed)


def write(
    now: float, wall_s: float, body: Mapping[str, Any], call: Call, service_s: float, *, ask_for_usage: bool
) -> bytes:
    """The body for the engine: the client's, with our labels and our `priority` (lower = sooner).

    `wall_s` is the wall time at the instant `now`; `service_s` the seconds that the call takes on its engine. Raises
    `BadRequest` for a body that can be read and not written.
    """
    labelled = dict(body)
    labelled["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), **labels.write(now, call)}
    latest_start_s = wall_s + (call.due_or_patience_at_s - service_s - now)
    priority = (latest_start_s - PRIORITY_EPOCH_S) * 1000
    labelled["priority"] = round(min(max(priority, -MOST_PRIORITY), MOST_PRIORITY))
    if ask_for_usage:
        labelled["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return _dumps(labelled)


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # orjson reads deeper than it writes
        raise BadRequest(TOO_DEEP) from error
