"""Asks a language model which scheduling policy a pool should have, over OpenAI's chat API.

`tidegate_policy.steer.llm_choice` writes the question and reads the answer. Everything that can go wrong here (no
connection, an error status, a late or a long answer) is an `Answer` without a policy, so the rules decide.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from tidegate_policy.steer import llm_choice

MOST_BYTES = 65_536
"""Of a response."""
MOST_TOKENS = 32
"""Of an answer: one short JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that is asked."""

    url: str
    """Base address of the API, for example http://chat-gateway.serving.svc:8000/v1."""
    name: str
    timeout_s: float
    key: str | None = None
    """API key."""


async def ask(
    session: aiohttp.ClientSession, model: Model, messages: Sequence[Mapping[str, str]], allow: Collection[str]
) -> llm_choice.Answer:
    """One question. The call never takes longer than `model.timeout_s` and raises nothing."""
    schema = {"name": "choice", "strict": True, "schema": llm_choice.answer_schema(allow)}
    body = {
        "model": model.name,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    headers = {} if model.key is None else {"Authorization": f"Bearer {model.key}"}
    try:
        async with (
            asyncio.timeout(model.timeout_s),
            session.post(
                f"{model.url.rstrip('/')}/chat/completions", json=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            if response.status != 200:
                return _none(f"the model's server answered with status {response.status}")
            received = await response.content.read(MOST_BYTES + 1)
            while not response.content.at_eof() and len(received) <= MOST_BYTES:
                received += await response.content.read(MOST_BYTES + 1)
    except TimeoutError:
        return _none(f"the model gave no answer in {model.timeout_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return _none(f"the model cannot be reached ({type(error).__name__})")
    if len(received) > MOST_BYTES:
        return _none(f"the response has more than {MOST_BYTES} bytes")
    try:
        text = json.loads(received)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return _none("the response is no chat completion")
    return llm_choice.read(text, allow) if isinstance(text, str) else _none("the response has no text")


def _none(trouble: str) -> llm_choice.Answer:
    return llm_choice.Answer(policy=None, trouble=trouble)
