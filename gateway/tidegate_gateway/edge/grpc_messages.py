"""Messages of clients, from bytes. Their bytes and entries are bounded in sum, and their entries are counted before
anything is decoded."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor, message

from tidegate_gateway import loop_steps, tenant_budget
from tidegate_gateway.edge import message_entries
from tidegate_gateway.openai import bounded_json, error_table, escaped_text
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.model import DropReason

MOST_ENTRIES = {"SubmitRelQueryRequest": 250_000, "GenerateRequest": 100_000}
"""Fields of a message and of the messages in it; 100,000 rows of a relQuery with one column have 200,000."""
MOST_ENTRIES_OF_OTHERS = 10_000
BECOME_JSON = frozenset({"GenerateRequest"})
"""Messages whose texts the gateway writes as JSON for an engine."""
ENTRY_BYTES = 100
"""Of memory that a decoded entry takes."""
LARGE_BYTES, FEW_ENTRIES = 32 * 1024, 1000
"""Messages that have more are decoded in another thread, one after the other."""
WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""What zlib needs to know of each compression."""
MOST_RATIO = 1032
"""A compressed byte becomes at most so many."""
UNREADABLE = "these bytes are not the message that this method takes; reflection describes it"


class Kind:
    """A kind of messages."""

    def __init__(self, described: descriptor.Descriptor, decode: Callable[[bytes], Any]) -> None:
        self.nested = message_entries.nested(described)
        self.most_entries = MOST_ENTRIES.get(described.name, MOST_ENTRIES_OF_OTHERS)
        self.decode = decode
        self.becomes_json = described.name in BECOME_JSON


@dataclass(frozen=True, slots=True)
class Decoded:
    """A message of a client."""

    message: Any
    is_costly: bool
    """It has many values (`bounded_json.is_costly`)."""


class Messages:
    """The messages of one port."""

    def __init__(self, bodies: tenant_budget.TenantBudget, message_bytes: int) -> None:
        """`bodies` bounds the bytes of all messages together; each has at most `message_bytes`."""
        self._bodies = bodies
        self._message_bytes = message_bytes
        self._large = loop_steps.TenantTurns()

    def hold(self, tenant: str) -> tenant_budget.Held:
        """The bytes of messages that wait."""
        return self._bodies.hold(tenant)

    @asynccontextmanager
    async def decoded(self, raw: bytes, compression: str, kind: Kind, tenant: str) -> AsyncIterator[Decoded]:
        """The message, whose bytes and entries count while the call runs, and until it is decoded. Raises `BadRequest` for
        bytes that are no such message, and `Shed` while the messages of the tenant are too large."""
        held = self._bodies.hold(tenant)
        held.add(len(raw))
        thread: asyncio.Future[Any] | None = None
        try:
            check(held)
            large = len(raw) * (MOST_RATIO if compression else 1) > LARGE_BYTES
            entries = None
            if not large:
                raw = self._inflated(raw, compression)
                entries = message_entries.some(raw, kind.nested, FEW_ENTRIES)
            if entries is not None:
                decoded, size = Decoded(kind.decode(raw), bounded_json.is_costly(raw)), self._size(raw, kind)
            else:
                await self._large.take(tenant)
                thread = asyncio.get_running_loop().run_in_executor(None, self._decode, raw, compression, kind)
                thread.add_done_callback(lambda _: self._large.give_back())
                decoded, entries, size = await asyncio.shield(thread)  # a thread goes on when its call is cancelled
            held.add(size - held.units)
            del raw
            held.add(entries * ENTRY_BYTES)
            check(held)
            yield decoded
        except message.DecodeError as error:
            raise BadRequest(UNREADABLE) from error
        finally:
            if thread is None or thread.done():
                held.release()
            else:
                thread.add_done_callback(lambda ended: _forgotten(ended, held))

    def _decode(self, raw: bytes, compression: str, kind: Kind) -> tuple[Decoded, int, int]:
        raw = self._inflated(raw, compression)
        entries = message_entries.count(raw, kind.nested, kind.most_entries)
        size = self._size(raw, kind)
        return Decoded(kind.decode(raw), bounded_json.is_costly(raw)), entries, size

    def _size(self, raw: bytes, kind: Kind) -> int:
        """The bytes that count for a message; those of its texts as JSON if it becomes JSON. Raises `BadRequest`."""
        if not kind.becomes_json:
            return len(raw)
        size = len(raw) + escaped_text.added_bytes(raw)
        if size > self._message_bytes:
            raise BadRequest(
                f"the message has {size} bytes with its control characters, quotation marks and backslashes as JSON has"
                f" them, and at most {self._message_bytes} are allowed",
                code="body_too_large",
            )
        return size

    def _inflated(self, raw: bytes, compression: str) -> bytes:
        """The bytes of a message without its compression, one of `WINDOW_BITS`, or "". Raises `DecodeError` and
        `BadRequest`."""
        if not compression:
            return raw
        stream = zlib.decompressobj(WINDOW_BITS[compression])
        try:
            inflated = stream.decompress(raw, self._message_bytes + 1)
        except zlib.error as error:
            raise message.DecodeError("the compressed bytes are broken") from error
        if len(inflated) > self._message_bytes:
            raise BadRequest(f"a message has at most {self._message_bytes} bytes", code="body_too_large")
        if not stream.eof:
            raise message.DecodeError("the compressed bytes are cut off")
        return inflated


def _forgotten(ended: asyncio.Future[Any], held: tenant_budget.Held) -> None:
    """The message was decoded, or found to be none, after its call had gone."""
    held.release()
    if not ended.cancelled():
        ended.exception()


def check(held: tenant_budget.Held) -> None:
    """Raises `Shed` if the tenant's messages are too large."""
    if not held.fits:
        raise error_table.Shed(DropReason.SATURATED)
