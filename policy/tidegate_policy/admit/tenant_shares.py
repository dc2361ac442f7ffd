"""How many calls may each tenant have at the engines while several tenants compete?

Engines serve the calls of a batch side by side, so a tenant that sends more calls than the others gets more service, in
whatever order calls wait. While several tenants are active and the pool is busy, each tenant may have its max-min share of
the places that saturate the pool, or `HEADROOM` times its part of them by weight if that is more. The headroom is for
bursts. A tenant that of late sent no more work than its part of what the pool can do may have `KEEPS` times that: near
the capacity, calls stay longer than the knee says, and nobody gains when tenants that keep to their parts wait for each
other. A tenant that floods the pool would use the headroom all the time, so it has a part of its max-min share alone,
unless all tenants flood the pool. Calls beyond that wait here. Fairness decides how many calls of a tenant enter, and the
scheduling policy decides which of them enter first.

A place is one sequence, or its part of the KV memory: a call with a long prompt takes several (`held_memory`).

A tenant that is the only one that this gateway and the settings know has no bound. One that is alone for now leaves a few
places of each batch free for the others (`pool_places`). When another one comes, the calls beyond the bounds that wait for
engines are held again (`surplus`). The calls at engines stay there, so a tenant that has less than its part meanwhile may
use places beyond the limits of the engines (`is_owed`). So may one that has little while others fill the engines, even if
each is within its bound: several tenants together may fill them with their headroom.

Places do not bound how long a first token waits for other prompts. So a tenant has few prompts at an engine that are not
computed yet (`prompt_window`). The held calls of a tenant that floods the pool enter so that each engine computes one of
their prompts at a time, and they are marked: engines compute these prompts in small parts (`engine.yielding_prompts`).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from tidegate_policy import policies
from tidegate_policy.admit import held_calls, known_tenants, max_min_places, pool_places, prompt_window
from tidegate_policy.admit.held_tenants import HeldTenants
from tidegate_policy.admit.max_min_places import MARGIN, Rules
from tidegate_policy.admit.queued_calls import EACH_S, FEW, QueuedCalls
from tidegate_policy.admit.tenant_load import PoolLoad
from tidegate_policy.admit.tenant_record import LATE_S, TenantRecord, Told, by_wants
from tidegate_policy.admit.unfair_look import UnfairLook
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Policy, QueuedRequest

HEADROOM = 1.8
"""With less, tenants that keep to their parts are held back below the capacity; with more, a flood delays them more."""
KEEPS = 2.0
"""The factor of the headroom of a tenant that sends no more work than its part. How many places its calls take depends on
the others too, and how much work it sends does not."""
ACTIVE_S = 30.0
"""A tenant without calls for longer does not compete."""
NEWEST_CLASS = 0.05
"""The part of the newest call in the weight of its tenant, whose calls are of several classes."""
LEAST_PLACES = 2
"""Of each tenant, so that a long call does not block the next one."""


class TenantShares:
    """The tenants of one gateway."""

    def __init__(
        self,
        policy: Policy,
        *,
        bounded: bool,
        limits: Callable[[], float] = lambda: math.inf,
        serving: Callable[[float], float] = lambda now: math.inf,
        memory: Callable[[], float] = lambda: math.inf,
        shared: Callable[[], float] | None = None,
        prompts: prompt_window.PromptCosts = prompt_window.FREE,
        holders: HeldTenants | None = None,
    ) -> None:
        """Held calls enter in the order of a policy like `policy`. Without `bounded` no call waits. The engines may have
        `limits` sequences together, `serving` of them those that accept calls now, and `memory` KV tokens. Those of a part
        of the pool have `shared` places for tenants that compete; there tenants have no more than their max-min shares, but
        one call each. `holders` counts the held calls, perhaps of several such objects."""
        headroom = shared is None
        self._limits, self._serving, self._memory = limits, serving, memory
        self.prompts = prompt_window.PoolPrompts(prompts if bounded else prompt_window.FREE)
        self._places = pool_places.PoolPlaces(shared or limits)
        self._headroom = HEADROOM if headroom else 0.0
        self._least, self._full_at = (LEAST_PLACES, 0.0) if headroom else (0, 1.0 - MARGIN)
        """A call enters while its tenant has more free places than that."""
        self._bounds_found: tuple[dict[str, float], Collection[str]] = ({}, ())
        self._bounds_until_s = -math.inf
        """Until then the bounds of many tenants count, whatever happens."""
        self._bounds_hold = False
        """Nothing has happened that changes the bounds."""
        self._bounds_hold_until_s = -math.inf
        """From then on they change with time alone."""
        self._bounds_of = 0.0, 0.0, 0.0
        """The places, the limits and the memory of the engines, as the bounds were computed."""
        self._some_keep = False
        """Some tenant that competes keeps to its part."""
        self._bounds_rate = 0.0
        """The part of the pool's time for each unit of weight."""
        self._bounded = bounded
        self._policy = policy
        self._remembered = known_tenants.KnownTenants()
        self._tenants = self._remembered.records
        self._look = UnfairLook(self._tenants, self.bounds)
        self._holders = holders or HeldTenants(self.standing)
        self._held = self._sequences = self._tokens = 0
        """Held calls; sequences and KV tokens of the calls in the queue or at engines."""
        self.queue = QueuedCalls()
        """The caller removes the calls that it sends."""
        self._place_tokens = math.inf
        """KV tokens of one place, as the bounds were computed."""
        self._elsewhere, self._told = 0, Told()
        """Places that tenants have at other gateways, and those here as this one told the others."""
        self._several = False
        """The settings name several tenants, so another one may come although only one is known."""
        self._others_have = False
        """Some tenant has calls at other gateways."""

    def __len__(self) -> int:
        """Held calls."""
        return self._held

    def __iter__(self) -> Iterator[QueuedRequest]:
        for tenant in self._tenants.values():
            yield from tenant.held

    @property
    def places(self) -> float:
        """Sequences that saturate the pool; infinite without bounds."""
        return self._places.places if self._bounded else math.inf

    def observe(self, place_s: float, demand_s: float) -> None:
        """A call was answered whose sequences take `place_s` seconds together if it is alone in an engine, and which takes
        `demand_s` seconds of the whole pool."""
        self._places.observe(place_s, demand_s)
        self._bounds_hold = False

    @property
    def is_new(self) -> bool:
        """Too few calls were answered to tell the places."""
        return self._places.is_new

    def expect(self, place_s: float, demand_s: float) -> None:
        """As `observe`, of a call that has come in. Counts while this gateway is new."""
        self._places.expect(place_s, demand_s)
        self._bounds_hold = False

    def competes(self, now: float, call: Call) -> None:
        """A call of the tenant has come in."""
        tenant, weight = self._known(call.tenant), max(call.weight, 1e-3)
        before = tenant.weight
        if tenant.seen_at_s + ACTIVE_S <= now and not tenant.wanted:
            tenant.weight = weight
            self._bounds_hold = False
        tenant.weight += NEWEST_CLASS * (weight - tenant.weight)
        if tenant.weight != before:
            self._bounds_hold = False
            self._holders.changed(call.tenant)
        tenant.seen_at_s = now
        self._remembered.seen(call.tenant)
        if not tenant.sequences:
            self._look.is_over(now)  # it may be owed a place

    def arrived(self, now: float, item: QueuedRequest) -> QueuedRequest | None:
        """The call, whose tenant competes, if it enters now; else it is held."""
        self.sends(now, item)
        return self.lets_in(now, item)

    def sends(self, now: float, item: QueuedRequest, demand_s: float | None = None) -> None:
        """Counts the work of a call that has come in, in seconds of the whole pool; None = as such calls have taken."""
        tenant = self._known(item.call.tenant)
        demand_s = self._places.work_s(item.service_s * item.call.sequences) if demand_s is None else demand_s
        if demand_s is not None:
            work_s = max(demand_s, self.prompts.seconds(item.call).work / self.prompts.engines(now))
            tenant.sent_s, tenant.sent_at_s = tenant.rate(now) * LATE_S + work_s, now
            if (tenant.keeps, tenant.light) != max_min_places.standing(self._sent(now, tenant)):
                self._bounds_hold = False

    def lets_in(self, now: float, item: QueuedRequest) -> QueuedRequest | None:
        """The call, whose work was counted, if it enters now; else it is held."""
        tenant = self._known(item.call.tenant)
        if not tenant.waiting and self.has_room(now, item.call):
            return self.marked(now, item)
        self.hold(now, item)
        return None

    def has_room(self, now: float, call: Call) -> bool:
        """Whether the call may enter if none of its tenant is held."""
        tenant = self._known(call.tenant)
        if self._is_the_only_one:
            return True
        bound = self._bounds(now)[0].get(call.tenant, LEAST_PLACES)
        fits = self._is_idle(tenant) or self._fits(tenant, call, tenant.may_take(bound, self.prompts.gateways))
        return fits and not self._has_prompts(now, tenant, call)

    def hold(self, now: float, item: QueuedRequest) -> None:
        """The call waits here; it has left if it had entered."""
        tenant = self._known(item.call.tenant)
        tenant.held.push(now, item)
        self._count_held(item.call.tenant, tenant, 1)

    def surplus(self, now: float) -> dict[str, int]:
        """Sequences that tenants have beyond their bounds, because they were alone when these entered. Those that still
        wait for engines are to be held again. Empty if no tenant has, and for a while after the last time."""
        return self._look.surplus(now)

    def is_owed(self, now: float, name: str) -> bool:
        """Whether the tenant has at most its part while another one has too much, or little of engines that are full."""
        bounds, tenant = self._look.bounds(now), self._tenants[name]
        return (bool(bounds) and tenant.has <= bounds.get(name, 0.0)) or self._lacks(now, name)

    def on_settings(self, *, several: bool) -> None:
        """The settings name several tenants, or do not."""
        self._several = several
        self._bounds_hold = False

    def load(self, now: float) -> PoolLoad:
        """What the tenants have at this gateway, those that want the most. The caller tells the others."""
        self._told.tell(self._here)
        return PoolLoad(self._remembered.load(now), self._places.shown, long_prompts=self.prompts.tenants(now))

    def on_others(self, now: float, load: PoolLoad, gateways: int) -> None:
        """What the tenants have at the other gateways. These tenants compete here too. The pool has so many gateways."""
        loads = load.tenants
        self.prompts.gateways, self.prompts.elsewhere, self._places.told = gateways, load.long_prompts, load.places
        if not loads and not self._others_have:
            return
        self._others_have = bool(loads)
        for name, tenant in self._tenants.items():
            if tenant.elsewhere or tenant.waiting_elsewhere:
                tenant.elsewhere = tenant.waiting_elsewhere = 0
                self._remembered.wants(name, tenant.wanted)
            tenant.rate_elsewhere = 0.0
        for name, there in loads.items():
            tenant = self._known(name)
            if tenant.seen_at_s == -math.inf and not tenant.wanted:
                tenant.weight = max(there.weight, 1e-3)
                self._holders.changed(name)
            tenant.elsewhere, tenant.waiting_elsewhere, tenant.rate_elsewhere = there.entered, there.waiting, there.rate
            self._remembered.wants(name, tenant.wanted)
            if there.entered or there.waiting:
                tenant.seen_at_s = max(tenant.seen_at_s, now)
        self._elsewhere = sum([there.entered for there in loads.values()])
        self._bounds_hold = False
        self._look.is_over(now)

    def bounds(self, now: float) -> dict[str, float]:
        """Places of each active tenant; infinite for the only one that is known."""
        return self._bounds(now)[0]

    def elsewhere(self, name: str) -> int:
        """Places that a tenant has at other gateways."""
        return tenant.elsewhere if (tenant := self._tenants.get(name)) is not None else 0

    def held_of(self, name: str) -> int:
        """Held calls of a tenant."""
        return tenant.waiting if (tenant := self._tenants.get(name)) is not None else 0

    def standing(self, name: str) -> tuple[float, int]:
        """The weight of a tenant and how late it was seen; 1 and 0 for one that is not known."""
        return (tenant.weight, tenant.seen_as) if (tenant := self._tenants.get(name)) is not None else (1.0, 0)

    def take_newest(self, now: float, name: str) -> QueuedRequest | None:
        """The newest held call of a tenant that has some; it leaves."""
        tenant = self._tenants[name]
        if (item := tenant.held.remove_newest(now)) is not None:
            self._count_held(name, tenant, -1)
        return item

    def enter(self, now: float, item: QueuedRequest) -> None:
        """The call enters the queue, for the first time or after an engine failed it."""
        tenant = self._known(item.call.tenant)
        if tenant.seen_at_s == -math.inf and not tenant.wanted:
            tenant.weight = max(item.call.weight, 1e-3)  # it does not compete, so no arrival told its weight
            self._bounds_hold = False
            self._holders.changed(item.call.tenant)
        tenant.sequences += item.call.sequences
        self.queue.add(item.call)
        self._sequences += item.call.sequences
        self._tokens += tenant.memory.add(item.call)
        self.prompts.add(now, tenant.prompts, item.call)
        self.prompts.take_turn(tenant.prompts, tenant.weight, item.call.id)
        self._wants(item.call.tenant, tenant)

    def on_first_token(self, call: Call) -> bool:
        """The prompt of a call is computed. Returns whether held calls waited for that."""
        if (tenant := self._tenants.get(call.tenant)) is None:
            return False
        counted, counted_for_all = self.prompts.remove(tenant.prompts, call.id)
        return (counted and tenant.waiting > 0) or (counted_for_all and self._held > 0)

    def leave(self, call: Call) -> None:
        """A call that had entered has left."""
        if (tenant := self._tenants.get(call.tenant)) is not None:
            self.queue.remove(call)
            tenant.sequences = max(tenant.sequences - call.sequences, 0)
            self._tokens -= tenant.memory.remove(call.id)
            self.withdraw(call)
            self._wants(call.tenant, tenant)
        self._sequences -= call.sequences

    def update(self, item: QueuedRequest) -> bool:
        """Replaces what is known of a held call. False if it is not held."""
        found = (tenant := self._tenants.get(item.call.tenant)) is not None and tenant.held.update(item)
        self._bounds_hold = self._bounds_hold and not found
        return found

    def remove(self, now: float, call_id: CallId, tenant_name: str) -> QueuedRequest | None:
        """Takes out a held call; None if it is not held."""
        if (tenant := self._tenants.get(tenant_name)) is None:
            return None
        if (item := tenant.held.remove(now, call_id)) is not None:
            self._count_held(tenant_name, tenant, -1)
        return item

    def on_policy(self, now: float, policy: Policy) -> None:
        """Orders the held calls by policies like this one."""
        self._policy = policy
        for tenant in self._tenants.values():
            tenant.held.switch(now, policies.create(policy.name, policy.parameters))

    def release(self, now: float) -> list[QueuedRequest]:
        """The held calls that may enter now, those of a tenant in the order of the policy. The caller calls `enter` for
        each."""
        items: list[QueuedRequest] = []
        if not self._held:
            return items
        bounds, flooding = self._bounds(now)
        for name in self._releasable(now, bounds, flooding):
            tenant = self._tenants[name]
            floods, free = name in flooding, tenant.may_take(bounds[name], self.prompts.gateways)
            while tenant.waiting and free > self._full_at:
                call = tenant.held.peek().call
                if not self._fits(tenant, call, free) or self._has_prompts(now, tenant, call, floods=floods):
                    break
                item = tenant.held.pop(now)
                self._count_held(name, tenant, -1)
                free -= tenant.places_of(item.call)
                item = self.marked(now, item)
                self.prompts.add(now, tenant.prompts, item.call)
                items.append(item)
        return items

    def marked(self, now: float, item: QueuedRequest) -> QueuedRequest:
        """A call that enters, marked if its prompt yields to others (`engine.yielding_prompts`) or it is owed a place."""
        call, yields, (bounds, floods) = item.call, self._yields(now, item.call), self._bounds(now)
        keeps = not yields and self._known(call.tenant).keeps
        owed = keeps and bool(floods)
        if not owed and call.tenant not in floods:
            owed = self._lacks(now, call.tenant) if yields else self.is_owed(now, call.tenant)
        ahead = keeps and not owed and len(bounds) > 1 and self.prompts.are_ahead_of(now, call)
        if (call.yields, call.owed, call.ahead) == (yields, owed, ahead):
            return item
        return replace(item, call=replace(call, yields=yields, owed=owed, ahead=ahead))

    def owed(self, now: float) -> Iterator[CallId]:
        """Calls of the queue whose tenants have little of engines that are full, in the order in which they entered. The
        caller sends each to an engine before it takes the next one; the turn of a tenant ends with one that it does not."""
        return self.queue.owed(now, functools.partial(self._lacks, now))

    def _lacks(self, now: float, name: str) -> bool:
        """Whether the tenant has little of engines that are full."""
        return self._bounded and len(self._bounds(now)[0]) > 1 and self._has_little(now, name)

    def _has_little(self, now: float, name: str) -> bool:
        """As `_lacks`, where several tenants compete."""
        tenant = self._tenants[name]
        gained = max(self._told.gained(self._here), 0) * (self.prompts.gateways - 1)  # as others may have too
        part, taken = self._bounds_rate * tenant.weight, self._taken + gained - self.queue.sequences
        has = tenant.has_at_engines(self.queue.sequences_of(name))
        return pool_places.lacks(has, part, taken, self._serving(now))

    def withdraw(self, call: Call) -> None:
        """A call that `release` gave out does not enter."""
        self.prompts.remove(self._known(call.tenant).prompts, call.id)

    def places_of_sequence(self, name: str) -> float:
        """Places that each sequence of a tenant takes here; 1, or more if its calls take more of the KV memory."""
        tenant = self._tenants.get(name)
        return 1.0 if tenant is None or not tenant.sequences else tenant.entered / tenant.sequences

    @property
    def _is_the_only_one(self) -> bool:
        """Whether one tenant is known, and the settings name no other one."""
        return len(self._tenants) == 1 and not self._several

    @property
    def _here(self) -> int:
        """Places that all tenants have at this gateway."""
        return max(self._sequences, math.ceil(self._tokens / self._place_tokens))

    @property
    def _taken(self) -> int:
        """Places that all tenants have at all gateways."""
        return self._here + self._elsewhere

    def _is_idle(self, tenant: TenantRecord) -> bool:
        """Whether places of the pool are free, whatever the tenant may have gained at other gateways."""
        return tenant.free(self.places - self._taken + tenant.has, self.prompts.gateways) > 0.0

    def _fits(self, tenant: TenantRecord, call: Call, free: float) -> bool:
        """Whether the call may take so many free places of its tenant; the first one of a tenant needs only one."""
        most = 1 if tenant.sequences == 0 else call.sequences
        return free > self._full_at and (most == 1 or free >= most)

    def _yields(self, now: float, call: Call) -> bool:
        """Whether engines compute the prompt of the call behind those of others."""
        bounds, flooding = self._bounds(now)
        exceeds = self._some_keep and not self._known(call.tenant).keeps
        long_s = prompt_window.LONG_S if exceeds else prompt_window.VERY_LONG_S
        return call.tenant in flooding or (len(bounds) > 1 and self.prompts.seconds(call).work > long_s)

    def _has_prompts(self, now: float, tenant: TenantRecord, call: Call, *, floods: bool = False) -> bool:
        """Whether engines have enough prompts to compute before this one."""
        if self._is_the_only_one:
            return False
        if self.prompts.is_full(now, tenant.prompts, floods=floods):
            return True
        return not self.prompts.has_turn(now, call) and not self._yields(now, call)

    def _releasable(self, now: float, bounds: dict[str, float], flooding: Collection[str]) -> list[str]:
        """The tenants with held calls and free places, those that want the least for their weight first."""
        tenants, full = self._tenants, self._full_at
        waiting = [name for name in bounds if name in tenants and tenants[name].waiting]
        found = [name for name in waiting if tenants[name].may_take(bounds[name], self.prompts.gateways) > full]
        if len(found) > 1 and self._bounds_hold:  # the bounds may be older than the order
            found = by_wants(tenants, [name for name in tenants if name in found])
        return sorted(found, key=lambda name: self.prompts.turn_s(tenants[name].prompts))

    def _bounds(self, now: float) -> tuple[dict[str, float], Collection[str]]:
        """Places of each active tenant, and the tenants that flood the pool while others keep to their parts. Those of many
        tenants may be older than the newest call, and miss its tenant."""
        if now < self._bounds_until_s:
            return self._bounds_found
        known = len(self._tenants)
        if (
            known > FEW
            or not self._bounds_hold
            or now >= self._bounds_hold_until_s
            or (self.places, self._limits(), self._memory()) != self._bounds_of
        ):
            self._bounds_found = self._bounds_now(now)
            self._bounds_hold = known <= FEW
        competing = len(self._bounds_found[0]) > 1
        self._bounds_until_s = now + known * EACH_S if competing and known > FEW else -math.inf
        return self._bounds_found

    def _count_held(self, name: str, tenant: TenantRecord, more: int) -> None:
        tenant.waiting += more
        self._held += more
        self._holders.count(name, more)
        self._wants(name, tenant)

    def _wants(self, name: str, tenant: TenantRecord) -> None:
        """What the tenant wants has changed."""
        wanted = tenant.wanted
        self._remembered.wants(name, wanted)
        if not tenant.above < wanted < tenant.below:
            self._bounds_hold = False

    def _sent(self, now: float, tenant: TenantRecord) -> float:
        """How many times the work of its part the tenant sent of late."""
        part = self._bounds_rate * tenant.weight
        return (tenant.rate(now) + tenant.rate_elsewhere) / part if part else math.inf

    def _bounds_now(self, now: float) -> tuple[dict[str, float], Collection[str]]:
        """As `_bounds`, computed. Notes how long they hold."""
        names: list[str] = []
        weight, until_s = 0.0, math.inf
        for name, tenant in self._tenants.items():
            seen_until_s = tenant.seen_at_s + ACTIVE_S
            if tenant.has_calls or seen_until_s > now:
                names.append(name)
                weight += tenant.weight
                if not tenant.has_calls:
                    until_s = min(until_s, seen_until_s)
        self._bounds_of = left, limits, memory = self.places, self._limits(), self._memory()
        if self._bounded:
            self._place_tokens = pool_places.tokens_of_place(memory, limits, left if len(names) > 1 else None)
        for tenant in self._tenants.values():
            tenant.place_tokens = self._place_tokens
            # The bounds of others depend on what a tenant wants unless it wants more than its share.
            tenant.above, tenant.below = tenant.wanted - 0.5, tenant.wanted + 0.5
        self._bounds_rate = 1 / weight if weight else 0.0
        self._bounds_hold_until_s = until_s
        self._some_keep = False
        if len(names) < 2:
            alone = math.inf if self._is_the_only_one or not self._bounded else pool_places.alone(limits)
            return dict.fromkeys(names, alone), ()
        keeps = 1.0 if self.is_new else KEEPS  # predictions alone give no headroom
        most = pool_places.MOST_OF_LIMITS * limits if math.isfinite(limits) else left
        rules = Rules(headroom=self._headroom, keeps=keeps, least=self._least, most=most)
        sent, lacks = functools.partial(self._sent, now), functools.partial(self._has_little, now)
        found = max_min_places.divide(self._tenants, names, weight, left, rules, sent, lacks)
        self._bounds_hold_until_s = min(until_s, found.until_s)
        self._some_keep = any(self._tenants[name].keeps for name in names)
        return found.bounds, found.flooding

    def _known(self, name: str) -> TenantRecord:
        if (tenant := self._tenants.get(name)) is None:
            held = held_calls.HeldCalls(policies.create(self._policy.name, self._policy.parameters))
            tenant = TenantRecord(held, place_tokens=self._place_tokens)
            forgotten = self._remembered.add(name, tenant)
            if forgotten is not None:
                self._holders.changed(forgotten)
            self._bounds_hold = False
        return tenant
