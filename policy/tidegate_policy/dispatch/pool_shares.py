"""How many calls may each tenant have in the whole pool, and in a part of it to which some calls are confined?

Some calls may go to a part of the engines only: those for an adapter that not all engines have, and those that only a long
context holds. A tenant that fills these engines may be within its share of all places (`admit.tenant_shares`). So the calls
that are confined to one part compete for the places of this part too. Such a call enters if the part lets it in, and then
the whole pool. The other calls that are at engines of the part count there, and nobody can hold these back. So a tenant
that has less than its share there may use places beyond the limits of the engines (`owed_in_parts`).

A part has few places, so its shares have no headroom: together they are no more than its places while these are more than
the tenants.
"""

import hashlib
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tidegate_policy.admit.held_tenants import HeldTenants
from tidegate_policy.admit.prompt_window import LONG_S, PromptCosts, PromptSeconds
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad, TenantLoad
from tidegate_policy.admit.tenant_shares import ACTIVE_S, TenantShares
from tidegate_policy.dispatch.call_records import Out
from tidegate_policy.dispatch.engine_table import EngineTable
from tidegate_policy.dispatch.prefix_index import PrefixIndex
from tidegate_policy.model import Call, CallId, EngineId
from tidegate_policy.policies import Policy, QueuedRequest

PARTS_TOLD, TENANTS_TOLD = 8, 16
"""Parts of which a gateway tells the others, those used last, and tenants of each, those that want the most."""
MOST_PARTS = 64
"""Parts with shares of their own at a time. Calls confined to further ones have the shares of the whole pool alone."""
SHORT_S = 0.02
"""Seconds of a prompt of which nobody looks up what engines have of it."""
CHECK_S = 0.5
"""Between two looks at the engines of a part, which may gain or lose an adapter."""


@dataclass(slots=True, eq=False)
class _Part:
    """Some of the engines, and the calls that are confined to them."""

    engines: frozenset[EngineId]
    key: str
    """Of these engines, the same at all gateways."""
    shares: TenantShares
    only: Container[EngineId]
    """The engines of its newest call, which may become others."""
    checked_at_s: float
    used_at_s: float
    entered: dict[CallId, bool] = field(default_factory=dict)
    """The calls that are confined to this part, and whether they have entered it."""
    queue: dict[CallId, Call] = field(default_factory=dict)
    """Those of them that wait for an engine."""
    at_engines: dict[str, int] = field(default_factory=dict)
    """Sequences of each tenant at these engines; no entry is 0."""

    def enter(self, now: float, item: QueuedRequest) -> None:
        """The part lets the call in, unless it did before."""
        if not self.entered[item.call.id]:
            self.entered[item.call.id] = True
            self.shares.enter(now, item)

    def leave(self, call: Call) -> None:
        """The call has left, if it had entered."""
        self.queue.pop(call.id, None)
        if self.entered[call.id]:
            self.entered[call.id] = False
            self.shares.leave(call)

    def on_sent(self, now: float, item: QueuedRequest, engine: EngineId) -> None:
        """A call goes to an engine, perhaps to one of the part."""
        call = item.call
        self.queue.pop(call.id, None)
        if engine in self.engines:
            self.at_engines[call.tenant] = self.at_engines.get(call.tenant, 0) + call.sequences
            if call.id not in self.entered:
                self.shares.enter(now, item)
        self.shares.queue.remove(call)

    def on_back(self, call: Call, engine: EngineId) -> None:
        """A call has left an engine."""
        if engine in self.engines:
            self.at_engines[call.tenant] -= call.sequences
            if not self.at_engines[call.tenant]:
                del self.at_engines[call.tenant]
            if call.id not in self.entered:
                self.shares.leave(call)

    def owed(self, now: float) -> list[CallId]:
        """The calls in the queue of tenants that have less than their shares of these engines, while others have more."""
        bounds, elsewhere = self.shares.bounds(now), self.shares.elsewhere
        if not any(
            count * self.shares.places_of_sequence(tenant) + elsewhere(tenant) > bounds.get(tenant, math.inf)
            for tenant, count in self.at_engines.items()
        ):
            return []
        found: list[CallId] = []
        more: dict[str, int] = {}
        for call in self.queue.values():
            sequences = self.at_engines.get(call.tenant, 0) + more.get(call.tenant, 0)
            has = sequences * self.shares.places_of_sequence(call.tenant) + elsewhere(call.tenant)
            if not has or has + call.sequences <= bounds.get(call.tenant, 0.0):
                found.append(call.id)
                more[call.tenant] = more.get(call.tenant, 0) + call.sequences
        return found


class PoolShares:
    """The tenants of one gateway. Without `bounded` no call waits."""

    def __init__(
        self,
        policy: Policy,
        *,
        bounded: bool,
        engines: EngineTable,
        prefixes: PrefixIndex | None = None,
    ) -> None:
        self._bounded = bounded
        self._policy = policy
        self._engines = engines
        self._prefixes = prefixes
        self._priced: CallId | None = None
        self._price = PromptSeconds(0.0, 0.0)
        """Of the prompt of the call `_priced`, which is asked for several times in turn."""
        self._held_tokens = 0
        """The tokens of that prompt that an engine holds already."""
        self._holders = HeldTenants(lambda name: self._whole.standing(name))
        """The held calls of the whole pool and of all parts; weights are those in the whole pool."""
        self._whole = TenantShares(
            policy,
            bounded=bounded,
            limits=engines.limits,
            serving=engines.serving_limits,
            memory=engines.kv_tokens,
            prompts=PromptCosts(self._prompt_seconds, lambda now: len(engines.accepting(now))),
            holders=self._holders,
        )
        self._parts: dict[frozenset[EngineId], _Part] = {}
        self._part_of: dict[CallId, _Part] = {}
        self._told = NO_LOAD
        """What the other gateways told."""
        self._gateways = 1
        self._several = False

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

    def observe(self, place_s: float, demand_s: float) -> None:
        """A call was answered whose sequences take `place_s` seconds together if it is alone in an engine, and which takes
        `demand_s` seconds of the whole pool."""
        self._whole.observe(place_s, demand_s)

    def on_settings(self, *, several: bool) -> None:
        """The settings name several tenants, or do not."""
        self._several = several
        for shares in self._all():
            shares.on_settings(several=several)

    def load(self, now: float) -> PoolLoad:
        """What the tenants have at this gateway. The caller tells the others."""
        parts: dict[str, Mapping[str, TenantLoad]] = {}
        for part in sorted(self._parts.values(), key=lambda part: part.used_at_s, reverse=True):
            tenants = part.shares.load(now).tenants
            if tenants and len(parts) < PARTS_TOLD:
                parts[part.key] = dict(itertools.islice(tenants.items(), TENANTS_TOLD))
        return replace(self._whole.load(now), parts=parts)

    def on_others(self, now: float, load: PoolLoad, gateways: int) -> None:
        """What the tenants have at the other ones of so many gateways."""
        self._told, self._gateways = load, gateways
        self._priced = None
        self._whole.on_others(now, load, gateways)
        for part in self._parts.values():
            self._tell(now, part)

    def competes(self, now: float, call: Call) -> None:
        """A call of the tenant has come in."""
        self._whole.competes(now, call)

    def confine(self, now: float, call: Call, only: Container[EngineId], out: Mapping[CallId, Out]) -> None:
        """The call may go to the engines of `only`, until `forget`. `out` are all calls at engines."""
        engines = self._part_engines(only) if self._bounded else None
        if engines is None:
            return
        part = self._parts.get(engines) or self._made(now, engines, only, out)
        if part is not None:
            part.used_at_s, part.only = now, only
            part.entered[call.id] = False
            part.shares.competes(now, call)
            self._part_of[call.id] = part

    def arrived(self, now: float, item: QueuedRequest) -> QueuedRequest | None:
        """The call, whose tenant competes, if it enters now; else it is held."""
        if self._bounded:
            self._prompt_seconds(item.call)
            alone_s, demand_s = self._engines.measure(item.call, self._held_tokens)
            if self._whole.is_new:
                self._whole.expect(alone_s * item.call.sequences, demand_s)
            self._whole.sends(now, item, demand_s)
        part = self._part_of.get(item.call.id)
        if part is not None and part.shares.arrived(now, item) is None:
            return None
        enters = self._whole.lets_in(now, item)
        return None if enters is None else self._marked(now, enters, part)

    def enter(self, now: float, item: QueuedRequest) -> None:
        """The call enters the queue, for the first time or after an engine failed it."""
        self._whole.enter(now, item)
        if (part := self._part_of.get(item.call.id)) is not None:
            part.enter(now, item)
            part.queue[item.call.id] = item.call

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

    def on_sent(self, now: float, item: QueuedRequest, engine: EngineId) -> Call:
        """The call goes to the engine. Returns it as the engine gets it: a call goes before no others if this engine has to
        compute a long part of its prompt, which another engine has computed."""
        call = item.call
        self._whole.queue.remove(call)
        for part in self._parts.values():
            part.on_sent(now, item, engine)
        if not self._bounded or self._prefixes is None:
            return call
        if self._prompt_seconds(call).work > LONG_S or not self._held_tokens:
            return call  # it is long already, or no part of it counts as computed
        computed = self._prefixes.computed_tokens_at(engine, call)
        seconds = self._engines.prompt_seconds(call.prompt_tokens, computed)
        if seconds.work <= LONG_S:
            return call
        self._whole.prompts.count(now, call, seconds)
        return replace(call, ahead=False)

    def on_back(self, call: Call, engine: EngineId) -> None:
        """The call has left the engine."""
        for part in self._parts.values():
            part.on_back(call, engine)

    def on_first_token(self, call: Call) -> bool:
        """The prompt of a call is computed. Returns whether held calls waited for that."""
        waited = self._whole.on_first_token(call)
        for part in self._parts.values():
            waited = part.shares.on_first_token(call) or waited
        return waited

    def on_policy(self, now: float, policy: Policy) -> None:
        """Orders the held calls by policies like this one."""
        self._policy = policy
        self._drop_idle(now)
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
        `arriving`; it leaves. None if no tenant has more. Costs O(parts), and O(log tenants) for each change of a count or
        a weight since the last time."""
        most = self._holders.with_more_than(arriving)
        if most is None:
            return None
        fullest = max(self._all(), key=lambda shares: shares.held_of(most))
        return fullest.take_newest(now, most)

    def hold(self, now: float, item: QueuedRequest) -> None:
        """The call, which has left, waits again for a share."""
        part = self._part_of.get(item.call.id)
        (self._whole if part is None else part.shares).hold(now, item)

    def surplus(self, now: float, queue: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """The calls of the queue that are to be held again, because their tenants were alone when they entered and are not
        any more; the last of the queue go first."""
        surplus = {(0, name): count for name, count in self._whole.surplus(now).items()}
        for part in self._parts.values():
            if part.queue:
                surplus |= {(id(part), name): count for name, count in part.shares.surplus(now).items()}
        found: list[QueuedRequest] = []
        if not surplus:
            return found
        for item in reversed(list(queue)):
            call = item.call
            keys = [(0, call.tenant)]
            if (part_of := self._part_of.get(call.id)) is not None:
                keys.append((id(part_of), call.tenant))
            if any(surplus.get(key, 0) > 0 for key in keys):
                found.append(item)
                for key in keys:
                    surplus[key] = surplus.get(key, 0) - call.sequences
        return found

    def is_owed(self, now: float, call: Call) -> bool:
        """Whether the tenant has at most its part of the pool, while another one has more than it may have."""
        return self._whole.is_owed(now, call.tenant)

    def owed(self, now: float) -> Iterator[CallId]:
        """The calls in the queue that may use places beyond the limits of the engines, because their tenants have little of
        engines that are full, or other tenants have more of a part of the engines than their shares. The caller sends each,
        if it can, before it takes the next one."""
        yield from self._whole.owed(now)
        for part in self._parts.values():
            if part.queue:
                yield from part.owed(now)

    def release(self, now: float) -> Iterator[QueuedRequest]:
        """The held calls that may enter now, those of a tenant in the order of the policy. The caller calls `enter` for
        each before it takes the next one."""
        for part in list(self._parts.values()):
            if not len(part.shares):
                continue
            for item in self._of_other_engines(now, part) or part.shares.release(now):
                if self._whole.has_room(now, item.call):
                    yield self._marked(now, self._whole.marked(now, item), part)
                else:
                    part.shares.withdraw(item.call)
                    self._whole.hold(now, item)
        for item in self._whole.release(now):
            part_of = self._part_of.get(item.call.id)
            if part_of is None or part_of.shares.has_room(now, item.call):
                yield self._marked(now, item, part_of)
            else:  # its part has filled since it asked there
                self._whole.withdraw(item.call)
                part_of.shares.hold(now, item)

    def _marked(self, now: float, item: QueuedRequest, part: _Part | None) -> QueuedRequest:
        """A call that enters, as the whole pool has marked it, with the marks of its part: a tenant may flood the few
        engines of a part and be within its share of all."""
        if part is None:
            return item
        whole, there = item.call, part.shares.marked(now, item).call
        yields = whole.yields or there.yields
        owed = whole.owed if whole.yields else not yields and (whole.owed or there.owed)
        ahead = not yields and not owed and (whole.ahead or there.ahead)
        if (whole.yields, whole.owed, whole.ahead) == (yields, owed, ahead):
            return item
        return replace(item, call=replace(whole, yields=yields, owed=owed, ahead=ahead))

    def _of_other_engines(self, now: float, part: _Part) -> list[QueuedRequest]:
        """All held calls of a part whose calls may go to other engines by now: they have the shares of the whole pool."""
        if now < part.checked_at_s + CHECK_S:
            return []
        part.checked_at_s = now
        if self._part_engines(part.only) == part.engines:
            return []
        held = list(part.shares)
        for item in held:
            part.shares.remove(now, item.call.id, item.call.tenant)
            self.forget(item.call)
        return held

    def _prompt_seconds(self, call: Call) -> PromptSeconds:
        """What the prompt of a call costs an engine. One that has computed a part of it computes the rest. A part that
        another call is computing there counts: whichever calls start before it is computed compute it too."""
        if call.id != self._priced:
            cost, self._held_tokens = self._engines.prompt_seconds(call.prompt_tokens), 0
            if cost.work > SHORT_S and self._prefixes is not None and (cached := self._prefixes.cached_tokens(call)):
                self._held_tokens = max(cached.values())
                if computed := self._prefixes.computed_tokens(call):
                    cost = self._engines.prompt_seconds(call.prompt_tokens, computed)
            self._priced, self._price = call.id, cost
        return self._price

    def _serving(self, now: float, engines: frozenset[EngineId]) -> int:
        return sum([engine.facts.id in engines for engine in self._engines.accepting(now)])

    def _all(self) -> Iterator[TenantShares]:
        yield self._whole
        for part in self._parts.values():
            yield part.shares

    def _part_engines(self, only: Container[EngineId]) -> frozenset[EngineId] | None:
        """The engines of the pool in `only`; None if these are all or none."""
        ids = [engine.facts.id for engine in self._engines]
        engines = frozenset([engine for engine in ids if engine in only])
        return engines if 0 < len(engines) < len(ids) else None

    def _made(
        self, now: float, engines: frozenset[EngineId], only: Container[EngineId], out: Mapping[CallId, Out]
    ) -> _Part | None:
        self._drop_idle(now)
        if len(self._parts) >= MOST_PARTS:
            return None
        shares = TenantShares(
            self._policy,
            bounded=True,
            limits=lambda: self._engines.limits_of(engines),
            memory=lambda: self._engines.kv_tokens_of(engines),
            shared=lambda: self._places_of(engines),
            prompts=PromptCosts(self._prompt_seconds, lambda now: self._serving(now, engines)),
            holders=self._holders,
        )
        shares.on_settings(several=self._several)
        key = hashlib.blake2b("\n".join(sorted(engines)).encode(), digest_size=8).hexdigest()
        part = self._parts[engines] = _Part(engines, key, shares, only, now, now)
        for each in out.values():
            part.on_sent(now, each.item, each.engine)
            if each.answered:
                shares.on_first_token(each.call)
        self._tell(now, part)
        return part

    def _tell(self, now: float, part: _Part) -> None:
        """The part learns what tenants have there by way of other gateways."""
        part.shares.on_others(now, PoolLoad(self._told.parts.get(part.key, {})), self._gateways)

    def _places_of(self, engines: frozenset[EngineId]) -> float:
        """Sequences that saturate these engines: by their limits, their part of those that saturate the pool."""
        limits, limit = self._engines.limits(), self._engines.limits_of(engines)
        return self._whole.places * limit / limits if 0.0 < limits < math.inf else limit

    def _drop_idle(self, now: float) -> None:
        for key, part in list(self._parts.items()):
            if not part.entered and part.used_at_s + ACTIVE_S <= now:
                del self._parts[key]
