"""Times one live engine through its OpenAI API, alone on the engine: prefills of several lengths, and decodes of several
batches and contexts. `tidegate_policy.predict.cost_fit` fits a cost model to the timings.

Prompts are random tokens, so the prefix cache never helps. A decode is timed by the gaps of one stream while all streams
of its batch decode.
"""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import aiohttp
import orjson

from tidegate_cli.command_errors import Failed
from tidegate_policy.predict.cost_fit import Timing

PREFILL_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096)
REPEATS = 5
DECODED = 24
"""Tokens of each stream while all streams of its batch decode."""
MOST_DECODED = DECODED + 32
"""Tokens of a stream at most, those during the prefills of the others included."""
TOKEN_IDS = range(5, 120)
"""Token numbers that every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A live engine, as its API describes it."""

    url: str
    model: str
    max_model_len: int
    kv_tokens: int | None
    """Tokens of its KV cache; None = its metrics do not say."""


async def inspect(url: str) -> Engine:
    """Raises `Failed` if no OpenAI-compatible engine answers at `url`."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            async with session.get(f"{url}/v1/models") as response:
                model = (await response.json())["data"][0]
            async with session.get(f"{url}/metrics") as response:
                metrics = await response.text() if response.status == 200 else ""
        return Engine(
            url=url,
            model=str(model["id"]),
            max_model_len=int(model.get("max_model_len") or 4096),
            kv_tokens=kv_tokens(metrics),
        )
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise Failed(f"no engine answers at {url}: {type(error).__name__} {error}".rstrip()) from error


def kv_tokens(metrics: str) -> int | None:
    """The capacity that vLLM's metric `cache_config_info` states."""
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    fields = dict(re.findall(r'(\w+)="([^"]*)"', line[1])) if line else {}
    blocks, size = fields.get("num_gpu_blocks", ""), fields.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


async def measure(
    engine: Engine, *, max_batch: int, max_step_tokens: int, tell: Callable[[str], object], seed: int = 0
) -> list[Timing]:
    """All timings of an engine that serves nothing else. Raises `Failed` if a request fails."""
    rng = random.Random(seed)
    room = min(engine.kv_tokens or 10**9, 10**9)
    timings: list[Timing] = []
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = _Client(session, engine, rng)
        await client.stream(64, 4)  # warm up
        for tokens in PREFILL_TOKENS:
            if tokens + 2 <= min(engine.max_model_len, room):
                timings.append(await _prefill(client, tokens, max_step_tokens))
                tell(f"prefill of {tokens} tokens: {timings[-1].seconds:.4f} s")
        for context in CONTEXTS:
            for batch in BATCHES:
                fits = batch * (context + MOST_DECODED) <= 0.9 * room and context + MOST_DECODED < engine.max_model_len
                if batch <= max_batch and fits and batch * context <= min(65536, 16 * max_step_tokens):
                    timings.append(await _decode(client, batch, context, max_step_tokens))
                    tell(f"step of {batch} decodes at {context} tokens: {timings[-1].seconds:.4f} s")
    rng.shuffle(timings)  # the timings that are held out are of all kinds
    return timings


async def _prefill(client: "_Client", tokens: int, max_step_tokens: int) -> Timing:
    seconds = [(await client.stream(tokens, 1)).first_s for _ in range(REPEATS)]
    return Timing(
        seconds=median(seconds),
        steps=-(-tokens // max_step_tokens),
        uncached=tokens,
        attended=tokens * (tokens + 1) // 2,
        requests=1,
    )


async def _decode(client: "_Client", batch: int, context: int, max_step_tokens: int) -> Timing:
    # The streams that prefill first decode while the others prefill.
    tokens = DECODED + 2 * (batch * context // max_step_tokens)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(client.stream(context, tokens)) for _ in range(batch)]
    streams = [task.result() for task in running]
    since_s = max(stream.instants_s[0] for stream in streams)
    until_s = min(stream.instants_s[-1] for stream in streams)
    together = [[instant_s for instant_s in stream.instants_s if since_s <= instant_s <= until_s] for stream in streams]
    # An engine may send several tokens at once, so the time of a step is the time of a stream over its tokens.
    steps_s = [(seen[-1] - seen[0]) / (len(seen) - 1) for seen in together if len(seen) > 1]
    if not steps_s:  # the engine's limits are below the batch
        raise Failed(
            f"{batch} streams never decoded together; pass the engine's --max-num-seqs as "
            "--max-batch and its --max-num-batched-tokens as --max-step-tokens"
        )
    return Timing(seconds=median(steps_s), decodes=batch, context=batch * (context + tokens - DECODED // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """One answer."""

    first_s: float
    """Seconds from the request to the first token."""
    instants_s: Sequence[float]


class _Client:
    def __init__(self, session: aiohttp.ClientSession, engine: Engine, rng: random.Random) -> None:
        self._session = session
        self._engine = engine
        self._rng = rng

    async def stream(self, prompt_tokens: int, output_tokens: int) -> _Stream:
        """Sends a prompt of random tokens and times its answer."""
        body = {
            "model": self._engine.model,
            "prompt": self._rng.choices(TOKEN_IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        loop = asyncio.get_running_loop()
        sent_at_s = loop.time()
        try:
            async with self._session.post(
                f"{self._engine.url}/v1/completions",
                data=orjson.dumps(body),
                headers={"content-type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise Failed(f"the engine answered {response.status}: {(await response.text())[:300]}")
                instants_s = [
                    loop.time()
                    async for line in response.content
                    if line.startswith(b'data: {"') and b'"choices":[{' in line
                ]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Failed(f"the engine stopped answering: {type(error).__name__} {error}".rstrip()) from error
        if not instants_s:
            raise Failed("the engine's answer had no token")
        return _Stream(first_s=instants_s[0] - sent_at_s, instants_s=instants_s)
