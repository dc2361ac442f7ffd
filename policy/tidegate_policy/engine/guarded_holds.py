"""The ledger of held contexts (`session_hold`), as the engine core uses it: where there is none, and where it fails.

An engine that holds nothing has a ledger that answers so. When the ledger raises, the engine goes on without it: everything
that is held becomes free, nothing is held any more, and the failure is counted and reported once.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from tidegate_policy.cost import CostModel
from tidegate_policy.engine import guarded_policy, session_hold
from tidegate_policy.engine.engine_probe import EngineProbe
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.model import Call, CallId

HOOK = "hold"
T = TypeVar("T")


class GuardedHolds:
    """The ledger. Its methods do not raise."""

    def __init__(
        self,
        now: float,
        *,
        settings: session_hold.Settings | None,
        capacity_tokens: int,
        probe: EngineProbe,
        failures: guarded_policy.Failures,
    ) -> None:
        """`settings` None = nothing is held. `capacity_tokens` is the size of the KV cache."""
        self._ledger = (
            None if settings is None else session_hold.SessionHolds(capacity_tokens=capacity_tokens, settings=settings)
        )
        self._capacity_tokens = capacity_tokens
        self._allocation = session_hold.AllocationRate(now)
        self._probe = probe
        self._failures = failures
        self._held: dict[CallId, None] = {}
        """The calls whose blocks the driver holds."""
        self._released: list[CallId] = []
        """The calls whose held blocks the driver must free."""

    @property
    def active(self) -> bool:
        """Whether contexts may be held at all."""
        return self._ledger is not None

    @property
    def tokens(self) -> int:
        """Tokens of the contexts that are held."""
        return 0 if self._ledger is None else self._ledger.held_tokens

    def on_arrival(self, now: float, call: Call) -> None:
        """A call arrived. If its session has a held context, the call will use it."""
        ledger = self._ledger
        if ledger is not None and call.session is not None:
            self._tried(lambda: ledger.on_arrival(now, call), None)

    def on_used(self, call_ids: Iterable[CallId]) -> None:
        """These calls run or have ended, so their sessions' held contexts are no longer needed."""
        ledger = self._ledger
        if ledger is not None:
            self._release(lambda: ledger.on_used(call_ids))

    def on_step(self, now: float, call_ids: Iterable[CallId], *, allocated: int) -> None:
        """A step computed tokens of these calls, and took `allocated` tokens of memory."""
        if self._ledger is not None:
            self._tried(lambda: self._allocation.observe(now, allocated), None)
            self.on_used(call_ids)

    def hold(self, now: float, known: KnownCall, *, context_tokens: int, cost: CostModel) -> bool:
        """Whether the driver must hold the blocks of a call that has just finished."""
        ledger, call = self._ledger, known.call
        if ledger is None or call.session is None:
            return False

        def preserved() -> bool:
            free = self._probe.free_kv_tokens()
            handling = ledger.on_call_end(
                now,
                call,
                output_tokens=known.output_tokens,
                context_tokens=context_tokens,
                other_tokens=max(self._capacity_tokens - free - ledger.held_tokens - context_tokens, 0),
                free_tokens=free,
                allocated_per_s=self._allocation.per_s,
                cost=cost,
            )
            return handling is session_hold.Handling.PRESERVE

        held = self._tried(preserved, False)
        if held:
            self._held[call.id] = None
        return held

    def take_released(self, now: float) -> list[CallId]:
        """The calls whose held blocks the driver must free now."""
        ledger = self._ledger
        if ledger is not None:
            self._release(lambda: ledger.expired(now))
        return self._taken()

    def release_one(self) -> CallId | None:
        """The held context that gives way to a call that needs memory; None if nothing is held."""
        ledger = self._ledger
        found = None if ledger is None else self._tried(ledger.release_one, None)
        if found is not None:
            self._held.pop(found, None)
        return found

    def release_all(self) -> list[CallId]:
        """All held contexts."""
        ledger = self._ledger
        if ledger is not None:
            self._release(ledger.clear)
        return self._taken()

    def _release(self, action: Callable[[], list[CallId]]) -> None:
        none: list[CallId] = []
        found = self._tried(action, none)  # a failure puts all that is held into `_released`
        self._released += found

    def _taken(self) -> list[CallId]:
        released, self._released = self._released, []
        for call_id in released:
            self._held.pop(call_id, None)
        return released

    def _tried(self, action: Callable[[], T], otherwise: T) -> T:
        with self._failures.caught(HOOK):
            return action()
        self._ledger = None
        self._released = list(self._held)
        return otherwise
