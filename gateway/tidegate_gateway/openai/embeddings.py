"""The endpoint `/v1/embeddings`: one or several texts in, one vector for each out. Its engines generate no tokens."""

from collections.abc import Mapping
from typing import Any

from tidegate_gateway.openai import completions, endpoint
from tidegate_gateway.openai.error_table import BadRequest

MOST_INPUTS = 2048
"""Texts of a request, as in OpenAI's API."""


def read_size(body: Mapping[str, Any], most_choices: int) -> endpoint.RequestSize:
    """The size of a request. The bound on sequences is for generated ones and does not count. Raises `BadRequest`."""
    inputs, characters = completions.text_size(body.get("input"), "input")
    if inputs > MOST_INPUTS:
        raise BadRequest(f"input must have at most {MOST_INPUTS} texts; send several requests", param="input")
    return endpoint.RequestSize(prompts=inputs, characters=characters, max_tokens=1)


def _has_vectors(answer: Mapping[str, Any]) -> bool:
    data = answer.get("data")
    return isinstance(data, list) and bool(data) and all(isinstance(item, dict) for item in data)


ENDPOINT: endpoint.Endpoint = endpoint.Endpoint(
    name="embeddings",
    path="/v1/embeddings",
    operation="embeddings",
    read_size=read_size,
    prompt_field="input",
    is_answer=_has_vectors,
    output_usage=None,
)
