"""`/v1/embeddings` of a simulated engine: one vector for each text, after the time of its prompt.

A vector depends on its text alone and carries no meaning. Real engines serve embeddings with models that generate no text;
a simulated engine serves both with one name.
"""

import base64
import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_policy.model import Call
from tidegate_sim import sim_request
from tidegate_sim.engine_limits import Prefix

DIMENSIONS, MOST_DIMENSIONS = 8, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A validated request body."""

    model: str
    inputs: tuple[bytes, ...]
    """The JSON of each text or list of token ids."""
    calls: tuple[Call, ...]
    """The work of each input: its prompt, and the one step that ends it."""
    contents: tuple[Iterator[Prefix], ...]
    """The content of each input, to be read once."""
    dimensions: int
    in_base64: bool


def parse(body: bytes, *, models: Sequence[str]) -> EmbeddingRequest:
    """The request in `body`, to an engine that serves `models`. Raises `sim_request.BadRequest`."""
    fields, model = sim_request.of_model(body, models)
    given = fields.get("input")
    lengths = sim_request.prompt_lengths(given, "input")
    encoding = fields.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise sim_request.BadRequest("encoding_format must be float or base64", param="encoding_format")
    dimensions = sim_request.at_least_1(fields, "dimensions") or DIMENSIONS
    if dimensions > MOST_DIMENSIONS:
        raise sim_request.BadRequest(f"dimensions must be at most {MOST_DIMENSIONS}", param="dimensions")
    texts = sim_request.prompts_of(given)
    return EmbeddingRequest(
        model=model,
        inputs=tuple(map(orjson.dumps, texts)),
        calls=sim_request.calls_of(fields, lengths, max_tokens=1),
        contents=sim_request.contents_of(fields, model, texts),
        dimensions=dimensions,
        in_base64=encoding == "base64",
    )


def answer(request: EmbeddingRequest) -> dict[str, Any]:
    """The whole answer."""
    data = []
    for index, text in enumerate(request.inputs):
        vector = _vector(text, request.dimensions)
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if request.in_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": packed})
    tokens = sum(call.prompt_tokens for call in request.calls)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


def _vector(text: bytes, dimensions: int) -> list[float]:
    """A vector of length 1."""
    numbers = hashlib.shake_128(text).digest(2 * dimensions)
    values = [float(value) - 32767.5 for value in struct.unpack(f"<{dimensions}H", numbers)]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]
