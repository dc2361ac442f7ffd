"""Why did the policy change, and did it help? The last switches with their evidence and their effect, in words.

The page, the admin API, `tidegate policy get` and `tidegate top` show the same words (docs/steering.md).
"""

import collections
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidegate_gateway.observe import recent_service

REMEMBERED = 20
JUDGED_S = 60.0
"""The time before and after a switch that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The service in one stretch of time."""

    seconds: float
    tally: recent_service.Tally
    waiting: int
    """Calls that waited in the gateway and at engines at its end."""

    def words(self) -> str:
        """The measurement as a sentence without its full stop."""
        met, answer_s = self.tally.met_ratio, self.tally.mean_answer_s
        share = "no call with a target ended" if met is None else f"{met:.0%} of {self.tally.with_target} targets met"
        took = "" if answer_s is None else f", answers took {answer_s:.2g} s"
        return f"{share}{took}, {self.waiting} {'call' if self.waiting == 1 else 'calls'} waited"

    def as_json(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 1), **self.tally.summary(), "waiting": self.waiting}


@dataclass(slots=True, kw_only=True)
class Switch:
    """One switch of the policy."""

    at_s: float
    before_policy: str
    after_policy: str
    source: str
    reason: str
    alternatives: tuple[str, ...]
    """The other policies that the steering loop compared, best first."""
    expected: str
    """What the steering loop expected; empty for a choice of a person."""
    before: Measured
    after: Measured | None = None
    """None until the effect is complete."""


class PolicySwitches:
    """The last switches of this gateway's policy, oldest first."""

    def __init__(
        self,
        service: recent_service.RecentService,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        waiting: Callable[[], int],
    ) -> None:
        """`waiting` counts the calls that wait in the gateway and at engines."""
        self._service = service
        self._clock = clock
        self._wall = wall
        self._waiting = waiting
        self._began_at_s = clock()
        self._switches: collections.deque[Switch] = collections.deque(maxlen=REMEMBERED)

    def on_switch(
        self,
        before: str,
        after: str,
        *,
        source: str,
        reason: str,
        alternatives: tuple[str, ...] = (),
        expected: str = "",
    ) -> None:
        """The policy has changed."""
        now = self._clock()
        self.settle(ended=True)
        since_at_s = max(now - JUDGED_S, self._began_at_s)
        self._switches.append(
            Switch(
                at_s=now,
                before_policy=before,
                after_policy=after,
                source=source,
                reason=reason,
                alternatives=alternatives,
                expected=expected,
                before=self._measured(since_at_s, now),
            )
        )
        self._service.cut(now)

    def settle(self, *, ended: bool = False) -> None:
        """Completes the effect of the last switch when its time is over, or has `ended` by another switch."""
        last = self._switches[-1] if self._switches else None
        if last is not None and last.after is None and (ended or self._clock() - last.at_s >= JUDGED_S):
            last.after = self._so_far(last)

    def as_json(self) -> list[dict[str, Any]]:
        """The switches, newest first."""
        now, offset_s = self._clock(), self._wall() - self._clock()
        shown = []
        for switch in reversed(self._switches):
            after = switch.after or self._so_far(switch)
            so_far = "" if switch.after is not None else f" (first {after.seconds:.0f} s)"
            at = datetime.datetime.fromtimestamp(switch.at_s + offset_s, datetime.UTC)
            shown.append(
                {
                    "at": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
                    "ago_s": round(now - switch.at_s, 1),
                    "from": switch.before_policy,
                    "to": switch.after_policy,
                    "source": switch.source,
                    "reason": switch.reason,
                    "alternatives": list(switch.alternatives),
                    "expected": switch.expected,
                    "evidence": switch.before.words(),
                    "effect": after.words() + so_far,
                    "before": switch.before.as_json(),
                    "after": after.as_json(),
                }
            )
        return shown

    @property
    def since_s(self) -> float:
        """Seconds since the policy was put in force."""
        return self._clock() - (self._switches[-1].at_s if self._switches else self._began_at_s)

    def _so_far(self, switch: Switch) -> Measured:
        return self._measured(switch.at_s, min(self._clock(), switch.at_s + JUDGED_S))

    def _measured(self, from_at_s: float, until_at_s: float) -> Measured:
        tally = self._service.between(from_at_s, until_at_s)
        return Measured(seconds=until_at_s - from_at_s, tally=tally, waiting=self._waiting())
