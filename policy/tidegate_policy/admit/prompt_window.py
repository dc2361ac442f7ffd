"""How many prompts may a tenant have at the engines that are not computed yet?

An engine computes prompts in turn, so the prompts of one tenant that wait there make the next prompt of another tenant
wait. A few of them keep an engine busy. The others wait in the gateway, and enter as first tokens come.

The long prompts of many tenants would still make a short one wait for all of them, so all tenants together have as few long
prompts at the engines as one tenant may have prompts (`PoolPrompts`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate_policy.model import Call, CallId

AHEAD_S = 0.25
"""Seconds of an engine that prompts of one tenant may take which are not computed yet, or one prompt for each engine. The
gateway needs a few milliseconds to send the next one."""
LONG_S, VERY_LONG_S = 0.1, 1.0
"""Of prompts that yield: where another tenant keeps to its part and this one does not, and where any other competes."""
SLOWED_TIMES = 4.0
"""Beside calls that go first a prompt takes up to so many times its own seconds, unless they fill the engine."""
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
    turn_s: float = 0.0
    """The place of the next long prompt of the tenant, in seconds of prompts for each unit of weight."""
    _calls: dict[CallId, tuple[float, PromptSeconds]] = field(default_factory=dict)
    """Of each call the instant at which it entered, and the seconds of its prompt."""

    def __len__(self) -> int:
        return len(self._calls)

    def work_of(self, call: CallId) -> float:
        """Seconds of the prompt of a call; 0 if it does not count."""
        known = self._calls.get(call)
        return 0.0 if known is None else known[1].work

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


class PoolPrompts:
    """The prompts of all tenants that are not computed yet. Tenants with long prompts take turns by the seconds of these
    prompts (start-time fair queueing, Goyal et al. 1996)."""

    def __init__(self, costs: PromptCosts) -> None:
        self.seconds = costs.seconds
        self.gateways = 1
        """Of the pool; this one is counted."""
        self._engines = costs.engines
        self._long = PromptWindow()
        """The long prompts that do not yield to others. Its turn is that of the one that entered last."""
        self._under_way: dict[CallId, tuple[str, float]] = {}
        """The tenant of each of these prompts until its first token, or until the instant when it is surely computed."""
        self.elsewhere: frozenset[str] = frozenset()
        """The tenants with long prompts that entered at other gateways."""

    def engines(self, now: float) -> int:
        """Those that accept calls, or 1."""
        return max(self._engines(now), 1)

    def add(self, now: float, window: PromptWindow, call: Call) -> None:
        """A call of the tenant with this window enters, unless it is `remove`d again."""
        seconds = self.seconds(call)
        window.add(now, call.id, seconds)
        self.count(now, call, seconds)

    def count(self, now: float, call: Call, seconds: PromptSeconds) -> None:
        """A call that has entered counts for all, if its prompt is long and does not yield."""
        if seconds.work > LONG_S and not call.yields:
            self._long.add(now, call.id, seconds)
            self._under_way[call.id] = call.tenant, now + SLOWED_TIMES * seconds.alone

    def take_turn(self, window: PromptWindow, weight: float, call: CallId) -> None:
        """A call that was added has entered."""
        work_s = self._long.work_of(call)
        if work_s:
            self._long.turn_s = self.turn_s(window)
            window.turn_s = self._long.turn_s + work_s / weight

    def remove(self, window: PromptWindow, call: CallId) -> tuple[bool, bool]:
        """The prompt is computed, or the call has left. Returns whether it counted for its tenant, and for all."""
        self._under_way.pop(call, None)
        return window.remove(call), self._long.remove(call)

    def is_full(self, now: float, window: PromptWindow, *, floods: bool) -> bool:
        """Whether the next prompt of a tenant would only wait at an engine."""
        return window.is_full(now, self.engines(now) / self.gateways, floods=floods)

    def has_turn(self, now: float, call: Call) -> bool:
        """Whether the call may enter beside the long prompts of all tenants."""
        if not self._long.is_full(now, self.engines(now) / self.gateways, floods=False):
            return True
        return self.seconds(call).work <= LONG_S

    def are_ahead_of(self, now: float, call: Call) -> bool:
        """Whether some engine has a long prompt of another tenant to compute, and the call has a short one."""
        others = self.tenants(now) | self.elsewhere
        return not others <= {call.tenant} and self.seconds(call).work <= LONG_S

    def tenants(self, now: float) -> frozenset[str]:
        """Those with long prompts that entered here and that engines have still to compute."""
        for call, (_, until_s) in list(self._under_way.items()):
            if until_s <= now:
                del self._under_way[call]
        return frozenset([tenant for tenant, _ in self._under_way.values()])

    def turn_s(self, window: PromptWindow) -> float:
        """The place of the next long prompt of a tenant; the least goes first."""
        return max(self._long.turn_s, window.turn_s)
