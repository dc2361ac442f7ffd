"""What does a client get for a row? The answer of its call, or its error, as one JSON object."""

from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_gateway.lifecycle import engine_client
from tidegate_gateway.openai import bounded_json, error_table

MOST_BYTES = 1024 * 1024
"""Of one result."""
_ALSO = ("tool_calls", "refusal", "reasoning_content")
"""Further fields of an answer's message that a result has if they are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    ok: bool
    text: bytes
    """The JSON object."""


def read(row: int, reply: engine_client.Reply) -> RowResult:
    """The result of a row from its whole answer."""
    if reply.status != 200:
        return failed(row, error_table.rejected(reply.first))
    try:
        answer = bounded_json.of_engine(reply.first)
        choice = answer["choices"][0]
        message = choice.get("message")
        text = choice.get("text") if message is None else message.get("content")
    except (ValueError, LookupError, AttributeError, TypeError):
        return failed(row, error_table.EngineTrouble("the engine's answer has no choice"))
    reason = choice.get("finish_reason")
    result: dict[str, Any] = {
        "object": "relquery.row",
        "row": row,
        "text": text if isinstance(text, str) else "",
        "finish_reason": reason if isinstance(reason, str) else None,
        "usage": answer.get("usage"),
    }
    result |= {name: message[name] for name in _ALSO if message and message.get(name)}
    if choice.get("logprobs") is not None:
        result["logprobs"] = choice["logprobs"]
    try:
        found = orjson.dumps(result)
    except orjson.JSONEncodeError:  # orjson reads deeper than it writes
        return failed(row, error_table.EngineTrouble("the engine's answer is nested too deeply"))
    if len(found) > MOST_BYTES:
        return failed(row, error_table.BadRequest(f"the answer is larger than {MOST_BYTES} bytes; ask for less"))
    return RowResult(ok=True, text=found)


def failed(row: int, error: error_table.GatewayError) -> RowResult:
    """The result of a row without an answer."""
    problem = orjson.loads(error.body())["error"]
    return RowResult(
        ok=False, text=orjson.dumps({"object": "relquery.row", "row": row, "text": None, "error": problem})
    )
