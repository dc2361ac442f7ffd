"""Asks a language model which scheduling policy a pool should have, over OpenAI's chat API.

`tidegate_policy.steer.llm_choice` writes the question and reads the answer. Everything that can go wrong here (no
connection, an error status, a late or a long answer) is an `Answer` without a policy, so the rules decide.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidegate_control import bounded_http
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
    client: bounded_http.Client, model: Model, messages: Sequence[Mapping[str, str]], allow: Collection[str]
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
    try:
        answer = await client.request(
            "POST",
            f"{model.url.rstrip('/')}/chat/completions",
            headers={} if model.key is None else {"authorization": f"Bearer {model.key}"},
            body=json.dumps(body).encode(),
            most_bytes=MOST_BYTES,
            timeout_s=model.timeout_s,
        )
    except TimeoutError:
        return _none(f"the model gave no answer in {model.timeout_s:g} s")
    except bounded_http.BadAnswer as error:
        return _none(str(error))
    except (OSError, ValueError) as error:
        return _none(f"the model cannot be reached ({type(error).__name__})")
    if answer.status != 200:
        return _none(f"the model's server answered with status {answer.status}")
    try:
        text = json.loads(answer.body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return _none("the response is no chat completion")
    return llm_choice.read(text, allow) if isinstance(text, str) else _none("the response has no text")


def _none(trouble: str) -> llm_choice.Answer:
    return llm_choice.Answer(policy=None, trouble=trouble)
