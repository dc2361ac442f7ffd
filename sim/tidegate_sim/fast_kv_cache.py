"""A model of vLLM 0.32's KV-cache manager and prefix cache for one group of full attention.

vLLM keeps one queue of free blocks. Freed blocks without a hash go to its front, and freed blocks with a hash go to its
end, so all free blocks without a hash come before all free blocks with a hash. This model therefore counts the blocks
without a hash, and keeps objects only for blocks that the prefix cache knows. Tokens are runs of equal tokens, and the
key of a full block stands for the tokens of the block and of all blocks before it, as vLLM's chained hash does.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tidegate_sim.engine_limits import BLOCK_TOKENS

_KEYS = 2**61 - 1
Run = tuple[int, int]
"""(token, count): `count` equal tokens in a row."""


class Block:
    """A block that the prefix cache knows."""

    __slots__ = ("holders", "key")

    def __init__(self, key: int) -> None:
        self.key = key
        self.holders = 1
        """Requests and pins that hold the block; 0 = the block is free and may be evicted."""


class Keys:
    """Numbers the keys of blocks. The requests of one cache share it."""

    __slots__ = ("_known", "_next")

    def __init__(self) -> None:
        self._known: dict[tuple[int, object], int] = {}
        self._next = 1

    def after(self, key: int, content: object) -> int:
        """The key of a block with this content that follows the block with the key `key`; 0 = the first block."""
        found = self._known.get((key, content))
        if found is None:
            found = self._known[(key, content)] = self._next
            self._next += 1
        return found

    def unique(self, count: int) -> range:
        """The keys of blocks whose content no other request has."""
        first = self._next
        self._next += count
        return range(first, first + count)


class HashedKeys(Keys):
    """For an engine that runs for long: it remembers no content. Two contents have one key once in 2^61."""

    def after(self, key: int, content: object) -> int:
        return hash((key, content)) & _KEYS or 1


class Tokens:
    """The tokens of one request, and the keys of its full blocks. The output is one run that grows."""

    __slots__ = ("_numbers", "_output", "_tail", "keys")

    def __init__(self, numbers: Keys, prompt: Iterable[Run], output: int, *, own: int) -> None:
        """`output` is the token of the output's run. No other request has the token `own` in its prompt."""
        self._numbers = numbers
        self._output = output
        self.keys: list[int] = []
        """Of all full blocks of the prompt, and of the blocks of the output that were asked for."""
        self._tail: list[Run] = []
        for token, count in prompt:
            self._append(token, count, unique=token == own)

    def extend(self, blocks: int) -> list[int]:
        """The keys, of at least `blocks` full blocks."""
        if len(self.keys) < blocks:
            self._append(self._output, (blocks - len(self.keys)) * BLOCK_TOKENS - sum(run[1] for run in self._tail))
        return self.keys

    def _append(self, token: int, count: int, *, unique: bool = False) -> None:
        tail, keys, numbers = self._tail, self.keys, self._numbers
        if tail:
            taken = min(count, BLOCK_TOKENS - sum(run[1] for run in tail))
            count -= taken
            if tail[-1][0] == token:
                tail[-1] = (token, tail[-1][1] + taken)
            elif taken:
                tail.append((token, taken))
            if sum(run[1] for run in tail) == BLOCK_TOKENS:
                content: object = token if len(tail) == 1 else tuple(tail)
                keys.append(numbers.after(keys[-1] if keys else 0, content))
                tail.clear()
        if count:
            if unique:
                keys.extend(numbers.unique(count // BLOCK_TOKENS))
            else:
                key = keys[-1] if keys else 0
                for _ in range(count // BLOCK_TOKENS):
                    key = numbers.after(key, token)
                    keys.append(key)
            if count % BLOCK_TOKENS:
                tail.append((token, count % BLOCK_TOKENS))


class KvCache:
    """The blocks of one engine."""

    def __init__(self, blocks: int, *, caching: bool) -> None:
        """`blocks` includes vLLM's null block, which no request gets."""
        self.caching = caching
        self.keys = Keys()
        self.blocks = blocks - 1
        """Blocks that requests can have."""
        self._plain = blocks - 1
        """Free blocks without a hash. They are allocated first."""
        self._evictable: OrderedDict[Block, None] = OrderedDict()
        """Free blocks with a hash, the first to be evicted first."""
        self._index: dict[int, Block | list[Block]] = {}
        """The blocks with each key; several blocks with one key stand in the order in which they were filled."""

    @property
    def free_blocks(self) -> int:
        return self._plain + len(self._evictable)

    @property
    def usage(self) -> float:
        """The share of the blocks that are not free, computed as vLLM computes it."""
        return 1.0 - self.free_blocks / self.blocks if self.blocks else 0

    def hits(self, keys: Sequence[int], most: int) -> list[Block]:
        """The cached blocks of the longest prefix of `keys` that is in the cache, at most `most`."""
        found: list[Block] = []
        index = self._index
        for position in range(most):
            known = index.get(keys[position])
            if known is None:
                break
            found.append(known[0] if isinstance(known, list) else known)
        return found

    def evictable(self, blocks: Iterable[Block]) -> int:
        """How many of the blocks count as free now."""
        return sum(not block.holders for block in blocks)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a holder to each block, so that none of them is evicted."""
        for block in blocks:
            if not block.holders:
                del self._evictable[block]
            block.holders += 1

    def take(self, count: int) -> None:
        """Allocates `count` blocks; at most `free_blocks`. Evicts cached blocks when no other block is left."""
        if count <= self._plain:
            self._plain -= count
            return
        evicted = count - self._plain
        self._plain = 0
        for _ in range(evicted):
            block, _ = self._evictable.popitem(last=False)
            known = self._index[block.key]
            if isinstance(known, list) and len(known) > 1:
                known.remove(block)
            else:
                del self._index[block.key]

    def cache(self, held: list[Block], keys: Sequence[int], full: int) -> None:
        """Gives the blocks after `held`, up to the block number `full`, their keys, and appends them to `held`."""
        index = self._index
        for position in range(len(held), full):
            key = keys[position]
            block = Block(key)
            known = index.get(key)
            if known is None:
                index[key] = block
            elif isinstance(known, list):
                known.append(block)
            else:
                index[key] = [known, block]
            held.append(block)

    def free(self, hashed: Sequence[Block], plain: int) -> None:
        """Takes a holder from each block of `hashed`, the last first, and frees `plain` blocks without a hash."""
        self._plain += plain
        evictable = self._evictable
        for block in reversed(hashed):
            block.holders -= 1
            if not block.holders:
                evictable[block] = None
