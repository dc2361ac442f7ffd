"""The answers of a simulated engine to requests that ask for a form: a call of a tool, or JSON that fits a schema.

The values carry no meaning. A form without a stub is rejected, so that no client takes filler for an answer in its form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

PIECE_CHARACTERS = 4
DEEPEST, MOST_VALUES = 32, 10_000
_TEXTS = {"date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01", "time": "00:00:00Z", "email": "stub@example.com",
          "uri": "https://example.com/", "uuid": "00000000-0000-4000-8000-000000000000"}  # fmt: skip
_UNKNOWN = ("pattern", "allOf", "not", "if", "patternProperties", "dependentRequired", "multipleOf", "contains")


class NoStub(ValueError):
    """There is no stub for the form; the message says for which, and `param` is the field of the request."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"simulated engines have no answer of this form: {message}")
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """An answer in the form that a request asks for."""

    pieces: tuple[str, ...]
    """Its tokens."""
    tool: str | None = None
    """The tool that is called with the text as arguments."""


def of(fields: Mapping[str, Any]) -> Stub | None:
    """The stub for a chat or completion request; None if the request asks for no form. Raises `NoStub`."""
    try:
        return _stub(fields)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise NoStub("its schema is not a JSON schema", "response_format") from error


def _stub(fields: Mapping[str, Any]) -> Stub | None:
    if fields.get("logprobs") or fields.get("top_logprobs") or fields.get("prompt_logprobs"):
        raise NoStub("logprobs", "logprobs")
    chosen = fields.get("tool_choice")
    if chosen not in (None, "none", "auto"):
        return _tool_call(fields, chosen)
    wanted = fields.get("response_format") or {"type": "text"}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Stub(pieces=_pieces({}))
    if kind != "json_schema":
        raise NoStub(f"type {kind!r}", "response_format")
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return Stub(pieces=_pieces(_Values(root=schema, param="response_format").of(schema)))


def _tool_call(fields: Mapping[str, Any], chosen: Any) -> Stub:
    tools = [tool["function"] for tool in fields.get("tools") or () if isinstance(tool, dict) and "function" in tool]
    if isinstance(chosen, dict) and isinstance(chosen.get("function"), dict):
        tools = [tool for tool in tools if tool.get("name") == chosen["function"].get("name")]
    elif chosen != "required":
        raise NoStub(f"tool_choice {chosen!r}", "tool_choice")
    if not tools:
        raise NoStub("tools has no such function", "tool_choice")
    schema = tools[0].get("parameters") or {"type": "object"}
    return Stub(pieces=_pieces(_Values(root=schema, param="tools").of(schema)), tool=str(tools[0]["name"]))


def _pieces(value: Any) -> tuple[str, ...]:
    text = orjson.dumps(value).decode()
    return tuple(text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS))


@dataclass(slots=True, kw_only=True)
class _Values:
    """Makes the values that fit the parts of one schema."""

    root: Any
    param: str
    left: int = MOST_VALUES
    """Values, and characters of texts, that may still be made."""

    def of(self, schema: Any, depth: int = 0) -> Any:
        """A value that fits the schema. Raises `NoStub` for keywords that it does not know."""
        if not isinstance(schema, dict) or depth > DEEPEST:
            raise NoStub("the schema is no object, or refers to itself without an end", self.param)
        self._take(1)
        if unknown := [name for name in _UNKNOWN if name in schema]:
            raise NoStub(f"{unknown[0]} in a schema", self.param)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return self.of(_referred(schema["$ref"], self.root, self.param), depth + 1)
        for name in ("anyOf", "oneOf"):
            if schema.get(name):
                return self.of(schema[name][0], depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            properties, required = schema.get("properties", {}), schema.get("required", ())
            return {name: self.of(properties.get(name, {}), depth + 1) for name in required}
        if kind == "array":
            item, count = schema.get("items", {}), schema.get("minItems", 0)
            self._take(count)
            return [self.of(item, depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            return _number(schema)
        simple: dict[str, Any] = {"boolean": False, "null": None}
        if kind in simple:
            return simple[kind]
        if kind != "string":
            raise NoStub(f"type {kind!r} in a schema", self.param)
        shortest = schema.get("minLength", 0)
        self._take(shortest)
        text = _TEXTS.get(schema.get("format", ""), "simulated").ljust(shortest, ".")
        return text[: schema["maxLength"]] if "maxLength" in schema else text

    def _take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise NoStub(f"the schema wants more than {MOST_VALUES} values", self.param)


def _number(schema: Mapping[str, Any]) -> Any:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    return low if low is not None else 0 if high is None else min(0, high)


def _referred(reference: Any, root: Any, param: str) -> Any:
    """The part of the schema that `#/...` names."""
    node = root
    for step in str(reference).removeprefix("#").strip("/").split("/"):
        node = node.get(step) if step and isinstance(node, dict) else node
    if not str(reference).startswith("#") or node is None:
        raise NoStub(f"the reference {reference!r}", param)
    return node
