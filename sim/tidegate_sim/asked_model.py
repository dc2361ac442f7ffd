"""The language model that the selector `llm` asks in virtual time.

A trace has no model, so the row exists only where the environment names one: `TIDEGATE_BENCH_MODEL_URL`, the address of an
OpenAI-compatible API with its /v1, and `TIDEGATE_BENCH_MODEL`, the name of its model. Virtual time waits for the answer, so
the row shows what the choices of the model are worth, and not whether they come in time.
"""

import asyncio
import os

from tidegate_control import bounded_http, llm_adviser
from tidegate_policy.steer import llm_choice

URL, NAME = "TIDEGATE_BENCH_MODEL_URL", "TIDEGATE_BENCH_MODEL"
TIMEOUT_S = 120.0


def is_there() -> bool:
    """Whether there is a model to ask."""
    return bool(os.environ.get(URL))


def answer(question: llm_choice.Question) -> llm_choice.Answer:
    """What the model says."""
    return asyncio.run(_answer(question))


async def _answer(question: llm_choice.Question) -> llm_choice.Answer:
    model = llm_adviser.Model(url=os.environ[URL], name=os.environ.get(NAME, "model"), timeout_s=TIMEOUT_S)
    return await llm_adviser.ask(bounded_http.Client(), model, question.messages, question.allow)
