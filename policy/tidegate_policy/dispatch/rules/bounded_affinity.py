"""`bounded-affinity`: consistent hashing of the prompt's prefix with bounded loads (KubeAI's `PrefixHash`).

Each engine has points on a ring in proportion to its speed. A call goes to the first engine after the hash of its prefix
whose load is at most `LOAD_FACTOR` times its share of all calls. Calls without a prefix or session go to the engine with
the fewest calls for its speed.
"""

import bisect
import hashlib
from collections.abc import Iterable, Iterator

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule
from tidegate_policy.dispatch.rules.weighted_least_requests import WeightedLeastRequests, reference_s
from tidegate_policy.model import Call, EngineId

LOAD_FACTOR = 1.25
"""The factor of KubeAI and of the paper's example."""
POINTS = 256
"""Points of the fastest engine on the ring."""
KEY_TOKENS = 1024
"""The prefix that is hashed ends with the last block that ends within so many tokens."""


class BoundedAffinity(DispatchRule):
    """The ring is made anew when the engines that can take a call change."""

    def __init__(self) -> None:
        self._fallback = WeightedLeastRequests()
        self._members: tuple[tuple[EngineId, float], ...] = ()
        self._ring: list[tuple[int, EngineId]] = []

    def choose(self, context: RoutingContext) -> Choice:
        key = _key(context.call)
        if key is None:
            return self._fallback.choose(context)
        engines = {engine.id: engine for engine in context.engines}
        speeds = {engine.id: 1 / reference_s(engine.cost) for engine in context.engines}
        calls = 1 + sum(engine.calls for engine in context.engines)
        all_speed = sum(speeds.values())
        for name in self._from(key, speeds.items()):
            if engines[name].calls + 1 <= max(LOAD_FACTOR * calls * speeds[name] / all_speed, 1.0):
                return Choice(engine=engines[name])
        return self._fallback.choose(context)

    def _from(self, key: str, speeds: Iterable[tuple[EngineId, float]]) -> Iterator[EngineId]:
        """The engines in the order of the ring from the key on; an engine may come several times."""
        members = tuple(speeds)
        if members != self._members:
            fastest = max(speed for _, speed in members)
            self._ring = sorted(
                (_point(f"{name} {number}"), name)
                for name, speed in members
                for number in range(max(round(POINTS * speed / fastest), 1))
            )
            self._members = members
        start = bisect.bisect(self._ring, (_point(key),))
        for _, name in [*self._ring[start:], *self._ring[:start]]:
            yield name


def _key(call: Call) -> str | None:
    if call.blocks:
        position = min(max(int(KEY_TOKENS / call.block_tokens), 1), len(call.blocks)) if call.block_tokens else 1
        return str(call.blocks[position - 1])
    return call.session


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
