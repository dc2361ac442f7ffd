"""How much work does a workflow still have after a call? Learned from workflows that finished.

A declared stage knows its followers (`budget`). For a stage without a declaration the mean over earlier workflows of
the same scope stands in: HexGen eq 5 needs the expected seconds of the stages that follow. `workflow_history` shows it
the workflows that finish.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_STAGES = 4096
"""Stages remembered; the stage observed least recently is forgotten first."""

StageKey = tuple[str, str]
"""(template or tenant, stage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    seen: int
    seconds: float


class RemainingWork:
    """Mean seconds of the longest path behind a stage."""

    def __init__(self) -> None:
        self._stages: OrderedDict[StageKey, _Mean] = OrderedDict()

    def predict(self, key: StageKey) -> float | None:
        """Seconds of work expected after a call of the stage; None for a stage that no finished workflow had."""
        known = self._stages.get(key)
        return None if known is None else known.seconds

    def observe(self, key: StageKey, rest_s: float) -> None:
        """A finished workflow had `rest_s` seconds of work on its longest path after a call of the stage."""
        known = self._stages.get(key) or _Mean(seen=0, seconds=0.0)
        seen = known.seen + 1
        self._stages[key] = _Mean(seen=seen, seconds=known.seconds + (rest_s - known.seconds) / seen)
        self._stages.move_to_end(key)
        if len(self._stages) > MAX_STAGES:
            self._stages.popitem(last=False)
