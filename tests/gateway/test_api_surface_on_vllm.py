"""Each documented call works through the official OpenAI SDK and the generated gRPC client, on a real vLLM engine."""

import importlib.util
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import api_surface
import openai
import pytest

from tidegate_engine import checkpoints, live_engine
from tidegate_policy.predict import tool_use

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM CPU build"),
]

SLOW = {"firstToken": "600s", "nextToken": "600s"}
"""The first call with logprobs compiles a kernel, which takes more than a minute on a busy machine."""


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
NAMED: Any = {"type": "function", "function": {"name": "find_city"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live_engine.Engine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    try:
        with live_engine.served(log, "--max-num-seqs", "8", *TOOLS) as started:
            yield started
    except checkpoints.MissingPackage as error:
        pytest.skip(str(error))


async def test_calls_through_the_sdk_and_grpc_on_vllm(up: Any, engine: live_engine.Engine) -> None:
    settings = {"listen": {"grpcPort": 0}, "health": {"interval": "500ms", "timeout": "30s"}, "timeouts": SLOW}
    async with up({"url": engine.http, "control": engine.control}, **settings) as client:
        async with client.openai() as sdk:
            for step in (
                api_surface.chat_and_completions,
                api_surface.responses,
                api_surface.streamed_responses,
                api_surface.models,
                api_surface.workflows,
                api_surface.relqueries,
            ):
                await step(sdk, live_engine.MODEL)
            with pytest.raises(openai.APIStatusError) as caught:  # a model that generates has no embeddings
                await sdk.embeddings.create(model=live_engine.MODEL, input="x")
            assert "engine rejects" in caught.value.message
            chat = await sdk.chat.completions.create(
                model=live_engine.MODEL,
                messages=api_surface.HELLO,
                max_tokens=4,
                logprobs=True,
                top_logprobs=2,
            )
            assert chat.choices[0].logprobs is not None
            assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
            for stream, tenant in ((False, "whole"), (True, "streamed")):
                await invoke_a_tool(sdk, tenant, stream=stream)
                found = client.gateway.core.tools.predict((tenant, "", "", live_engine.MODEL), tenant, tool_use.NO_TOOL)
                assert found.tool == "find_city", "the gateway has read the names in vLLM's answers"
            await streamed_logprobs(sdk)
            await structured_output(sdk)
        await api_surface.over_grpc(client.grpc, live_engine.MODEL)


async def test_embeddings_through_the_sdk_on_vllm(up: Any, tmp_path: pathlib.Path) -> None:
    """An engine that serves the same weights as a model of embeddings, with Tidegate's scheduler."""
    try:
        with live_engine.served(tmp_path / "engine.log", "--runner", "pooling", "--convert", "embed") as engine:
            settings = {"listen": {"grpcPort": 0}, "health": {"interval": "500ms", "timeout": "30s"}, "timeouts": SLOW}
            async with (
                up({"url": engine.http, "control": engine.control}, **settings) as client,
                client.openai() as sdk,
            ):
                one = await sdk.embeddings.create(model=live_engine.MODEL, input="a city")
                listed = await sdk.embeddings.create(model=live_engine.MODEL, input=["a city", "a river"])
    except checkpoints.MissingPackage as error:
        pytest.skip(str(error))
    vectors = [item.embedding for item in listed.data]
    assert [item.index for item in listed.data] == [0, 1]
    assert vectors[0] == pytest.approx(one.data[0].embedding, abs=1e-2)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)


async def streamed_logprobs(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=live_engine.MODEL, messages=api_surface.HELLO, max_tokens=4, logprobs=True, top_logprobs=2, stream=True
    )
    choices = [choice async for chunk in stream for choice in chunk.choices]
    found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    assert found
    assert all(len(token.top_logprobs) == 2 for token in found)


async def structured_output(sdk: openai.AsyncOpenAI) -> None:
    """The answer has the form that the request asks for, whole and streamed."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    asked: Any = {"model": live_engine.MODEL, "messages": api_surface.HELLO, "response_format": form, "max_tokens": 64}
    whole = await sdk.chat.completions.create(**asked)
    streamed = await sdk.chat.completions.create(**asked, stream=True)
    text = "".join([choice.delta.content or "" async for chunk in streamed for choice in chunk.choices])
    for answer in (whole.choices[0].message.content, text):
        assert json.loads(answer or "")["city"] in ("Paris", "Rome")


async def invoke_a_tool(sdk: openai.AsyncOpenAI, tenant: str, *, stream: bool) -> None:
    """As many calls as the gateway needs to predict the tool. The arguments are what this small model makes of them, and
    vLLM finds no tool in an answer that is cut off. It samples by a seed, so the calls before these decide the answers."""
    for number in range(tool_use.LEAST_SEEN):
        answer: Any = await sdk.chat.completions.create(
            model=live_engine.MODEL,
            messages=api_surface.HELLO,
            tools=[api_surface.TOOL],
            tool_choice=NAMED,
            max_tokens=64,
            stream=stream,
            extra_headers={"x-session-id": f"s{number}", "x-tidegate-tenant": tenant},
        )
        if stream:
            assert [event async for event in answer]
