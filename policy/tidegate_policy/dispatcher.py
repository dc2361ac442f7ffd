"""The gateway's state machine: events with their instants go in, actions come out.

It holds the calls that wait in the gateway, the calls that are out at engines, and what each engine still owes. It owns
no clock, no socket and no task: the gateway's router and the virtual-time cluster both drive it, and carry out the
actions. Every call that arrives leaves exactly once, by `on_finish`, `on_cancel` or a `Drop`.

Where a call waits is a setting. Without caps every call goes to an engine on arrival (the papers' early binding); with a
cap the rest wait here, in the same order that engines use, and bind to whichever engine has room (late binding).
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_policy import choose, policies
from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, CallId, Decision, DropReason, EngineId
from tidegate_policy.waiting_queue import Start, WaitingQueue

SLACK_EXPIRIES = 64
"""Entries of calls that no longer wait, tolerated beyond one for each that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the gateway may hold."""

    max_waiting: int = 5000
    """Calls that may wait in the gateway; the next one that would have to is dropped as saturated."""
    ttl_s: float = 60.0
    """Seconds that a call without a deadline may wait in the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine as discovery and the shared store describe it."""

    id: EngineId
    cost: CostModel
    cap: int | None = None
    """Sequences that may be out at the engine, everybody's counted; None = no cap. The last call may exceed it."""
    accepting: bool = True
    """False while it drains or is believed ill: nothing new goes there."""
    others: Backlog = NO_BACKLOG
    """What other gateways have sent there and not yet got back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Action: send the call to the engine."""

    call: Call
    decision: Decision
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Action: refuse the call."""

    call: Call
    reason: DropReason
    retry_after_s: float
    """When trying again makes sense, in seconds; at least one."""


Action = Send | Drop


@dataclass(slots=True)
class _Engine:
    state: EngineState
    own: Backlog = NO_BACKLOG


@dataclass(slots=True)
class _Out:
    call: Call
    engine: EngineId
    charge: Backlog
    attempt: int


@dataclass(slots=True)
class _Held:
    """What is remembered of a waiting call beside its ticket."""

    expiry_s: float
    """Instant at which its wait here is over: its deadline, or the end of its time to live if it has none."""
    attempt: int = 1
    avoid: set[EngineId] = field(default_factory=set)


class Dispatcher:
    """Calls in, `Send` and `Drop` out. Not thread-safe; every method is O(engines + log waiting) for each call moved."""

    def __init__(self, *, policy: str, dispatch: choose.Dispatch, limits: Limits, rng: random.Random) -> None:
        self._queue = WaitingQueue(policies.create(policy))
        self._held: dict[CallId, _Held] = {}
        self._expiries: list[tuple[float, CallId]] = []
        """A heap of (expiry, call); entries of calls that no longer wait are skipped, and swept out when they are many."""
        self._out: dict[CallId, _Out] = {}
        self._engines: dict[EngineId, _Engine] = {}
        self._limits = limits
        self._rng = rng
        self._turn = 0
        self._draining = False
        self.dispatch = dispatch

    # What the shell may read.

    @property
    def policy(self) -> str:
        return self._queue.policy.name

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def out(self) -> int:
        return len(self._out)

    def waiting_calls(self) -> list[Call]:
        """Everybody who waits here, next first."""
        return [ticket.call for ticket in self._queue]

    def own_backlog(self, engine: EngineId) -> Backlog:
        """What this dispatcher has out at `engine`."""
        known = self._engines.get(engine)
        return NO_BACKLOG if known is None else known.own

    def engines(self) -> Sequence[EngineState]:
        return [engine.state for engine in self._engines.values()]

    def next_expiry_s(self) -> float | None:
        """The instant at which `on_tick` has something to do; None while nobody waits."""
        while self._expiries and not self._is_held(*self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    # Events.

    def on_arrival(self, now: float, call: Call) -> list[Action]:
        """A call came in. It is sent, waits, or is dropped with a reason."""
        if self._draining:
            return [self._drop(call, DropReason.DRAINING)]
        if not any(engine.state.accepting for engine in self._engines.values()):
            return [self._drop(call, DropReason.NO_ENGINES)]
        if len(self._queue) >= self._limits.max_waiting and not any(map(_has_room, self._engines.values())):
            return [self._drop(call, DropReason.SATURATED)]
        self._queue.push(self._ticket(call))
        self._hold(call, _Held(expiry_s=self._expiry_s(now, call)))
        return self._pump(now)

    def on_progress(self, now: float, call_id: CallId, tokens: int) -> None:
        """The call's prompt is done and `tokens` tokens have come out: its charge shrinks to what is left."""
        out = self._out.get(call_id)
        if out is not None and out.engine in self._engines:
            left = self._engines[out.engine].state.cost.decode_charge(out.call, tokens)
            self._recharge(out, left)

    def on_finish(self, now: float, call_id: CallId) -> list[Action]:
        """The call's last token came, or it failed for good. Unknown ids are ignored (a late echo of a cancel)."""
        self._settle(call_id)
        return self._pump(now)

    def on_refused(self, now: float, call_id: CallId) -> list[Action]:
        """The engine failed the call before its first token: it goes elsewhere, in its old place in the order."""
        out = self._settle(call_id)
        if out is None:
            return []
        held = _Held(expiry_s=self._expiry_s(now, out.call), attempt=out.attempt + 1, avoid={out.engine})
        if not self._willing(held):
            return [self._drop(out.call, DropReason.NO_ENGINES), *self._pump(now)]
        self._queue.push_preempted(self._ticket(out.call))
        self._hold(out.call, held)
        return self._pump(now)

    def on_cancel(self, now: float, call_id: CallId) -> list[Action]:
        """The client went away."""
        if self._queue.remove(call_id) is not None:
            del self._held[call_id]
            return []
        return self.on_finish(now, call_id)

    def on_engine(self, now: float, state: EngineState) -> list[Action]:
        """An engine appeared or what is known of it changed."""
        known = self._engines.get(state.id)
        if known is None:
            still_out = (out.charge for out in self._out.values() if out.engine == state.id)
            self._engines[state.id] = _Engine(state, own=sum(still_out, NO_BACKLOG))
            self._engines = dict(sorted(self._engines.items()))
        else:
            known.state = state
        return self._pump(now)

    def on_engine_gone(self, now: float, engine: EngineId) -> list[Action]:
        """Discovery no longer lists the engine. Calls that are out there end by their own events."""
        self._engines.pop(engine, None)
        return self._pump(now)

    def on_policy(self, policy: str) -> int:
        """Switches the order of those who wait here; returns how many there are. Raises `policies.UnknownPolicy`."""
        self._queue.switch(policies.create(policy))
        return len(self._queue)

    def on_tick(self, now: float) -> list[Action]:
        """Drops the calls whose time in the gateway is over."""
        drops: list[Action] = []
        while (expiry_s := self.next_expiry_s()) is not None and expiry_s <= now:
            drops.append(self._expire(heapq.heappop(self._expiries)[1]))
        return [*drops, *self._pump(now)]

    def on_drain(self) -> None:
        """Nothing new is taken from here on; those who wait are still served."""
        self._draining = True

    # The machinery.

    def _pump(self, now: float) -> list[Action]:
        """Sends from the head of the queue for as long as some engine has room for it."""
        actions: list[Action] = []
        aside: list[Start] = []
        while self._queue:
            rooms = [engine for engine in self._engines.values() if _has_room(engine)]
            if not rooms:
                break
            start = self._queue.pop(now)
            ticket = start.item
            held = self._held[ticket.call.id]
            allowed = [engine for engine in rooms if engine.state.id not in held.avoid]
            if not allowed:
                aside.append(start)
            elif ticket.call.deadline_s is not None and ticket.call.deadline_s <= now:
                del self._held[ticket.call.id]
                actions.append(self._drop(ticket.call, DropReason.DEADLINE_UNREACHABLE))
            else:
                actions.append(self._send(now, ticket.call, allowed))
        for start in reversed(aside):
            self._queue.skip(now, start)
        return actions

    def _send(self, now: float, call: Call, engines: Sequence[_Engine]) -> Send:
        views = [
            choose.EngineView(id=engine.state.id, cost=engine.state.cost, backlog=engine.own + engine.state.others)
            for engine in engines
        ]
        question = choose.RoutingContext(
            now=now, call=call, engines=views, dispatch=self.dispatch, turn=self._turn, rng=self._rng
        )
        decision = choose.choose(question)
        self._turn += 1
        held = self._held.pop(call.id)
        target = self._engines[decision.engine]
        charge = target.state.cost.charge(call)
        target.own += charge
        self._out[call.id] = _Out(call, decision.engine, charge, held.attempt)
        return Send(call=call, decision=decision, attempt=held.attempt)

    def _settle(self, call_id: CallId) -> _Out | None:
        out = self._out.pop(call_id, None)
        if out is not None:
            self._recharge(out, NO_BACKLOG)
        return out

    def _recharge(self, out: _Out, left: Backlog) -> None:
        engine = self._engines.get(out.engine)
        if engine is not None:
            engine.own += left - out.charge
        out.charge = left

    def _ticket(self, call: Call) -> policies.QueuedRequest:
        models = [engine.state.cost for engine in self._engines.values()]
        return policies.QueuedRequest(call=call, service_s=mean_call_seconds(models, call) if models else 0.0)

    def _willing(self, held: _Held) -> bool:
        return any(engine.state.accepting and engine.state.id not in held.avoid for engine in self._engines.values())

    def _expiry_s(self, now: float, call: Call) -> float:
        return now + self._limits.ttl_s if call.deadline_s is None else call.deadline_s

    def _hold(self, call: Call, held: _Held) -> None:
        self._held[call.id] = held
        heapq.heappush(self._expiries, (held.expiry_s, call.id))
        if len(self._expiries) > 2 * len(self._held) + SLACK_EXPIRIES:
            self._expiries = [entry for entry in self._expiries if self._is_held(*entry)]
            heapq.heapify(self._expiries)

    def _is_held(self, expiry_s: float, call_id: CallId) -> bool:
        held = self._held.get(call_id)
        return held is not None and held.expiry_s == expiry_s

    def _expire(self, call_id: CallId) -> Drop:
        ticket = self._queue.remove(call_id)
        held = self._held.pop(call_id)
        if ticket is None:
            raise AssertionError(f"call {call_id!r} is held but does not wait")
        if not self._willing(held):
            return self._drop(ticket.call, DropReason.NO_ENGINES)
        timed = ticket.call.deadline_s is not None
        return self._drop(ticket.call, DropReason.DEADLINE_UNREACHABLE if timed else DropReason.TTL_EXPIRED)

    def _drop(self, call: Call, reason: DropReason) -> Drop:
        backlogs = [
            engine.state.cost.backlog_seconds(engine.own + engine.state.others) for engine in self._engines.values()
        ]
        return Drop(call=call, reason=reason, retry_after_s=min(max(1.0, min(backlogs, default=1.0)), 60.0))


def _has_room(engine: _Engine) -> bool:
    state = engine.state
    return state.accepting and (state.cap is None or engine.own.calls + state.others.calls < state.cap)
