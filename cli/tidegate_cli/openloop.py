"""Open-loop load on a gateway: each call is sent at its own instant, even when answers to earlier calls are late.

Prompts consist of common words of about one token each. Answers have exact lengths (`ignore_eos`). A call with `after` is
sent its delay after the last of those calls has finished. All times are measured by the client. `replay_command` makes the
report.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import orjson

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")
CONNECT_S = 10.0


class Refused(Exception):
    """The gateway wants another API key; the message is its status and its sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A call to make."""

    id: str
    at_s: float
    """Seconds since the start of the run, or since the end of the last call in `after`."""
    prompt_tokens: int
    output_tokens: int
    headers: Mapping[str, str]
    after: tuple[str, ...] = ()
    workflow: str = ""
    """The id of its workflow at the gateway."""
    seed: int = 0
    """Chooses the words of the prompt; calls with the same seed share a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run gave."""

    calls: list["Outcome"]
    """In the order of the plan."""
    workflows: dict[str, str]
    """The outcome that the gateway gave to each workflow: met, late or another. A server without workflows gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the client measured; instants are in seconds since the start of the run."""

    id: str
    sent_at_s: float
    first_at_s: float | None = None
    last_at_s: float | None = None
    tokens: int = 0
    engine: str = ""
    error: str = ""
    """Empty for a success; else the status and the gateway's message."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at_s is None else self.first_at_s - self.sent_at_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.error or self.last_at_s is None else self.last_at_s - self.sent_at_s

    @property
    def tpot_s(self) -> float | None:
        if self.error or self.first_at_s is None or self.last_at_s is None or self.tokens < 2:
            return None
        return (self.last_at_s - self.first_at_s) / (self.tokens - 1)


async def run(
    planned: Sequence[Planned],
    *,
    url: str,
    model: str | None,
    timeout_s: float,
    progress: asyncio.Queue[Outcome],
    headers: Mapping[str, str] | None = None,
) -> Result:
    """Makes all calls, and completes each workflow after its last call. Puts each call's outcome into `progress` too. Every
    request has `headers`."""
    left = Counter(call.workflow for call in planned if call.workflow)
    workflows: dict[str, str] = {}
    start = asyncio.get_running_loop().time()
    ended = {call.id: asyncio.Event() for call in planned}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0)
    sessions = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
    async with sessions as session, asyncio.TaskGroup() as tasks:

        async def make(call: Planned) -> Outcome:
            for before in call.after:
                await ended[before].wait()
            since = asyncio.get_running_loop().time() if call.after else start
            await asyncio.sleep(since + call.at_s - asyncio.get_running_loop().time())
            outcome = await _call(session, call, f"{url}/v1/completions", model, start)
            ended[call.id].set()
            progress.put_nowait(outcome)
            left[call.workflow] -= 1
            if call.workflow and not left[call.workflow]:
                workflows.update(await _complete(session, url, call))
            return outcome

        made = [tasks.create_task(make(call)) for call in planned]
    return Result(calls=[task.result() for task in made], workflows=workflows)


async def only_model(url: str, headers: Mapping[str, str]) -> str | None:
    """The first model that the gateway lists; None when it does not answer with one. Raises `Refused`."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            if response.status in (401, 403):
                raise Refused(f"{response.status} {_sentence(await response.read())}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return None


async def _call(session: aiohttp.ClientSession, call: Planned, url: str, model: str | None, start: float) -> Outcome:
    loop = asyncio.get_running_loop()
    sent_at_s, first_at_s, last_at_s, tokens, engine = loop.time() - start, None, None, 0, ""
    error = "the stream ended without [DONE]"
    try:
        headers = {"content-type": "application/json", **call.headers}
        async with session.post(url, data=_body(call, model), headers=headers) as response:
            engine = response.headers.get("x-tidegate-engine", "")
            if response.status != 200:
                error = f"{response.status} {_sentence(await response.read())}"
            else:
                async for event in _events(response.content):
                    if event == b"[DONE]":
                        error = ""
                        break
                    fields = orjson.loads(event)
                    if "error" in fields:
                        error = f"in mid-stream: {fields['error'].get('message')}"
                        break
                    tokens = (fields.get("usage") or {}).get("completion_tokens", tokens)
                    if any(choice.get("text") for choice in fields.get("choices", ())):
                        last_at_s = loop.time() - start
                        first_at_s = last_at_s if first_at_s is None else first_at_s
    except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(
        id=call.id,
        sent_at_s=sent_at_s,
        first_at_s=first_at_s,
        last_at_s=last_at_s,
        tokens=tokens,
        engine=engine,
        error=error,
    )


async def _complete(session: aiohttp.ClientSession, url: str, call: Planned) -> dict[str, str]:
    """Completes the workflow of its last call, and asks for its outcome; empty if the server does not tell."""
    path, headers = f"{url}/v1/workflows/{call.workflow}", {}
    if "x-tidegate-tenant" in call.headers:
        headers["x-tidegate-tenant"] = call.headers["x-tidegate-tenant"]
    try:
        async with session.post(f"{path}/complete", headers=headers):
            pass  # it may have ended already
        async with session.get(path, headers=headers) as response:
            outcome = orjson.loads(await response.read()).get("outcome")
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
        return {}
    return {call.workflow: outcome} if isinstance(outcome, str) else {}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    buffer = b""
    async for chunk in content.iter_any():
        buffer += chunk
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:]


def _body(call: Planned, model: str | None) -> bytes:
    body = {
        "prompt": prompt(call.prompt_tokens, call.seed),
        "max_tokens": call.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(body if model is None else {"model": model, **body})


def prompt(tokens: int, seed: int) -> str:
    """About `tokens` tokens of common words. Prompts of two seeds differ from the first word on."""
    state = seed * 2_654_435_761 + 12_345
    words = []
    for _ in range(tokens):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        words.append(_WORDS[state >> 27])
    return " ".join(words)


def _sentence(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
