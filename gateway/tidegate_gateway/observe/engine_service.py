"""How does each engine serve? Counts that the operator compares while it tests a new revision of the engines.

The counts begin when the calls are first divided among two revisions (`/admin/rollout`), so gateways of other pools do no
work for them. `tidegate_policy.rollout.side_by_side` says what they mean.
"""

import math
from typing import Any

from tidegate_gateway.observe import call_record, recent_service
from tidegate_policy.model import EngineId

LEAST_S = 1e-6


class Tally:
    """The calls of one engine."""

    __slots__ = ("calls", "errors", "targets", "tpot", "ttft")

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.ttft = [0.0, 0.0]
        """The number of times, and the sum of their logarithms."""
        self.tpot = [0.0, 0.0]
        self.targets: dict[str, list[int]] = {}
        """By class: the calls that had a target, and those that missed it."""

    def as_json(self) -> dict[str, Any]:
        """The counts in the form of `side_by_side.Service`."""
        return {
            "calls": self.calls,
            "errors": self.errors,
            "ttft": {"count": int(self.ttft[0]), "log_sum": self.ttft[1]},
            "tpot": {"count": int(self.tpot[0]), "log_sum": self.tpot[1]},
            "targets": {name: {"with_target": counts[0], "missed": counts[1]} for name, counts in self.targets.items()},
        }


class EngineService:
    """The counts of all engines of one gateway, since its first division of calls."""

    def __init__(self) -> None:
        self.counts = False
        """Whether calls are counted."""
        self._tallies: dict[EngineId, Tally] = {}

    def of(self, engine: EngineId) -> Tally:
        """The counts of an engine of the pool, which is known from here on."""
        found = self._tallies.get(engine)
        if found is None:
            found = self._tallies[engine] = Tally()
        return found

    def forget(self, engine: EngineId) -> None:
        """The engine left the pool."""
        self._tallies.pop(engine, None)

    def on_attempt(self, engine: EngineId, *, ok: bool) -> None:
        """The engine did its part in a call, or failed it."""
        tally = self._tallies.get(engine)
        if self.counts and tally is not None:  # else it left the pool, and another one may get its address
            tally.calls += 1
            tally.errors += not ok

    def on_call(self, record: call_record.CallRecord, slo_class: str, outcome: recent_service.Outcome | None) -> None:
        """A call of a class ended; `outcome` is None for a call without a target. The names of classes are bounded."""
        if not self.counts or record.engine is None or record.call is None:
            return
        tally = self._tallies.get(record.engine)
        if tally is None:
            return
        if record.outcome == "rejected":
            tally.calls += 1
            tally.errors += 1
        elif record.outcome == "ok":
            _count_times(tally, record, record.tokens / record.call.sequences)
        if outcome is not None and outcome != "shed":
            targets = tally.targets.setdefault(slo_class, [0, 0])
            targets[0] += 1
            targets[1] += outcome != "met"


def _count_times(tally: Tally, record: call_record.CallRecord, tokens: float) -> None:
    """`tokens` are those of each sequence."""
    sent_at_s, first_at_s, finished_at_s = record.sent_at_s, record.first_token_at_s, record.finished_at_s
    if sent_at_s is None or first_at_s is None or finished_at_s is None:
        return
    if not record.stream:
        if tokens:
            _add(tally.tpot, (finished_at_s - sent_at_s) / tokens)
        return
    _add(tally.ttft, first_at_s - sent_at_s)
    if tokens > 1:
        _add(tally.tpot, (finished_at_s - first_at_s) / (tokens - 1))


def _add(times: list[float], seconds: float) -> None:
    times[0] += 1
    times[1] += math.log(max(seconds, LEAST_S))
