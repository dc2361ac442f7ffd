"""How many calls may each tenant have in the whole pool, and in a part of it to which some calls are confined?

Some calls may go to a part of the engines only: those for an adapter that not all engines have, and those that only a long
context holds. A tenant that fills these engines may be within its share of all places (`admit.tenant_shares`). So the calls
that are confined to one part compete for the places of this part too. Such a call enters if the part lets it in, and then
the whole pool. The other calls that are at engines of the part count there.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidegate_policy.admit.tenant_shares import ACTIVE_S, TenantShares
from tidegate_policy.dispatch.call_records import Out
from tidegate_policy.dispatch.engine_table import EngineTable
from tidegate_policy.model import Call, CallId, EngineId
from tidegate_policy.policies import Policy, QueuedRequest

MOST_PARTS = 64
"""Parts with shares of their own at a time. Calls confined to further ones have the shares of the whole pool alone."""


@dataclass(slots=True, eq=False)
class _Part:
    """Some of the engines, and the calls that are confined to them."""

    engines: frozenset[EngineId]
    shares: TenantShares
    entered: dict[CallId, bool] = field(default_factory=dict)
    """The calls that are confined to this part, and whether they have entered it."""
    at_engines: dict[str, int] = field(default_factory=dict)
    """Sequences of each tenant at these engines; no entry is 0."""
    used_at_s: float = 0.0

    def enter(self, item: QueuedRequest) -> None:
        """The part lets the call in, unless it did before."""
        if not self.entered[item.call.id]:
            self.entered[item.call.id] = True
            self.shares.enter(item)

    def leave(self, call: Call) -> None:
        """The call has left, if it had entered."""
        if self.entered[call.id]:
            self.entered[call.id] = False
            self.shares.leave(call)

    def on_sent(self, item: QueuedRequest, engine: EngineId) -> None:
        """A call goes to an engine, perhaps to one of the part."""
        call = item.call
        if engine in self.engines:
            self.at_engines[call.tenant] = self.at_engines.get(call.tenant, 0) + call.sequences
            if call.id not in self.entered:  # the part did not let it in, and cannot have held it back
                self.shares.enter(item)
                self.shares.look_again()

    def on_back(self, call: Call, engine: EngineId) -> None:
        """A call has left an engine."""
        if engine in self.engines:
            self.at_engines[call.tenant] -= call.sequences
            if not self.at_engines[call.tenant]:
                del self.at_engines[call.tenant]
            if call.id not in self.entered:
                self.shares.leave(call)


class PoolShares:
    """The tenants of one gateway. Without `bounded` no call waits."""

    def __init__(self, policy: Policy, *, bounded: bool, engines: EngineTable) -> None:
        self._bounded = bounded
        self._policy = policy
        self._engines = engines
        self._whole = TenantShares(policy, bounded=bounded, limits=engines.limits)
        self._parts: dict[frozenset[EngineId], _Part] = {}
        self._part_of: dict[CallId, _Part] = {}

    def __len__(self) -> int:
        """Held calls."""
        held = len(self._whole)
        for part in self._parts.values():
            held += len(part.shares)
        return held

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._whole
        for part in self._parts.values():
            yield from part.shares

    @property
    def confined(self) -> int:
        """The calls here that are confined to a part."""
        return len(self._part_of)

    def observe(self, service_s: float, demand_s: float) -> None:
        """A call was answered that takes `service_s` seconds alone, and `demand_s` of the whole pool."""
        self._whole.observe(service_s, demand_s)

    def competes(self, now: float, call: Call) -> None:
        """A call of the tenant has come in."""
        self._whole.competes(now, call)

    def confine(self, now: float, call: Call, only: Container[EngineId], out: Mapping[CallId, Out]) -> None:
        """The call may go to the engines of `only`, until `forget`. `out` are all calls at engines."""
        ids = [engine.facts.id for engine in self._engines]
        engines = frozenset(engine for engine in ids if engine in only)
        if not self._bounded or not engines or len(engines) == len(ids):
            return
        part = self._parts.get(engines) or self._made(now, engines, out)
        if part is not None:
            part.used_at_s = now
            part.entered[call.id] = False
            part.shares.competes(now, call)
            self._part_of[call.id] = part

    def arrived(self, now: float, item: QueuedRequest) -> bool:
        """Whether the call, whose tenant competes, enters now. If not, it is held."""
        part = self._part_of.get(item.call.id)
        if part is not None:
            if not part.shares.arrived(now, item):
                return False
            part.enter(item)
        return self._whole.arrived(now, item)

    def enter(self, item: QueuedRequest) -> None:
        """The call enters the queue, for the first time or after an engine failed it."""
        self._whole.enter(item)
        if (part := self._part_of.get(item.call.id)) is not None:
            part.enter(item)

    def leave(self, call: Call) -> None:
        """A call that had entered has left the queue, or its engine."""
        self._whole.leave(call)
        if (part := self._part_of.get(call.id)) is not None:
            part.leave(call)

    def forget(self, call: Call) -> None:
        """The call waits no more and is at no engine."""
        part = self._part_of.pop(call.id, None)
        if part is not None:
            part.leave(call)  # it may have been held by the whole pool
            del part.entered[call.id]

    def on_sent(self, item: QueuedRequest, engine: EngineId) -> None:
        """The call goes to the engine."""
        for part in self._parts.values():
            part.on_sent(item, engine)

    def on_back(self, call: Call, engine: EngineId) -> None:
        """The call has left the engine."""
        for part in self._parts.values():
            part.on_back(call, engine)

    def on_first_token(self, call: Call) -> bool:
        """The prompt of a call is computed. Returns whether held calls waited for that."""
        waited = self._whole.on_first_token(call)
        part = self._part_of.get(call.id)
        return (part is not None and part.shares.on_first_token(call)) or waited

    def on_policy(self, now: float, policy: Policy) -> None:
        """Orders the held calls by policies like this one."""
        self._policy = policy
        for shares in self._all():
            shares.on_policy(now, policy)

    def update(self, item: QueuedRequest) -> bool:
        """Replaces what is known of a held call. False if it is not held."""
        part = self._part_of.get(item.call.id)
        return self._whole.update(item) or (part is not None and part.shares.update(item))

    def remove(self, now: float, call: Call) -> QueuedRequest | None:
        """Takes out a held call; None if it is not held."""
        part = self._part_of.get(call.id)
        item = None if part is None else part.shares.remove(now, call.id, call.tenant)
        return item or self._whole.remove(now, call.id, call.tenant)

    def largest(self, now: float, arriving: str) -> QueuedRequest | None:
        """The newest held call of the tenant with the most held calls for its weight, if that tenant has more than
        `arriving`; it leaves. None if no tenant has more, in the whole pool or in a part."""
        for shares in self._all():
            if (item := shares.largest(now, arriving)) is not None:
                return item
        return None

    def hold(self, now: float, item: QueuedRequest) -> None:
        """The call, which has left, waits again for a share."""
        part = self._part_of.get(item.call.id)
        (self._whole if part is None else part.shares).hold(now, item)

    def surplus(self, now: float, queue: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """The calls of the queue that are to be held again, because their tenants were alone when they entered and are not
        any more; the last of the queue go first."""
        surplus = {(id(shares), name): n for shares in self._all() for name, n in shares.surplus(now).items()}
        found: list[QueuedRequest] = []
        if not surplus:
            return found
        whole = id(self._whole)
        for item in reversed(list(queue)):
            part = self._part_of.get(item.call.id)
            keys = [(whole, item.call.tenant)] if part is None else [(id(part.shares), item.call.tenant)]
            if part is not None:
                keys.append((whole, item.call.tenant))
            if any(surplus.get(key, 0) > 0 for key in keys):
                found.append(item)
                for key in keys:
                    surplus[key] = surplus.get(key, 0) - item.call.sequences
        return found

    def is_owed(self, now: float, call: Call) -> bool:
        """Whether the tenant has at most its part, while another one has more than it may have: among the engines to which
        the call is confined, or in the whole pool."""
        part = self._part_of.get(call.id)
        if part is None:
            return self._whole.is_owed(now, call.tenant)
        return part.shares.is_owed_beyond(now, call.tenant, part.at_engines.get(call.tenant, 0))

    def owes_in_part(self, now: float) -> bool:
        """Whether some tenant has more than it may have in a part of the engines for which calls wait."""
        return any(not part.shares.is_fair(now) for part in self._parts.values() if part.entered)

    def release(self, now: float, engines: int, prompt_s: Callable[[Call], float]) -> Iterator[QueuedRequest]:
        """The held calls that may enter now, those of a tenant in the order of the policy. The caller calls `enter` for
        each before it takes the next one. `engines` accept calls; `prompt_s` gives the seconds that an engine takes
        for the prompt of a call alone."""
        for part in self._parts.values():
            if len(part.shares):
                for item in part.shares.release(now, min(engines, len(part.engines)), prompt_s):
                    part.enter(item)
                    if self._whole.arrived(now, item):
                        yield item
        yield from self._whole.release(now, engines, prompt_s)

    def _all(self) -> Iterator[TenantShares]:
        yield self._whole
        for part in self._parts.values():
            yield part.shares

    def _made(self, now: float, engines: frozenset[EngineId], out: Mapping[CallId, Out]) -> _Part | None:
        idle = [key for key, part in self._parts.items() if not part.entered and part.used_at_s + ACTIVE_S <= now]
        for key in idle:
            del self._parts[key]
        if len(self._parts) >= MOST_PARTS:
            return None
        limits = self._engines.limits_of
        shares = TenantShares(self._policy, bounded=True, limits=lambda: limits(engines))
        part = self._parts[engines] = _Part(engines, shares)
        for each in out.values():
            part.on_sent(each.item, each.engine)
        return part
