"""`tidegate up` with simulated engines behind a real Envoy: the whole system, asked by the OpenAI SDK."""

import asyncio
import pathlib
import urllib.parse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import aiohttp
import envoy_process
import openai
import yaml

from tidegate_cli import processes


async def test_the_openai_sdk_through_envoy(
    up_system: Callable[..., AbstractContextManager[Any]], tmp_path: pathlib.Path
) -> None:
    picker, file = f"127.0.0.1:{processes.free_port()}", tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"listen": {"extProcPort": int(picker.split(":")[1])}}))
    with up_system("--engines=sim:a100,a6000", "--sim-speed=20", f"--config={file}") as system:
        async with aiohttp.ClientSession() as http, http.get(f"{system.admin_url}/admin/state") as answer:
            engines = [urllib.parse.urlsplit(engine["url"]).netloc for engine in (await answer.json())["engines"]]
        config = envoy_process.configuration(picker, engines, failure_mode_allow=False)
        async with (
            envoy_process.envoy(tmp_path, config) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            model = (await client.models.list()).data[0].id
            ask: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 20,
            }
            answers = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
            assert all(answer.usage.completion_tokens > 0 for answer in answers)
            texts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**ask, stream=True)
                if chunk.choices
            ]
            assert "".join(texts)
        async with aiohttp.ClientSession() as http, http.get(f"{system.admin_url}/admin/state") as answer:
            recent = (await answer.json())["recent"]
        assert len(recent) == 9
        assert {call["engine"] for call in recent} <= {"a100", "a6000"}
