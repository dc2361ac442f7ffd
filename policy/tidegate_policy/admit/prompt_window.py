"""How many prompts may a tenant have at the engines that are not computed yet?

An engine computes prompts in turn, so the prompts of one tenant that wait there make the next prompt of another tenant
wait. A few of them keep an engine busy. The others wait in the gateway, and enter as first tokens come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate_policy.model import Call, CallId

AHEAD_S = 0.25
"""Seconds of an engine that prompts of one tenant may take which are not computed yet, or one prompt for each engine. The
gateway needs a few milliseconds to send the next one."""
UNSEEN_TIMES, YIELDING_TIMES = 1.25, 4.0
"""A prompt without a first token counts for so many times its seconds: the first token of an answer that is not streamed is
not seen. A prompt of a tenant that floods the pool yields, so it takes more than its own time."""


class PromptSeconds(NamedTuple):
    """What a prompt costs an engine."""

    alone: float
    """Seconds until it is computed, if nothing else is."""
    work: float
    """Seconds that no other prompt can share: a step takes a fixed time, and computes several short prompts."""


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """What prompts cost in the pool, or in a part of it."""

    seconds: Callable[[Call], PromptSeconds]
    engines: Callable[[float], int]
    """Engines that accept calls at an instant."""


FREE = PromptCosts(seconds=lambda call: PromptSeconds(0.0, 0.0), engines=lambda now: 1_000_000_000)
"""Prompts cost nothing."""


@dataclass(slots=True)
class PromptWindow:
    """The prompts of one tenant that are not computed yet."""

    work_s: float = 0.0
    _calls: dict[CallId, tuple[float, PromptSeconds]] = field(default_factory=dict)
    """Of each call the instant at which it entered, and the seconds of its prompt."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, now: float, call: CallId, seconds: PromptSeconds) -> None:
        """A call enters."""
        self.remove(call)
        self._calls[call] = now, seconds
        self.work_s += seconds.work

    def remove(self, call: CallId) -> bool:
        """The prompt is computed, or the call has left. Returns whether it counted."""
        known = self._calls.pop(call, None)
        if known is None:
            return False
        self.work_s = self.work_s - known[1].work if self._calls else 0.0
        return True

    def is_full(self, now: float, engines: float, *, floods: bool) -> bool:
        """Whether the next prompt would only wait at one of so many engines. Of a tenant that `floods` the pool an engine
        computes one prompt at a time."""
        if not self._fills(engines, floods):
            return False
        for call, (entered_at_s, seconds) in list(self._calls.items()):
            counts_s = YIELDING_TIMES * seconds.alone if floods else UNSEEN_TIMES * max(seconds.alone, AHEAD_S)
            if entered_at_s + counts_s <= now:
                self.remove(call)
        return self._fills(engines, floods)

    def _fills(self, engines: float, floods: bool) -> bool:
        return len(self._calls) >= engines and (floods or self.work_s >= AHEAD_S * engines)
