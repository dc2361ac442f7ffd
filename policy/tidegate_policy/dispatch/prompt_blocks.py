"""The chained hashes of the leading blocks of a prompt.

The hash of a block stands for the block and for everything before it, so two prompts have the same hash at a position only
if they are equal up to the end of that block. The salt comes before the first block: prompts for different models or
adapters, or of tenants that share no cache, have no hash in common. Gateways and virtual time use the same chain.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

BLOCK_BYTES = 1024
"""Bytes of the canonical prompt in one block: about 256 tokens of English text."""
MAX_BLOCKS = 256
"""Blocks of one prompt that are hashed. Longer prompts are compared by their first 256 KiB."""
TRACE_BLOCK_TOKENS = 256
"""Tokens of one block of a prompt of which a trace gives the shared parts."""

Part = tuple[int, int]
"""(content, tokens): a part of a prompt as a trace describes it. Equal contents have equal tokens."""


def chain(salt: Sequence[str], blocks: Iterable[bytes | memoryview]) -> tuple[int, ...]:
    """The hash of each block, over the salt and all blocks before it. Takes time in proportion to the bytes."""
    running = hashlib.blake2b(digest_size=8, usedforsecurity=False)
    for text in salt:
        encoded = text.encode("utf-8", "surrogatepass")
        running.update(len(encoded).to_bytes(8) + encoded)
    hashes = []
    for block in blocks:
        running.update(block)
        hashes.append(int.from_bytes(running.digest()))
    return tuple(hashes)


def of_bytes(prompt: bytes | bytearray) -> Iterator[memoryview]:
    """The whole blocks of a canonical prompt, at most `MAX_BLOCKS`. The last, partial block is left out."""
    view = memoryview(prompt)
    for number in range(min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS)):
        yield view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def of_parts(parts: Iterable[Part]) -> Iterator[bytes]:
    """The whole blocks of the shared parts of a prompt, at most `MAX_BLOCKS`."""
    content: list[Part] = []
    room, made = TRACE_BLOCK_TOKENS, 0
    for token, count in parts:
        left = count
        while left and made < MAX_BLOCKS:
            taken = min(left, room)
            if content and content[-1][0] == token:
                content[-1] = token, content[-1][1] + taken
            else:
                content.append((token, taken))
            left -= taken
            room -= taken
            if not room:
                yield repr(content).encode()
                content, room = [], TRACE_BLOCK_TOKENS
                made += 1
