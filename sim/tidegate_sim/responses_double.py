"""`/v1/responses` of a simulated engine: OpenAI's Responses API in the form in which vLLM serves it.

A request becomes the chat request of the same work, so that both are parsed and simulated by the same code.
"""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from tidegate_sim import sim_request


def as_chat(body: bytes) -> bytes:
    """The chat request of the same work. Raises `sim_request.BadRequest`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise sim_request.BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise sim_request.BadRequest("the body must be a JSON object")
    given, instructions = fields.get("input"), fields.get("instructions")
    if not given or not isinstance(given, str | list):
        raise sim_request.BadRequest("input must be a text or a list of items, and not empty", param="input")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in given if isinstance(given, list) else [given]:
        text = item.get("content") or item.get("output") if isinstance(item, dict) else item
        messages.append({"role": "user", "content": text or ""})
    for name in ("tool_choice", "text"):  # forms that this endpoint has no stubs for
        if fields.get(name) not in (None, "none", "auto", {"format": {"type": "text"}}):
            raise sim_request.BadRequest(f"simulated engines have no answer of this form: {name}", param=name)
    kept = {
        name: fields[name] for name in ("model", "stream", "temperature", "vllm_xargs", "cache_salt") if name in fields
    }
    return orjson.dumps({**kept, "messages": messages, "max_tokens": fields.get("max_output_tokens")})


def response(head: dict[str, object], parsed: sim_request.SimRequest, text: str | None) -> dict[str, Any]:
    """The response object with its output; without a text, as it is when a stream begins."""
    tokens = {"input_tokens": parsed.prompt_tokens, "output_tokens": parsed.output_tokens}
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": "in_progress" if text is None else ("incomplete" if parsed.limited else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if parsed.limited and text is not None else None,
        "output": [] if text is None else [_message(text)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None
        if text is None
        else {
            **tokens,
            "total_tokens": sum(tokens.values()),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def events(
    head: dict[str, object], parsed: sim_request.SimRequest, words: AsyncIterator[tuple[int, str]]
) -> AsyncIterator[bytes]:
    """The events of a streamed response."""
    where = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    text = ""
    begun: dict[str, object] = {"response": response(head, parsed, None)}
    message = {**_message(""), "status": "in_progress", "content": []}
    part: dict[str, object] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    first: tuple[tuple[str, dict[str, object]], ...] = (
        ("response.created", begun),
        ("response.in_progress", begun),
        ("response.output_item.added", {"output_index": 0, "item": message}),
        ("response.content_part.added", {**where, "part": part}),
    )
    for i, (name, fields) in enumerate(first):
        yield _event(name, i, fields)
    number = len(first)
    async for _, word in words:
        text += word
        yield _event("response.output_text.delta", number, {**where, "delta": word, "logprobs": []})
        number += 1
    last = response(head, parsed, text)
    ends: tuple[tuple[str, dict[str, object]], ...] = (
        ("response.output_text.done", {**where, "text": text, "logprobs": []}),
        ("response.content_part.done", {**where, "part": {**part, "text": text}}),
        ("response.output_item.done", {"output_index": 0, "item": _message(text)}),
        (f"response.{last['status']}", {"response": last}),
    )
    for i, (name, fields) in enumerate(ends):
        yield _event(name, number + i, fields)


def _message(text: str) -> dict[str, object]:
    content = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [content]}


def _event(name: str, number: int, fields: dict[str, object]) -> bytes:
    event = orjson.dumps({"type": name, "sequence_number": number, **fields})
    return b"event: " + name.encode() + b"\ndata: " + event + b"\n\n"
