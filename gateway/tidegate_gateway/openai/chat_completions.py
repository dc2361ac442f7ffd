"""The endpoint `/v1/chat/completions`: a list of messages in, one answer for each of `n` choices out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidegate_gateway.openai import endpoint, tool_calls
from tidegate_gateway.openai.error_table import BadRequest

MOST_MEDIA = 256
"""How many images and sounds count in a request. A client could make a short request look like hours of work otherwise."""
_NO_CONTENT = frozenset({"type", "text", "refusal", "annotations", "cache_control", "id", "status", "logprobs"})

MOST_MESSAGES = 20_000
"""Messages of a request, and parts of a message."""


def read_size(body: Mapping[str, Any], most_choices: int) -> endpoint.RequestSize:
    """The size of a chat request. Raises `BadRequest`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise BadRequest(f"messages must be a list of at most {MOST_MESSAGES} messages", param="messages")
    characters, media = tool_calls.characters_of_fields(body), 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role", param=f"messages[{i}]")
        more, more_media = _content_size(message.get("content"), i)
        characters += more + tool_calls.characters_of_invocations(message)
        media += more_media
    choices = endpoint.choices(body, 1, most_choices)
    max_tokens = endpoint.count(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = endpoint.count(body, "max_tokens")
    return endpoint.RequestSize(
        characters=characters,
        media=min(media, MOST_MEDIA),
        messages=len(messages),
        choices=choices,
        max_tokens=max_tokens,
    )


def _content_size(content: object, i: int) -> tuple[int, int]:
    """As `parts_size`."""
    if content is None:
        return 0, 0
    if isinstance(content, str):
        return len(content), 0
    if not isinstance(content, list):
        raise BadRequest(f"messages[{i}].content must be text or a list of parts", param=f"messages[{i}].content")
    if len(content) > MOST_MESSAGES:
        raise BadRequest(
            f"messages[{i}].content must have at most {MOST_MESSAGES} parts", param=f"messages[{i}].content"
        )
    if not all(isinstance(part, dict) for part in content):
        raise BadRequest(f"messages[{i}].content: every part must be an object", param=f"messages[{i}].content")
    return parts_size(content)


def parts_size(parts: Sequence[object]) -> tuple[int, int]:
    """The characters of the texts in the parts of a message, and the number of its images and sounds."""
    characters = media = 0
    for part in parts:
        if not isinstance(part, dict):
            continue
        text = part.get("text")
        if isinstance(text, str):
            characters += len(text)
        if any(value and name not in _NO_CONTENT for name, value in part.items()):
            media += 1
    return characters, media


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
