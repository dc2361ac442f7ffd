"""Which prompts has each gateway of a pool sent where? A short stream in the store tells the other gateways.

The stream has block hashes and no text. It is bounded by its length and its time to live. A gateway that misses entries
knows less and nothing false. The ids of entries are instants of the store's clock: a stream that expired and was created
again after that clock was set back begins with earlier ids, and is read from its beginning.
"""

from typing import Any, cast

import orjson

from tidegate_gateway.store import valkey_store
from tidegate_policy.dispatch import prefix_index
from tidegate_policy.model import EngineId

MOST_ENTRIES = 128
"""Entries of the stream; each gateway adds at most one in an exchange."""
LIVES_MS = 10_000
BEGINNING = b"0-0"
_BLOCKS = 1 << 64


class PromptStream:
    """The stream as one gateway reads and writes it."""

    def __init__(self, valkey: valkey_store.Valkey) -> None:
        self._valkey = valkey
        self._key = valkey.key("prompts")
        self._seen: bytes | None = None
        """The id of the last entry that was read; None = what was sent before this gateway looked is left out."""

    async def exchange(self, sent: list[prefix_index.SentPrompt]) -> list[prefix_index.SentPrompt]:
        """Adds what this gateway has sent. The prompts that the others have added since the last exchange. Raises
        `Unavailable`."""
        client = self._valkey.client
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.xrevrange(self._key, count=1)
            if self._seen is not None:
                pipeline.xrange(self._key, min=b"(" + self._seen, count=MOST_ENTRIES)
            if sent:
                entry = {"by": self._valkey.gateway, "sent": _written(sent)}
                pipeline.xadd(self._key, entry, maxlen=MOST_ENTRIES)
                pipeline.pexpire(self._key, LIVES_MS)
            last, *more = cast("list[Any]", await self._valkey.guard(pipeline.execute()))
        if self._seen is None:
            self._seen = last[0][0] if last else BEGINNING
            return []
        found = more[0]
        if last and _instant(last[0][0]) < _instant(self._seen):
            self._seen = BEGINNING  # the next exchange reads this stream
        elif found:
            self._seen = found[-1][0]
        own = self._valkey.gateway.encode()
        return [item for _, entry in found if entry.get(b"by") != own for item in _read(entry)]


def _instant(entry: bytes) -> tuple[int, ...]:
    """The milliseconds and the number in the id of an entry."""
    return tuple(map(int, entry.split(b"-")))


def _written(sent: list[prefix_index.SentPrompt]) -> bytes:
    return orjson.dumps([(item.engine, item.blocks, item.block_tokens, item.tokens) for item in sent])


def _read(entry: dict[bytes, bytes]) -> list[prefix_index.SentPrompt]:
    """The prompts of an entry. Those of another version of the gateway may be unreadable; they are left out."""
    try:
        rows = orjson.loads(entry[b"sent"])
        return [
            prefix_index.SentPrompt(
                engine=EngineId(str(engine)),
                blocks=tuple(int(block) % _BLOCKS for block in blocks[: prefix_index.MOST_UNTOLD_BLOCKS]),
                block_tokens=max(float(block_tokens), 0.0),
                tokens=max(float(tokens), 0.0),
            )
            for engine, blocks, block_tokens, tokens in rows[: prefix_index.MOST_UNTOLD_BLOCKS]
        ]
    except (KeyError, TypeError, ValueError):
        return []
