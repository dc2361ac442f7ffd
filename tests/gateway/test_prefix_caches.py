"""The gateway reads from an engine's metrics whether it has a prefix cache, and believes no other to keep prompts."""

import asyncio
from typing import Any

import pytest

import fake_engine

PROMPT = "many words " * 2000
PAGE = b'vllm:prefix_cache_queries_total{engine="0"} %d\n'


@pytest.mark.parametrize(
    ("page", "is_kept"),
    [
        (PAGE % 0, False),
        (PAGE % 5000, True),
        (b"vllm:prompt_tokens_total 5000\n", True),
        (PAGE % 0 + b'vllm:prefix_cache_queries_total{engine="1"} 7\n', True),
    ],
    ids=["none", "one", "not told", "of one core of two"],
)
async def test_prompts_are_kept_where_the_metrics_show_a_prefix_cache(up: Any, page: bytes, is_kept: bool) -> None:
    async with fake_engine.engine(metrics=page) as engine, up(engine) as client:
        assert (await client.ask("/v1/completions", prompt=PROMPT))[0] == 200
        assert bool(client.gateway.core.dispatcher.prefixes.entries) == is_kept


async def test_an_engine_that_gets_a_prefix_cache_is_believed_again(up: Any) -> None:
    async with fake_engine.engine(metrics=PAGE % 0) as engine, up(engine) as client:
        prefixes = client.gateway.core.dispatcher.prefixes
        await client.ask("/v1/completions", prompt=PROMPT)
        assert not prefixes.entries
        engine.metrics = PAGE % 4000
        async with asyncio.timeout(30):
            while not prefixes.entries:
                await client.ask("/v1/completions", prompt=PROMPT)
