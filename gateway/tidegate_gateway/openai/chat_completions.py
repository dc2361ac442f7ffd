"""The endpoint `/v1/chat/completions`: a list of messages in, one answer for each of `n` choices out."""

from collections.abc import Iterator, Mapping
from typing import Any

from tidegate_gateway.openai import endpoint, tool_calls
from tidegate_gateway.openai.error_table import BadRequest

OTHER_PART_CHARACTERS = 2000
"""The characters that an image or a sound counts for, until the engine's usage corrects the estimate."""

MOST_MESSAGES = 20_000
"""Messages of a request, and parts of a message."""


def read_size(body: Mapping[str, Any], most_choices: int) -> endpoint.RequestSize:
    """The size of a chat request. Raises `BadRequest`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise BadRequest(f"messages must be a list of at most {MOST_MESSAGES} messages", param="messages")
    characters = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role", param=f"messages[{i}]")
        characters += _content_characters(message.get("content"), i)
    choices = endpoint.choices(body, 1, most_choices)
    max_tokens = endpoint.count(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = endpoint.count(body, "max_tokens")
    return endpoint.RequestSize(characters=characters, messages=len(messages), choices=choices, max_tokens=max_tokens)


def _content_characters(content: object, i: int) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        raise BadRequest(f"messages[{i}].content must be text or a list of parts", param=f"messages[{i}].content")
    if len(content) > MOST_MESSAGES:
        raise BadRequest(
            f"messages[{i}].content must have at most {MOST_MESSAGES} parts", param=f"messages[{i}].content"
        )
    total = 0
    for part in content:
        if not isinstance(part, dict):
            raise BadRequest(f"messages[{i}].content: every part must be an object", param=f"messages[{i}].content")
        total += part_characters(part)
    return total


def part_characters(part: object) -> int:
    """The characters of a part of a message: those of its text, or what another part counts for."""
    text = part.get("text") if isinstance(part, dict) else None
    return len(text) if isinstance(text, str) else OTHER_PART_CHARACTERS


def prompt_parts(body: Mapping[str, Any]) -> Iterator[object]:
    """Chat templates render the tools before the messages."""
    if body.get("tools"):
        yield body["tools"]
    yield from body["messages"]


ENDPOINT: endpoint.Endpoint = endpoint.Endpoint(
    name="chat_completions",
    path="/v1/chat/completions",
    operation="chat",
    read_size=read_size,
    prompt_field="messages",
    prompt_parts=prompt_parts,
    is_answer=endpoint.has_choices,
    stream=endpoint.StreamDialect(tool_marker=tool_calls.MARKER, read_tool=tool_calls.of_chat_event),
    invoked_tool=tool_calls.of_chat,
)
