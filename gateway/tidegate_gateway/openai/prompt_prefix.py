"""Which leading blocks does the prompt of a request have? The chained hashes by which dispatch knows prefixes.

The gateway has no tokenizer. It hashes blocks of 1,024 bytes of the canonical prompt: the parts of the body that the engine
renders before the answer (tools, then messages; or the prompt), in order, as JSON. How many tokens a block holds follows
from the predicted size of the whole prompt: a block of a prompt of 10,240 canonical bytes holds a tenth of its tokens.
Equal prompts give equal blocks. A prompt that is rendered alike from another JSON text is missed, which costs time and is
no error.

At most 256 blocks are hashed. The salt is the model (an adapter has a name of its own) and vLLM's `cache_salt`.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from tidegate_gateway.openai import endpoint
from tidegate_policy import immutable
from tidegate_policy.dispatch import prompt_blocks

MOST_BYTES = prompt_blocks.MAX_BLOCKS * prompt_blocks.BLOCK_BYTES
CACHE_SALT = "cache_salt"
"""The body field by which vLLM separates the prefixes of its callers."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class PromptPrefix:
    """The leading blocks of one prompt."""

    blocks: tuple[int, ...] = ()
    """Their chained hashes."""
    share: float = 0.0
    """The share of the prompt that one block holds."""


def read(kind: endpoint.Endpoint, body: Mapping[str, Any], model: str, size: endpoint.RequestSize) -> PromptPrefix:
    """The blocks of a request's prompt; none for a short prompt, or for one that cannot be written as JSON."""
    if size.characters < prompt_blocks.BLOCK_BYTES and not size.media and not body.get("tools"):
        return PromptPrefix()
    prompt = bytearray()
    whole, left_out = True, 0
    try:
        for part in kind.prompt_parts(body):
            if len(prompt) >= MOST_BYTES:
                whole = False
                break
            part, all_of_it = _cut(part)
            written = orjson.dumps(part)
            prompt += written
            if all_of_it > MOST_BYTES:
                whole = False
                left_out += len(written) * (all_of_it - MOST_BYTES) // MOST_BYTES
    except orjson.JSONEncodeError:  # orjson reads deeper than it writes
        return PromptPrefix()
    total = len(prompt) if whole else max(len(prompt) + left_out, size.characters)
    salt = body.get(CACHE_SALT)
    blocks = prompt_blocks.chain((model, salt if isinstance(salt, str) else ""), prompt_blocks.of_bytes(prompt))
    return PromptPrefix(blocks=blocks, share=prompt_blocks.BLOCK_BYTES / max(total, 1))


def _cut(part: object) -> tuple[object, int]:
    """A part of a prompt whose text or list has `MOST_BYTES` entries at most, and the entries that it had. What is left
    out lies behind all blocks."""
    if isinstance(part, dict):
        content = part.get("content")
        if isinstance(content, str) and len(content) > MOST_BYTES:
            return {**part, "content": content[:MOST_BYTES]}, len(content)
    elif isinstance(part, str | list) and len(part) > MOST_BYTES:
        return part[:MOST_BYTES], len(part)
    return part, 0


def isolate(body: dict[str, Any], tenant: str) -> None:
    """Gives the body a `cache_salt` of its tenant, so that neither engines nor dispatch reuse a prefix across tenants. A
    client's own salt separates further. A salt that is not text stays, and the engine rejects it."""
    salt = body.get(CACHE_SALT)
    if salt is None or isinstance(salt, str):
        named = orjson.dumps([tenant, salt])
        body[CACHE_SALT] = hashlib.blake2b(named, digest_size=16, usedforsecurity=False).hexdigest()
