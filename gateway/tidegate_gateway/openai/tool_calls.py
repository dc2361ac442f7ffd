"""Which tool does an answer invoke? Read from whole answers, and from the events of streams that can carry a name.

An engine is not trusted: anything that has not the form of the API names no tool, and `predict.tool_use` bounds the names.
Of several tools that one answer invokes, the first counts: clients usually run them together.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tidegate_gateway.openai import bounded_json

MARKER = b'"name"'
"""Stands in each event of a chat that names a tool, and in few others: a quotation mark in a text is escaped."""
MOST_LOOKS = 16
"""Blocks of events with the marker of one stream that are read. An answer that says "name" more often before it invokes a
tool counts as one without a tool."""
MOST_INVOCATIONS = 256
"""Of one message, whose arguments count."""
MOST_SEARCHED = 256
"""Choices of an answer, invocations of a choice, or items of a response that are searched for a tool."""
MOST_BYTES = 256 * 1024
"""An event that is longer is not read, nor is a block of events."""


RENDERED = ("tools", "functions", "documents", "chat_template_kwargs", "previous_input_messages")
"""Fields of a request that chat templates render into the prompt, beside the messages."""


def characters_of_fields(body: Mapping[str, Any]) -> int:
    """The characters of the `RENDERED` fields of a request. Those that are nested too deeply count nothing: `engine_fields`
    refuses them."""
    try:
        return sum(len(orjson.dumps(body[name])) for name in RENDERED if body.get(name))
    except orjson.JSONEncodeError:  # orjson reads deeper than it writes
        return 0


def characters_of_invocations(message: Mapping[str, Any]) -> int:
    """The characters of the arguments with which a message of a chat invokes tools."""
    characters = 0
    invoked = message.get("tool_calls")
    for call in (*invoked[:MOST_INVOCATIONS], message) if isinstance(invoked, list) else (message,):
        for name in ("function", "function_call"):
            function = call.get(name) if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            characters += len(arguments) if isinstance(arguments, str) else 0
    return characters


def of_chat(answer: Mapping[str, Any]) -> str:
    """The tool of a whole chat answer; "" = none."""
    return _of_choices(answer, "message")


def of_chat_event(payload: bytes) -> str:
    """The tool that an event of a chat's stream names; "" = none."""
    if len(payload) > MOST_BYTES:
        return ""
    try:
        event = bounded_json.of_engine(payload)
    except ValueError:
        return ""
    return _of_choices(event, "delta") if isinstance(event, dict) else ""


def of_response(response: object) -> str:
    """The tool of a response of `/v1/responses`; "" = none."""
    output = response.get("output") if isinstance(response, dict) else None
    for item in output[:MOST_SEARCHED] if isinstance(output, list) else ():
        if isinstance(item, dict) and item.get("type") == "function_call":
            return _name(item)
    return ""


def _of_choices(answer: Mapping[str, Any], part: str) -> str:
    choices = answer.get("choices")
    for choice in choices[:MOST_SEARCHED] if isinstance(choices, list) else ():
        said = choice.get(part) if isinstance(choice, dict) else None
        if not isinstance(said, dict):
            continue
        calls = said.get("tool_calls")
        for call in calls[:MOST_SEARCHED] if isinstance(calls, list) else ():
            found = _name(call.get("function")) if isinstance(call, dict) else ""
            if found:
                return found
        found = _name(said.get("function_call"))  # the form before tools
        if found:
            return found
    return ""


def _name(function: object) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""
