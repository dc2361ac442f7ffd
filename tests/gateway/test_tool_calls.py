"""Which tool an answer invokes, and that the next calls of its kind carry what is known of it to the engine."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway.openai import chat_completions, event_stream, responses, tool_calls

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "message", "tool_calls", "function", "function_call", "name", "output"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


def message(*names: object, legacy: object = None) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    return said if legacy is None else {"role": "assistant", "function_call": legacy}


@pytest.mark.parametrize(
    ("said", "tool"),
    [
        (message("search"), "search"),
        (message("search", "read"), "search"),
        (message(None, 7, "read"), "read"),
        (message(legacy={"name": "old", "arguments": "{}"}), "old"),
        (message(), ""),
        ({"role": "assistant", "content": "a tool", "tool_calls": None, "function_call": None}, ""),
    ],
)
def test_a_chat_answer_names_its_first_tool(said: dict[str, Any], tool: str) -> None:
    assert tool_calls.of_chat({"choices": [{"index": 0, "message": said}]}) == tool
    assert tool_calls.of_chat_event(orjson.dumps({"choices": [{"index": 0, "delta": said}]})) == tool


@pytest.mark.parametrize("more", [{}, 7, {"type": "message"}])
def test_no_more_parts_of_an_answer_are_searched_for_a_tool_than_answers_have(more: object) -> None:
    few, many = tool_calls.MOST_SEARCHED - 1, tool_calls.MOST_SEARCHED
    named = {"type": "function_call", "name": "search", "arguments": "{}"}
    choice, call = {"message": message("search")}, {"function": named}
    for count, tool in ((few, "search"), (many, "")):
        others = [more] * count
        assert tool_calls.of_chat({"choices": [*others, choice]}) == tool
        assert tool_calls.of_chat({"choices": [{"message": {"tool_calls": [*others, call]}}]}) == tool
        assert tool_calls.of_response({"output": [*others, named]}) == tool


@given(answer=JSON)
def test_an_answer_of_any_form_names_a_tool_or_none(answer: object) -> None:
    assert isinstance(tool_calls.of_chat_event(orjson.dumps(answer)), str)
    assert isinstance(tool_calls.of_response(answer), str)
    if isinstance(answer, dict):
        assert isinstance(tool_calls.of_chat(answer), str)


def tapped(*events: dict[str, Any], offers_tools: bool = True) -> str:
    """The tool that a stream of these deltas names."""
    meter = event_stream.Meter(endpoint=chat_completions.ENDPOINT, offers_tools=offers_tools)
    assert chat_completions.ENDPOINT.stream is not None
    tap = event_stream.Tap(chat_completions.ENDPOINT.stream, meter, wants_usage=True)
    for delta in events:
        event = b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n"
        assert tap.feed(event) == event
    return meter.tool


def test_a_stream_is_searched_for_a_tool_only_where_the_request_offers_tools_and_not_without_end() -> None:
    text = {"content": 'the "name" of a tool'}
    assert tapped({"role": "assistant"}, text, message("search")) == "search"
    assert tapped(message("search"), message("read")) == "search"
    assert tapped(message("search"), offers_tools=False) == ""
    assert tapped(*[{"content": "name"}] * (tool_calls.MOST_LOOKS - 1), message("search")) == "search"
    assert tapped(*[{"content": "name"}] * tool_calls.MOST_LOOKS, message("search")) == ""
    assert tapped(*[text] * 10 * tool_calls.MOST_LOOKS, message("search")) == "search", "an escaped mark is no marker"
    assert tapped({**message("search"), "content": "x" * tool_calls.MOST_BYTES}) == ""


def test_an_event_is_searched_for_a_tool_neither_where_it_is_long_nor_without_end_where_its_marker_is_no_data() -> None:
    stream = chat_completions.ENDPOINT.stream
    assert stream is not None
    meter = event_stream.Meter(endpoint=chat_completions.ENDPOINT, offers_tools=True)
    tap = event_stream.Tap(stream, meter, wants_usage=True)
    for _ in range(3):
        tap.feed(b'data: {"x":"\n:"name"\n' + b"a" * tool_calls.MOST_BYTES + b'"}\n\n')
    assert tap._looks == tool_calls.MOST_LOOKS
    for _ in range(3 * tool_calls.MOST_LOOKS):
        tap.feed(b'data: {"x":"\n:"name"\n"}\n\n')
    assert tap._looks == 0


def test_the_last_event_of_a_streamed_response_names_its_tool() -> None:
    stream = responses.ENDPOINT.stream
    assert stream is not None
    item = {"type": "function_call", "name": "search", "arguments": "{}"}
    payload = orjson.dumps({"response": {"output": [{"type": "message"}, item], "usage": None}})
    assert stream.read_named(b"response.completed", payload).tool == "search"
    assert stream.read_named(b"response.completed", orjson.dumps({"response": {"output": [3]}})).tool == ""


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS},
    "/v1/responses": {"input": "hello", "tools": [{"type": "function", "name": "search"}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_what_is_known_of_a_tool_reaches_the_engine_with_the_next_session(
    up: Any, path: str, stream: bool
) -> None:
    async with fake_engine.engine(tool="search", tokens=3) as engine, up(engine) as client:
        body = {"model": "fake", "stream": stream, **BODIES[path]}

        async def ask(session: str) -> dict[str, Any]:
            url, headers = client.url + path, {"x-session-id": session}
            async with client.http.post(url, json=body, headers=headers) as response:
                assert response.status == 200
                await response.read()
            found: dict[str, Any] = engine.bodies[-1]["vllm_xargs"]
            return found

        assert "tg.tool" not in await ask("first")
        for index in range(4):
            engine.prompt_tokens = 7
            await ask(f"s{index}")
            await asyncio.sleep(0.1)  # the tool runs
            engine.prompt_tokens = 7 + 3 + 40
            engine.tool = None
            await ask(f"s{index}")
            engine.tool = "search"
        labels = await ask("next")
        assert labels["tg.tool"] == "search"
        assert 100 <= labels["tg.tool_ms"] < 2000
        assert labels["tg.tool_return"] == 40


async def test_calls_without_a_session_or_without_tools_carry_no_tool(up: Any) -> None:
    async with fake_engine.engine(tool="search", tokens=3) as engine, up(engine) as client:
        for headers, fields in (({}, {"tools": TOOLS}), ({"x-session-id": "s"}, {})):
            for _ in range(6):
                assert (await client.ask(headers=headers, **fields))[0] == 200
            assert "tg.tool" not in engine.bodies[-1]["vllm_xargs"]
