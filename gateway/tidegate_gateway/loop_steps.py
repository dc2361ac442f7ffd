"""Long pieces of work that share the event loop with all other work."""

import asyncio
import collections
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from tidegate_gateway import turn_line

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 64
"""Items of a list in one step."""
ENDS_AT_ONCE = 8
"""Calls that are ended in one turn of the event loop, while few wait."""
ENDS_PART = 16
"""While many calls wait for their end, a turn ends one of so many. So the line has a bound at any steady rate: without it,
clients that reset connections or streams faster than eight in a turn would fill the memory."""
MOST_ENDS_AT_ONCE = 256
"""However many wait. A turn of the event loop begins fewer calls, because it reads for a bounded time."""


class TenantTurns:
    """A few requests at a time do something that takes long. The tenants whose requests wait take turns, and the requests
    of one tenant keep their order."""

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self._taken = 0
        self._waiting: turn_line.TurnLine[asyncio.Future[None]] = turn_line.TurnLine()

    def __len__(self) -> int:
        """The requests that wait."""
        return len(self._waiting)

    def of(self, tenant: str) -> "Turn":
        """A turn of the tenant, as an asynchronous context."""
        return Turn(self, tenant)

    async def next(self, tenant: str) -> None:
        """Returns when the caller may do its step. Other work runs before the next ones may do theirs."""
        await self.take(tenant)
        asyncio.get_running_loop().call_soon(self.give_back)

    async def take(self, tenant: str) -> None:
        """Returns when it is the turn of the caller, who has it until `give_back`."""
        if (turn := self.join(tenant)) is None:
            return
        try:
            await turn
        except asyncio.CancelledError:
            self.leave(turn)
            raise

    def join(self, tenant: str) -> asyncio.Future[None] | None:
        """A place in the line, which is done when it is the caller's turn; None = it is the caller's turn. The
        caller has it until `give_back`, and must `leave` the line if it needs the turn no more."""
        if self._taken < self.at_once:
            self._taken += 1
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        return turn

    def leave(self, turn: asyncio.Future[None]) -> None:
        """Gives a place in the line up."""
        if not turn.done() or turn.cancelled():
            self._waiting.remove(turn)
        elif turn.exception() is None:
            self.give_back()  # the turn came at the same time

    def give_back(self) -> None:
        """Gives the turn to the next one that waits."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():  # its task may have been cancelled just now
                turn.set_result(None)
                return
        self._taken -= 1

    def fail(self, error: Callable[[], Exception]) -> None:
        """All requests that wait raise an error of their own at once, instead of one after the other."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_exception(error())


class Turn:
    """One turn of a tenant."""

    __slots__ = ("_tenant", "_turns")

    def __init__(self, turns: TenantTurns, tenant: str) -> None:
        self._turns = turns
        self._tenant = tenant

    async def __aenter__(self) -> None:
        await self._turns.take(self._tenant)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.give_back()


class Endings:
    """Ends calls, a few in each turn of the event loop. Thousands may end at one instant, because their clients hang up or
    their time is over, and each end takes up to a millisecond."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[], object]] = collections.deque()
        self._room = ENDS_AT_ONCE
        """In this turn."""
        self._is_planned = False
        """The next turn of the event loop takes steps, and makes room for others."""

    def end(self, step: Callable[[], object]) -> None:
        """Takes the step that ends a call, now or in a later turn."""
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._room:
            self._room -= 1
            step()
        else:
            self._waiting.append(step)

    def _next(self) -> None:
        self._room = min(max(ENDS_AT_ONCE, len(self._waiting) // ENDS_PART), MOST_ENDS_AT_ONCE)
        self._is_planned = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._room:
            self._room -= 1
            self._waiting.popleft()()


class LoopSteps:
    """One step of one piece of work runs between two turns of other work, however many pieces there are at a time. The
    tenants whose pieces wait take turns."""

    def __init__(self, tenant: str = "", turns: TenantTurns | None = None) -> None:
        self._tenant = tenant
        self._turns = TenantTurns() if turns is None else turns

    def of(self, tenant: str | None) -> "LoopSteps":
        """The steps of a tenant, which take turns with those of the others."""
        return LoopSteps(tenant or "", self._turns)

    async def next(self) -> None:
        """Returns when it is the turn of the caller's next step."""
        async with self._turns.of(self._tenant):
            await asyncio.sleep(0)

    async def convert(self, items: Sequence[S], convert: Callable[[S], T]) -> list[T]:
        """Each item converted, a few in each step."""
        found: list[T] = []
        for first in range(0, len(items), AT_ONCE):
            await self.next()
            found += map(convert, items[first : first + AT_ONCE])
        return found
