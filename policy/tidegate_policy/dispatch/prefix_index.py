"""Which engine holds which prefixes in its KV cache, as far as the gateway can tell?

The index records the block hashes of each call where the call was sent (`prompt_blocks`), and of the calls that engines
answered for the other gateways of the pool. Until its engine answers, a call takes no room in the record: its new blocks
are only awaited, so that calls with the same beginning follow it. A call that the engine rejects thus leaves nothing, and
displaces nothing. The record of an engine is bounded by the engine's KV size in tokens and by a share of
`max_entries`. The block that was used least recently is forgotten first, and a later block of a prompt before an earlier
one, as in the engine's own cache. What a call puts into the cache beside its blocks (the rest of its prompt, and its
answer) takes room in the record too. A session whose calls have no hashes is one block: the engine that served its last
call holds its context.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from tidegate_policy import immutable
from tidegate_policy.model import Call, EngineId

DEFAULT_MAX_ENTRIES = 262_144
"""About 60 MB. With 16 engines 16,384 blocks for each, more than the KV cache of eight 80 GB cards holds."""

MOST_UNTOLD_BLOCKS = 4096
"""Blocks of sent calls that wait for the next exchange with the other gateways; the others do not hear of further calls."""

Key = int | tuple[str, str, str]
"""The hash of a block, or (model, tenant, session). A negative number names tokens that no other prompt shares."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class SentPrompt:
    """The prompt of a call that an engine answered."""

    engine: EngineId
    blocks: tuple[int, ...]
    block_tokens: float
    """Tokens of one of the blocks."""
    tokens: float
    """Tokens that the call puts into the KV cache, its answer included."""


class _Record:
    """What one engine is believed to hold."""

    __slots__ = ("awaited", "bit", "entries", "tokens")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.entries: OrderedDict[Key, float] = OrderedDict()
        """Tokens of each entry, the entry that was used least recently first."""
        self.tokens = 0.0
        """Tokens of all entries."""
        self.awaited: dict[Key, int] = {}
        """Calls at the engine that it has not answered, by each block that was no entry when they were sent."""


class PrefixIndex:
    """The prefixes of all engines. Not thread-safe. A lookup takes time in proportion to the blocks that some engine
    holds."""

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        """`max_entries` bounds the entries of all engines together; 0 = nothing is recorded."""
        self._max_entries = max_entries
        self._most = max_entries
        """Entries that one engine may have."""
        self._holders: dict[Key, int] = {}
        """A bit for each engine that holds the block, or will when it answers."""
        self._records: dict[EngineId, _Record] = {}
        self._names: dict[int, EngineId] = {}
        """The engine of each bit."""
        self._without = set[EngineId]()
        """The engines that have no prefix cache."""
        self._unshared = 0
        """The key of the last entry for tokens that no other prompt shares."""
        self._untold: list[SentPrompt] | None = None
        """Answered calls of which the other gateways do not know; None while there are none."""
        self._untold_blocks = 0

    @property
    def entries(self) -> int:
        """The entries of all engines."""
        return sum(len(record.entries) for record in self._records.values())

    def cached_tokens(self, call: Call) -> Mapping[EngineId, int]:
        """Prompt tokens of `call` that each engine is believed to hold; absent engines hold none."""
        if not call.blocks:
            return self._session_tokens(call) if call.session else {}
        holders, names = self._holders, self._names
        most = call.prompt_tokens - 1
        found: dict[EngineId, int] = {}
        matched = holders.get(call.blocks[0], 0)
        depth = 0
        for block in call.blocks:
            if not matched:
                return found
            holds = holders.get(block, 0) & matched
            if holds != matched:
                tokens = min(int(depth * call.block_tokens), most)
                for bit in _bits(matched & ~holds):
                    found[names[bit]] = tokens
                matched = holds
            depth += 1
        tokens = min(int(depth * call.block_tokens), most)
        for bit in _bits(matched):
            found[names[bit]] = tokens
        return found

    def computed_tokens(self, call: Call) -> int:
        """Prompt tokens of `call` that some engine has computed. Of `cached_tokens` these are the ones that a call finds
        which starts now: the others are computed by calls that have no answer yet."""
        holders = self._holders.get(call.blocks[0] if call.blocks else _session_key(call), 0)
        return max([self.computed_tokens_at(self._names[bit], call) for bit in _bits(holders)], default=0)

    def computed_tokens_at(self, engine: EngineId, call: Call) -> int:
        """Those that this engine has computed."""
        record, most = self._records.get(engine), call.prompt_tokens - 1
        if record is None:
            return 0
        if call.blocks:
            return min(int(_depth(call.blocks, record.entries) * call.block_tokens), most)
        return min(round(record.entries.get(_session_key(call), 0.0)), most) if call.session else 0

    def on_sent(self, call: Call, engine: EngineId) -> tuple[Key, ...]:
        """The call went to the engine. Returns the blocks that it awaits, for `on_answered` or `on_unanswered`."""
        if not self._is_recorded(engine):
            return ()
        record = self._records.get(engine) or self._record(engine)
        entries, awaited, holders, bit = record.entries, record.awaited, self._holders, record.bit
        keys: tuple[Key, ...] = call.blocks or ((_session_key(call),) if call.session else ())
        new = tuple([key for key in keys if key not in entries])
        for key in new:
            awaited[key] = awaited.get(key, 0) + 1
            holders[key] = holders.get(key, 0) | bit
        return new

    def on_answered(self, call: Call, engine: EngineId, kv_tokens: int, new: tuple[Key, ...]) -> None:
        """The engine, whose KV cache has room for `kv_tokens` tokens, has computed the prompt of the call."""
        if not self._is_recorded(engine):
            return
        context = call.prompt_tokens + call.output_predicted * call.sequences
        if call.session and not call.blocks:
            record = self._records.get(engine) or self._record(engine)
            self._use(record, _session_key(call), context)
            self.on_unanswered(engine, new)
            self._trim(record, kv_tokens)
            return
        sent = SentPrompt(engine=engine, blocks=call.blocks, block_tokens=call.block_tokens, tokens=context)
        self.record(sent, kv_tokens)
        self.on_unanswered(engine, new)
        if self._untold is not None and self._untold_blocks + len(call.blocks) <= MOST_UNTOLD_BLOCKS:
            self._untold.append(sent)
            self._untold_blocks += len(call.blocks) + 1

    def on_unanswered(self, engine: EngineId, new: tuple[Key, ...]) -> None:
        """The call no longer awaits these blocks: the engine has rejected it, or something else ended it."""
        record = self._records.get(engine)
        if record is None:
            return
        awaited = record.awaited
        for key in new:
            count = awaited.get(key, 0)
            if count > 1:
                awaited[key] = count - 1
            elif count:
                del awaited[key]
                if key not in record.entries:
                    self._hold_no_more(record, key)

    def record(self, sent: SentPrompt, kv_tokens: int) -> None:
        """The engine, whose KV cache has room for `kv_tokens` tokens, has answered this gateway or another one."""
        if not self._is_recorded(sent.engine):
            return
        record = self._records.get(sent.engine) or self._record(sent.engine)
        entries, bit, holders, each = record.entries, record.bit, self._holders, sent.block_tokens
        self._use_unshared(record, max(sent.tokens - len(sent.blocks) * each, 0.0))
        # The first block comes last, so that it is forgotten last.
        for block in reversed(sent.blocks):
            if block in entries:
                entries.move_to_end(block)
            else:
                entries[block] = each
                record.tokens += each
                holders[block] = holders.get(block, 0) | bit
        if record.tokens > kv_tokens or len(entries) > self._most:
            self._trim(record, kv_tokens)

    def untold(self, *, gateways: int) -> list[SentPrompt]:
        """The prompts that engines have answered this gateway since the last call of this method, for the other gateways.
        None are gathered while `gateways`, the number of gateways of the pool, is one."""
        told, self._untold_blocks = self._untold or [], 0
        self._untold = [] if gateways > 1 and self._max_entries else None
        return told

    def on_failed(self, call: Call, engine: EngineId) -> None:
        """The engine is to blame for the failure of the call before its first token: it may have lost what it held."""
        record = self._records.get(engine)
        for key in (*call.blocks, _session_key(call)) if record is not None else ():
            if record is not None and key in record.entries:
                self._drop(record, key)

    def on_cleared(self, engine: EngineId) -> None:
        """The engine has lost its whole cache: it was cleared, restarted, or left the pool."""
        record = self._records.pop(engine, None)
        if record is not None:
            del self._names[record.bit]
            self._count_records()
            for key in (*record.entries, *record.awaited):
                self._hold_no_more(record, key)

    def on_prefix_cache(self, engine: EngineId, *, exists: bool) -> None:
        """The engine has a prefix cache, or has none; all have one until this is told. Nothing is recorded of one without,
        which computes each prompt from its beginning."""
        if exists:
            self._without.discard(engine)
        elif engine not in self._without:
            self.on_cleared(engine)
            self._without.add(engine)

    def _is_recorded(self, engine: EngineId) -> bool:
        return bool(self._max_entries) and engine not in self._without

    def _session_tokens(self, call: Call) -> Mapping[EngineId, int]:
        key = _session_key(call)
        names = [self._names[bit] for bit in _bits(self._holders.get(key, 0))]
        most = call.prompt_tokens - 1  # of an engine that has the session's first call, but has not answered it yet
        return {name: min(round(self._records[name].entries.get(key, most)), most) for name in names}

    def _record(self, engine: EngineId) -> _Record:
        known = self._records.get(engine)
        if known is None:
            bit = 1
            while bit in self._names:
                bit <<= 1
            known = self._records[engine] = _Record(bit)
            self._names[bit] = engine
            self._count_records()
            for record in self._records.values():
                self._trim(record)
        return known

    def _count_records(self) -> None:
        self._most = max(self._max_entries // max(len(self._records), 1), 1)

    def _trim(self, record: _Record, kv_tokens: float = math.inf) -> None:
        """Forgets what exceeds the bounds, the entry that was used least recently first."""
        entries, most = record.entries, self._most
        while entries and (record.tokens > kv_tokens or len(entries) > most):
            oldest = next(iter(entries))
            excess = record.tokens - kv_tokens
            if _is_unshared(oldest) and 0 < excess < entries[oldest]:
                entries[oldest] -= excess
                record.tokens = kv_tokens
            else:
                self._drop(record, oldest)

    def _use(self, record: _Record, key: Key, tokens: float) -> None:
        record.tokens += tokens - record.entries.pop(key, 0.0)
        record.entries[key] = tokens
        self._holders[key] = self._holders.get(key, 0) | record.bit

    def _use_unshared(self, record: _Record, tokens: float) -> None:
        """Takes room for tokens that no other prompt shares. Neighbours become one entry."""
        newest = next(reversed(record.entries), None)
        if newest is None or not _is_unshared(newest):
            self._unshared -= 1
            newest = self._unshared
            record.entries[newest] = 0.0
        record.entries[newest] += tokens
        record.tokens += tokens

    def _drop(self, record: _Record, key: Key) -> None:
        record.tokens -= record.entries.pop(key)
        if not record.entries:
            record.tokens = 0.0  # no rounding error stays
        if key not in record.awaited:
            self._hold_no_more(record, key)

    def _hold_no_more(self, record: _Record, key: Key) -> None:
        left = self._holders.get(key, 0) & ~record.bit
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)


def _is_unshared(key: Key) -> bool:
    return isinstance(key, int) and key < 0


def _session_key(call: Call) -> Key:
    return (call.model, call.tenant, call.session or "")


def _depth(blocks: tuple[int, ...], entries: Mapping[Key, float]) -> int:
    """How many of the leading blocks are entries. Later blocks of a prompt are forgotten before earlier ones."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in entries:
            low = middle
        else:
            high = middle - 1
    return low


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
