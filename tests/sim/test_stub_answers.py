"""A simulated engine answers in the form that a request asks for, or rejects the form."""

import json
from typing import Any

import jsonschema
import pytest

from tidegate_sim import sim_request, stub_answers

NAMED = {"a": {"type": "string"}, "b": {"type": "integer", "minimum": 3}}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": NAMED, "required": ["a", "b"]},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2},
    {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": {"type": "number", "maximum": -2}}},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": ["string", "null"], "minLength": 20, "maxLength": 24},
    {"type": "string", "format": "date-time"},
    {"const": {"k": 1}},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}
TOOLS = [{"type": "function", "function": {"name": "clock"}}, {"type": "function", "function": WEATHER}]


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_fits_the_schema(schema: Any) -> None:
    stub = stub_answers.of({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}})
    assert stub is not None
    jsonschema.validate(json.loads("".join(stub.pieces)), schema)


@pytest.mark.parametrize(
    ("choice", "name", "arguments"),
    [
        ("required", "clock", {}),
        ({"type": "function", "function": {"name": "weather"}}, "weather", {"city": "simulated"}),
    ],
)
def test_a_required_tool_is_called_with_arguments_of_its_schema(choice: Any, name: str, arguments: Any) -> None:
    stub = stub_answers.of({"tools": TOOLS, "tool_choice": choice})
    assert stub is not None
    assert (stub.tool, json.loads("".join(stub.pieces))) == (name, arguments)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": 7}}}}, "response_format"),
        (
            schema_of(
                {
                    "type": "object",
                    "required": list("abcdefghij"),
                    "properties": {key: {"$ref": "#"} for key in "abcdefghij"},
                }
            ),
            "response_format",
        ),
        (schema_of({"type": "array", "minItems": 10**9}), "response_format"),
        (schema_of({"type": "string", "minLength": 10**9}), "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
async def test_a_form_without_a_stub_is_rejected_with_its_field(fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "?"}], **fields}).encode()
    with pytest.raises(sim_request.BadRequest, match="simulated engines have no answer of this form") as rejected:
        sim_request.parse(body, chat=True, models=["m"])
    assert rejected.value.param == param


@pytest.mark.parametrize(
    "fields", [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}, {"response_format": {"type": "text"}}]
)
def test_a_request_without_a_form_gets_filler(fields: dict[str, Any]) -> None:
    assert stub_answers.of(fields) is None
