"""The endpoint `/v1/responses`: a conversation in, one response with output items out.

The gateway keeps no conversation, and calls of one conversation go to different engines. So a request brings its whole
input: `previous_response_id`, `conversation` and `background` are errors (docs/http.md). The streamed answer is a series of
events with names; the last one carries the whole response and its usage.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_gateway.openai import bounded_json, chat_completions, endpoint, tool_calls
from tidegate_gateway.openai.error_table import BadRequest

STATEFUL = ("previous_response_id", "conversation")


def read_size(body: Mapping[str, Any], most_choices: int) -> endpoint.RequestSize:
    """The size of a request. Raises `BadRequest`."""
    for name in STATEFUL:
        if body.get(name):
            raise BadRequest(f"{name} is not supported; send the whole conversation in input", param=name)
    if body.get("background"):
        raise BadRequest(
            "background is not supported; leave it out and wait for the answer, or stream it", param="background"
        )
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequest("instructions must be text", param="instructions")
    messages, characters, media = _input_size(body.get("input"))
    return endpoint.RequestSize(
        characters=characters + len(instructions or "") + tool_calls.characters_of_fields(body),
        media=min(media, chat_completions.MOST_MEDIA),
        messages=messages + (instructions is not None),
        max_tokens=endpoint.count(body, "max_output_tokens"),
    )


def _input_size(given: object) -> tuple[int, int, int]:
    """The items of an input, the characters of its texts, and its images and sounds."""
    if isinstance(given, str):
        return 1, len(given), 0
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be text, or a list with at least one item", param="input")
    if len(given) > chat_completions.MOST_MESSAGES:
        raise BadRequest(f"input must have at most {chat_completions.MOST_MESSAGES} items", param="input")
    characters = media = 0
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{i}] must be an object", param=f"input[{i}]")
        for name in ("content", "output", "arguments"):
            more, more_media = _text_size(item.get(name))
            characters, media = characters + more, media + more_media
    return len(given), characters, media


def _text_size(value: object) -> tuple[int, int]:
    """The characters of a text, or of the texts of a list of parts, and the number of its images and sounds."""
    if isinstance(value, str):
        return len(value), 0
    if not isinstance(value, list):
        return 0, 0
    return chat_completions.parts_size(value[: chat_completions.MOST_MESSAGES])


def prompt_parts(body: Mapping[str, Any]) -> Iterator[object]:
    """The parts of the prompt in the order in which the engine renders them."""
    if body.get("tools"):
        yield body["tools"]
    yield body.get("instructions")
    given = body.get("input")
    if isinstance(given, list):
        yield from given
    else:
        yield given


def _is_response(answer: Mapping[str, Any]) -> bool:
    return answer.get("object") == "response" and isinstance(answer.get("output"), list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEvents(endpoint.StreamDialect):
    """Events with names: `response.created`, deltas, and at the end `response.completed` or another final one."""

    final: tuple[bytes, ...] = (b"response.completed", b"response.incomplete", b"response.failed")

    def read_named(self, name: bytes, payload: bytes) -> endpoint.NamedEvent:
        if name in self.final:
            response = bounded_json.of_engine(payload).get("response")
            usage = response.get("usage") if isinstance(response, dict) else None
            tool = tool_calls.of_response(response)
            return endpoint.NamedEvent(last=True, failed=name == b"response.failed", usage=usage, tool=tool)
        return endpoint.NamedEvent(text=name.endswith(b".delta"), failed=name == b"error")

    def error_events(self, body: bytes) -> bytes:
        """The last bytes of a stream that failed: an event with the fields of the error object."""
        error = orjson.loads(body)["error"]
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        return b"event: error\ndata: " + orjson.dumps({"type": "error", **fields}) + b"\n\n"


ENDPOINT: endpoint.Endpoint = endpoint.Endpoint(
    name="responses",
    path="/v1/responses",
    operation="generate_content",
    read_size=read_size,
    prompt_field="input",
    prompt_parts=prompt_parts,
    is_answer=_is_response,
    stream=ResponseEvents(named=True),
    invoked_tool=tool_calls.of_response,
    prompt_usage="input_tokens",
    output_usage="output_tokens",
    asks_for_usage=False,
)
