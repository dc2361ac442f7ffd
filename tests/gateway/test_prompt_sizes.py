"""What counts as the length of a prompt: all that the engine renders into it."""

from typing import Any

import orjson
import pytest

import fake_engine
from tidegate_gateway.openai import chat_completions, responses

TOOL = {"type": "function", "function": {"name": "search", "description": "x" * 1000, "parameters": {}}}

USER = {"role": "user", "content": "x"}


def chat(*messages: dict[str, Any], **fields: Any) -> Any:
    return chat_completions.read_size({"messages": list(messages), **fields}, 16)


def test_tools_and_the_arguments_of_their_invocations_are_parts_of_a_chat() -> None:
    plain = chat({"role": "user", "content": "four"})
    assert plain.characters == 4
    offered = chat({"role": "user", "content": "four"}, tools=[TOOL])
    assert offered.characters == 4 + len(orjson.dumps([TOOL]))
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{" + " " * 98 + "}"}}
    assert chat({"role": "assistant", "content": None, "tool_calls": [call, call]}).characters == 200
    assert chat({"role": "assistant", "function_call": call["function"]}).characters == 100


def test_invocations_of_a_wrong_form_count_nothing() -> None:
    for wrong in (None, 1, "x", [None], [1], [{"function": "x"}], [{"function": {"arguments": {}}}]):
        assert chat({"role": "assistant", "content": "four", "tool_calls": wrong}).characters == 4


def test_an_image_with_a_text_is_an_image() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for part in (image, {**image, "text": ""}, {**image, "text": "four"}):
        found = chat({"role": "user", "content": [part]})
        assert (found.media, found.characters) == (1, len(part.get("text", "")))
    assert chat({"role": "user", "content": [{"type": "text", "text": "four", "cache_control": {"x": 1}}]}).media == 0


def test_tools_are_parts_of_a_response() -> None:
    found = responses.read_size({"input": "four", "tools": [TOOL]}, 1)
    assert found.characters == 4 + len(orjson.dumps([TOOL]))


@pytest.mark.parametrize("field", ["tools", "functions"])
@pytest.mark.parametrize(("path", "given"), [("chat/completions", {"messages": [USER]}), ("responses", {"input": "x"})])
async def test_tools_that_are_nested_too_deeply_are_the_fault_of_the_request(
    up: Any, path: str, given: dict[str, Any], field: str
) -> None:
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    body = orjson.dumps({"model": "fake", **given})
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        data = body[:-1] + b',"%s":[%s]}' % (field.encode(), deep)
        status, error, _ = await client.send(
            "POST", f"/v1/{path}", data=data, headers={"content-type": "application/json"}
        )
        assert status == 400, error
        assert not engine.bodies
