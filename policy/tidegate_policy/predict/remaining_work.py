"""How much work does a workflow still have after a call? Learned from workflows that finished.

A declared stage knows its followers (`budget`). For a stage without a declaration the mean over earlier workflows of
the tenant with the same template stands in: HexGen eq 5 needs the expected seconds of the stages that follow.
`workflow_history` shows it the workflows that finish.
"""

from dataclasses import dataclass

from tidegate_policy.tenant_memory import TenantMemory

MAX_STAGES = 4096
"""Stages of all tenants that are remembered."""

StageKey = tuple[str, str, str]
"""(tenant, template or "", stage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    seen: int
    seconds: float


class RemainingWork:
    """Mean seconds of the longest path behind a stage."""

    def __init__(self) -> None:
        self._stages: TenantMemory[StageKey, _Mean] = TenantMemory(MAX_STAGES)

    def predict(self, key: StageKey) -> float | None:
        """Seconds of work expected after a call of the stage; None for a stage that no finished workflow had."""
        known = self._stages.get(key[0], key)
        return None if known is None else known.seconds

    def observe(self, key: StageKey, rest_s: float) -> None:
        """A finished workflow had `rest_s` seconds of work on its longest path after a call of the stage."""
        known = self._stages.get(key[0], key) or _Mean(seen=0, seconds=0.0)
        seen = known.seen + 1
        self._stages.put(key[0], key, _Mean(seen=seen, seconds=known.seconds + (rest_s - known.seconds) / seen))
