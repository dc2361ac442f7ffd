"""The endpoint `/v1/completions`: one or several prompts in, `n` continuations of each out."""

from collections.abc import Iterator, Mapping
from typing import Any

from tidegate_gateway.openai import endpoint
from tidegate_gateway.openai.error_table import BadRequest

TOKEN_CHARACTERS = 4
"""The characters that a token id counts for."""

MOST_IDS = 500_000
"""Token ids of a request, and texts of one. One step of the event loop looks at all; a longer prompt can be a text."""
MOST_PROMPTS = 20_000
"""Prompts of token ids of a request, before the bound on its sequences counts."""


def read_size(body: Mapping[str, Any], most_choices: int) -> endpoint.RequestSize:
    """The size of a completion request. Raises `BadRequest`."""
    prompts, characters = text_size(body.get("prompt"), "prompt")
    return endpoint.RequestSize(
        prompts=prompts,
        characters=characters,
        choices=endpoint.choices(body, prompts, most_choices),
        max_tokens=endpoint.count(body, "max_tokens"),
    )


def text_size(value: object, param: str) -> tuple[int, int]:
    """Number and characters of the texts in a text, a list of texts, token ids, or lists of token ids. Raises
    `BadRequest`."""
    if isinstance(value, str):
        return 1, len(value)
    if isinstance(value, list) and value:
        if len(value) > MOST_IDS:
            raise BadRequest(f"{param} must have at most {MOST_IDS} entries", param=param)
        kinds = set(map(type, value))
        if kinds == {str}:
            return len(value), sum(map(len, value))
        if kinds == {int} and min(value) >= 0:
            return 1, TOKEN_CHARACTERS * len(value)
        if kinds == {list} and len(value) <= MOST_PROMPTS:
            ids = sum(map(len, value))
            if ids > MOST_IDS:
                raise BadRequest(f"{param} must have at most {MOST_IDS} token ids in all", param=param)
            if all(map(_are_ids, value)):
                return len(value), TOKEN_CHARACTERS * ids
    raise BadRequest(f"{param} must be text, a list of texts, or token ids", param=param)


def _are_ids(value: list[object]) -> bool:
    return set(map(type, value)) == {int} and min(value) >= 0  # type: ignore[type-var,operator]


def prompt_parts(body: Mapping[str, Any]) -> Iterator[object]:
    """The prompt. Of several prompts the first: engines reuse each one by itself, and they often begin alike."""
    prompt = body["prompt"]
    yield prompt[0] if isinstance(prompt, list) and not endpoint.is_count(prompt[0]) else prompt


ENDPOINT: endpoint.Endpoint = endpoint.Endpoint(
    name="completions",
    path="/v1/completions",
    operation="text_completion",
    read_size=read_size,
    prompt_field="prompt",
    prompt_parts=prompt_parts,
    is_answer=endpoint.has_choices,
    stream=endpoint.StreamDialect(),
)
