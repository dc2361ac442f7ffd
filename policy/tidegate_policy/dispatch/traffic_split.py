"""Which calls go to engines of a new revision, while it is tested beside the old one (`rollout.canary`)?

A hash decides, so all gateways decide alike: the calls of a workflow or a session stay on one side, and those that are on
the new side stay there when its share grows. A side without an engine that has room yields to the other one, so the split
sheds no call and lets none wait.
"""

import hashlib
from dataclasses import dataclass

from tidegate_policy.dispatch.engine_table import Engine
from tidegate_policy.model import Call, EngineId

_HASHES = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSplit:
    """The new engines, and their share."""

    engines: frozenset[EngineId]
    """The engines of the new revision; all others have the old one."""
    weight: int
    """Percent of the calls that the new engines get, 0 to 100."""
    until_s: float
    """The instant at which the split ends unless it is renewed: the process that steers it may have died."""

    def is_for_new(self, call: Call) -> bool:
        """Whether the call belongs to the new engines."""
        key = call.workflow or call.session or call.id
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
        return number * 100 < self.weight * _HASHES

    def preferred(self, call: Call, engines: list[Engine]) -> list[Engine]:
        """The engines of the call's side out of `engines`; all of them if there is none."""
        for_new = self.is_for_new(call)
        return [engine for engine in engines if (engine.facts.id in self.engines) == for_new] or engines
