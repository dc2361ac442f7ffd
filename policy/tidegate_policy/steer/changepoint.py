"""The selector `changepoint`: detect that the regime has changed, then look the policy up in a table (H-MAS C.2).

Each feature of the window is followed by a two-sided cumulative sum of its distance from the mean of the present regime
(Page 1954). When one sum passes `threshold`, a new regime begins. The table has a policy for each level of pressure. Within
a regime the policy stays, so noise does not switch it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_policy.qos import Qos
from tidegate_policy.steer import features
from tidegate_policy.steer.proposal import Memory, Proposal

WATCHED = ("wait", "growth", "misses", "work", "dispersion")
NEWEST_WEIGHT = 0.2
"""Of a window in the mean of its regime."""
TABLE: Mapping[str, Sequence[str]] = {
    "calm": (),
    "pressed": ("edf", "urgency"),
    "overloaded": ("sjf", "two-lane"),
}
"""The policies for each level, best first; empty = the active policy stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changepoint:
    """The selector."""

    drift: float = 0.1
    """Distance from the mean that counts as no change."""
    threshold: float = 0.4
    overload_wait_s: float = 4.0
    """From this wait on the pool is overloaded."""
    table: Mapping[str, Sequence[str]] = field(default_factory=lambda: TABLE)

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        changed = self._changed(dict(zip(features.NAMES, features.vector(qos), strict=True)), memory)
        level = self.level(qos)
        if changed is None and memory.get("level") == level and memory.get("proposed") != active:
            changed = str(memory.get("because", "the table"))  # the guards have not let the proposal through yet
        if changed is None:
            return None
        memory["level"] = level
        cures = [name for name in self.table[level] if name in allow]
        if not cures or cures[0] == active:
            memory["proposed"] = active
            return None
        memory["proposed"], memory["because"] = cures[0], changed
        return Proposal(
            policy=cures[0],
            reason=f"changepoint: {changed} changed, and the pool is {level}: {features.wait_s(qos):.0f} s of calls wait",
            alternatives=tuple(cures[1:]),
            expected=f"the table has {cures[0]} for a pool that is {level}",
        )

    def level(self, qos: Qos) -> str:
        """The row of the table."""
        if not features.is_evidence(qos):
            return "calm"
        return "overloaded" if features.wait_s(qos) >= self.overload_wait_s else "pressed"

    def _changed(self, values: Mapping[str, float], memory: Memory) -> str | None:
        """The feature whose sum has passed the threshold; None if none has. A new regime begins at the first window and
        after each change."""
        means: dict[str, float] | None = memory.get("means")
        if means is not None and means.keys() != set(WATCHED):  # another version of the selector wrote it
            means = None
        sums: dict[str, list[float]] = memory.setdefault("sums", {})
        found = None
        for name in WATCHED:
            if means is None:
                continue
            distance = values[name] - means[name]
            up, down = sums.get(name, [0.0, 0.0])
            sums[name] = [max(up + distance - self.drift, 0.0), max(down - distance - self.drift, 0.0)]
            means[name] += NEWEST_WEIGHT * distance
            if max(sums[name]) > self.threshold and found is None:
                found = name
        if means is None or found is not None:
            memory["means"] = {name: values[name] for name in WATCHED}
            memory["sums"] = {}
        return found
