"""Each documented call works through the official OpenAI SDK and the generated gRPC client, on a real vLLM engine."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import api_surface
import openai
import pytest

from tidegate_engine import checkpoints, live_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM CPU build"),
]

SLOW = {"firstToken": "600s", "nextToken": "600s"}
"""The first call with logprobs compiles a kernel, which takes more than a minute on a busy machine."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live_engine.Engine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    try:
        with live_engine.served(log, "--max-num-seqs", "8") as started:
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
        await api_surface.over_grpc(client.grpc, live_engine.MODEL)
