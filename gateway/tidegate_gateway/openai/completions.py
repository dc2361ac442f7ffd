"""The endpoint `/v1/completions`: one or several prompts in, `n` continuations of each out."""

from collections.abc import Mapping
from typing import Any

from tidegate_gateway.openai import endpoint
from tidegate_gateway.openai.error_table import BadRequest

TOKEN_CHARACTERS = 4
"""The characters that a token id counts for."""


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
        if all(isinstance(item, str) for item in value):
            return len(value), sum(map(len, value))
        if all(map(endpoint.is_count, value)):
            return 1, TOKEN_CHARACTERS * len(value)
        if all(isinstance(item, list) and item and all(map(endpoint.is_count, item)) for item in value):
            return len(value), TOKEN_CHARACTERS * sum(map(len, value))
    raise BadRequest(f"{param} must be text, a list of texts, or token ids", param=param)


ENDPOINT = endpoint.Endpoint(
    name="completions",
    path="/v1/completions",
    operation="text_completion",
    read_size=read_size,
    is_answer=endpoint.has_choices,
    stream=endpoint.StreamDialect(),
)
