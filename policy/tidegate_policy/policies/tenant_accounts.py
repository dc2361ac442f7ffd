"""The lanes and accounts of tenants that the fair policies share, in one file because all events move the same accounts.

`wfq`, `stride`, `cfs`, `rr` and `lottery` differ in the tenant that they choose next, and in the work that a start is
charged before the call is served. All else is here. An account holds the work that a tenant was charged, divided by the
weight of the call (its *tag*). A start is charged a price in advance. Work beyond the price is charged in units as the
engine computes it, and the end of the call corrects the charge to the work that it really received. Service changes no key
of waiting calls.

Work is seconds of the engine's time by its cost model. The fixed seconds of a step are divided by the greatest batch, since
fairness matters while the batch is full. Idle tenants collect no credit: a tenant whose first call begins to wait has at
least the tag of the tenant that was served last (start-time fair queueing).

A client may invent tenants. At most `MAX_TENANTS` have a lane of their own at a time, and the calls of further tenants
share one lane. Accounts of tenants without calls are kept only while they hold a debt, and at most `MAX_IDLE` of them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tidegate_policy.model import CallId
from tidegate_policy.policies import token_counts
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Computed,
    Key,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
)

MAX_TENANTS = 256
"""Tenants with a lane of their own; the calls of further tenants share `SHARED_LANE`."""
MAX_IDLE = 1024
"""Accounts of tenants without calls."""
SHARED_LANE = 0
UNIT = 0.5
MIN_UNIT_S = 1e-3
"""Work beyond the price of a start is charged in units of `UNIT` prices, so that most steps charge few calls."""
SWEEP = 16
"""Steps within which work beyond the price of a start is charged; the work of a prompt is charged at once."""
MEMORY = 0.1
"""Weight of a new call in the mean work of its tenant."""


@dataclass(slots=True, eq=False)
class Account:
    """The account of a lane."""

    lane: int
    tenant: str
    """Its tenant; of `SHARED_LANE`, the tenant that came first."""
    tag: float = 0.0
    """Work charged, in seconds for each unit of weight."""
    weight: float = 1.0
    """The weight of the tenant's newest call."""
    mean_s: float = 0.0
    """Mean work of the tenant's calls; 0 = no call is known."""
    calls: int = 0
    """Calls that wait or are served."""
    waiting: int = 0
    backlog: int = 0
    """Number of the present backlog among all backlogs; of tenants with equal tags the longest backlogged goes first."""

    def learn(self, work_s: float) -> None:
        work_s = max(work_s, 1e-6)
        self.mean_s = work_s if not self.mean_s else self.mean_s + MEMORY * (work_s - self.mean_s)


@dataclass(slots=True, eq=False)
class _Served:
    """A call that is served."""

    account: Account
    weight: float
    output_s: float
    """Work of an output token."""
    floor_s: float
    """Work that the call is charged while it has received no more."""
    charged_s: float
    unit_s: float
    """Work beyond the floor is charged in units of this size."""


class TenantPolicy(StaticPolicy):
    """The base of the policies that share the engine between tenants. Within a tenant the first to come goes first."""

    keys_change = True

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self.accounts: dict[int, Account] = {}
        """The accounts by lane."""
        self.places: dict[int, tuple[float, int]] = {}
        """The tag and backlog number of each account, by which turns compare tenants."""
        self.virtual_s = 0.0
        """The tag of the tenant that was served last; it never falls."""
        self._names: dict[str, Account] = {}
        """The accounts of the tenants that have calls."""
        self._sharing: dict[str, int] = {}
        """Calls of each tenant that shares `SHARED_LANE`."""
        self._calls: dict[CallId, Account] = {}
        """The accounts of the calls that wait or are served."""
        self._sharers: dict[CallId, str] = {}
        """The tenants of those calls that share `SHARED_LANE`."""
        self._served: dict[CallId, _Served] = {}
        self._fresh: dict[CallId, _Served] = {}
        """Calls that started after the last step; they are charged the price of their start, not yet their floor."""
        self._tokens = token_counts.TokenCounts()
        self._uncharged: list[CallId] = []
        """Calls whose overruns are to be charged next, a few in each step."""
        self._backlogs = 0
        self._idle: dict[int, None] = {}
        """Lanes without calls whose accounts are kept, in the order in which they became idle."""

    # What the policies decide.

    def price(self, lane: int) -> float:
        """Seconds that a start in this lane is charged in advance: the mean work of the tenant, unless a policy has another
        price. Only events change it."""
        account = self.accounts.get(lane)
        return 0.0 if account is None else account.mean_s

    def floor(self, item: QueuedRequest, price_s: float) -> float:
        """Seconds that a call is charged at least once it is served."""
        return price_s

    def on_charge(self, account: Account, more_s: float) -> None:
        """The tag of the account moved by this much after the start of a call; down, where the price was too high."""

    # The order of calls.

    def lane(self, item: QueuedRequest) -> int:
        account = self._names.get(item.call.tenant)
        return own_lane(item.call.tenant) if account is None else account.lane

    def key(self, item: QueuedRequest) -> Key:
        return ()

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        lanes = {tenant: account.lane for tenant, account in self._names.items()}
        return [lanes[tenant] if (tenant := item.call.tenant) in lanes else own_lane(tenant) for item in items]

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        return [()] * len(items)

    def rank(self, item: QueuedRequest) -> Key:
        """The most over-served tenant yields first, with its newest call."""
        account = self.accounts.get(self.lane(item))
        return (self.virtual_s if account is None else account.tag, item.call.arrived_at_s)

    def work_s(self, item: QueuedRequest) -> float:
        """The predicted work of a call, in the unit in which accounts are charged."""
        cost, call = self.context.cost(), item.call
        output_s = cost.batched_decode_s + cost.context_s * call.prompt_tokens
        return cost.prefill_s * call.prompt_tokens + output_s * call.output_predicted * call.sequences

    def unit(self, price_s: float) -> float:
        """Work beyond the price of a start is charged in units of this size."""
        return max(UNIT * price_s, MIN_UNIT_S)

    def charge_start(self, lane: int) -> None:
        """Charges the price of a start to the account of a lane."""
        account = self.accounts.get(lane)
        if account is not None:
            self._move(account, account.tag + self.price(lane) / account.weight)

    # Events.

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        call = item.call
        account = self._account(call.tenant)
        account.weight = 1.0 if account.lane == SHARED_LANE else call.weight
        if not account.mean_s:
            account.learn(self.work_s(item))
        self.on_learnt(account)
        account.calls += 1
        self._calls[call.id] = account
        if account.lane == SHARED_LANE:
            self._sharers[call.id] = call.tenant
        self._waits(account)
        return NONE_CHANGED

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        """The calls of a tenant that waits already only count."""
        names, calls = self._names, self._calls
        for item in items:
            call = item.call
            account = names.get(call.tenant)
            if account is None or not account.waiting or account.lane == SHARED_LANE:
                self.on_arrival(now, item)
            else:
                account.weight = call.weight
                account.calls += 1
                account.waiting += 1
                calls[call.id] = account
        for account in names.values():
            self.on_learnt(account)
        return NONE_CHANGED

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        account = self._calls.get(item.call.id)
        if account is not None and item.call.id not in self._served:
            account.waiting -= 1
            price_s = self.price(account.lane)
            cost = self.context.cost()
            served = self._served[item.call.id] = _Served(
                account,
                account.weight,
                cost.batched_decode_s + cost.context_s * item.call.prompt_tokens,
                self.floor(item, price_s),
                price_s,
                self.unit(price_s),
            )
            self._fresh[item.call.id] = served
            self._tokens.forget(item.call.id)
        return NONE_CHANGED

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        if self._fresh:
            for call in self._fresh.values():
                if call.charged_s != call.floor_s:
                    self._charge(call, call.floor_s)
            self._fresh.clear()
        self._charge_overruns(self._tokens.add(computed))
        if not self._uncharged:
            self._uncharged = list(self._served)
        count = len(computed) // SWEEP + 1
        self._charge_overruns(self._uncharged[-count:])
        del self._uncharged[-count:]
        return NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        served = self._served.get(item.call.id)
        if served is not None:
            self._settle(item.call.id)
            self._waits(served.account)
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        account = self._calls.pop(call_id, None)
        if account is None:
            return NONE_CHANGED
        if call_id not in self._served:
            account.waiting -= 1
            self._tokens.forget(call_id)  # of a step that ran when the call was preempted
        else:
            work_s = self._settle(call_id)
            if work_s:
                account.learn(work_s)
                self.on_learnt(account)
        account.calls -= 1
        self._leave(account, self._sharers.pop(call_id, account.tenant))
        return NONE_CHANGED

    # The accounts.

    def _charge_overruns(self, calls: Iterable[CallId]) -> None:
        """Charges those of the calls that received more work than their floor."""
        prompt_s = self.context.cost().prefill_s
        for call_id in calls:
            call = self._served.get(call_id)
            if call is None:
                continue
            work_s = self._work_s(call_id, call, prompt_s)
            if work_s > call.floor_s:
                call.floor_s += call.unit_s * -(-(work_s - call.floor_s) // call.unit_s)
                self._charge(call, call.floor_s)

    def _work_s(self, call_id: CallId, call: _Served, prompt_s: float) -> float:
        """Work that a call received since its start."""
        return call.output_s * self._tokens.outputs(call_id) + prompt_s * self._tokens.prompts(call_id)

    def _charge(self, call: _Served, due_s: float) -> None:
        more_s = due_s - call.charged_s
        call.charged_s = due_s
        self._move(call.account, call.account.tag + more_s / call.weight)
        self.on_charge(call.account, more_s / call.weight)

    def _settle(self, call_id: CallId) -> float:
        """The call is no longer served: it is charged exactly the work that it received, and this work is returned."""
        call = self._served.pop(call_id)
        self._fresh.pop(call_id, None)
        work_s = self._work_s(call_id, call, self.context.cost().prefill_s)
        self._tokens.forget(call_id)
        self._charge(call, work_s)
        return work_s

    def _waits(self, account: Account) -> None:
        """One more call of the account waits. A tenant of which no call waited collected no credit meanwhile."""
        if not account.waiting:
            self._backlogs += 1
            account.backlog = self._backlogs
            self._move(account, max(account.tag, self.virtual_s))
            self.on_backlog(account)
        account.waiting += 1

    def on_learnt(self, account: Account) -> None:
        """The weight or the mean work of an account changed."""

    def on_backlog(self, account: Account) -> None:
        """The first call of an account begins to wait."""

    def catch_up(self, account: Account) -> None:
        """Brings an account to the least tag of the other waiting tenants. For policies whose turns do not follow tags."""
        tags = [other.tag for other in self._names.values() if other.waiting and other is not account]
        self._move(account, max(account.tag, min(tags, default=account.tag)))

    def _move(self, account: Account, tag: float) -> None:
        account.tag = tag
        self.places[account.lane] = (tag, account.backlog)

    def _account(self, tenant: str) -> Account:
        """The account of a tenant that has a new call."""
        account = self._names.get(tenant)
        if account is None:
            lane = own_lane(tenant) if len(self._names) - len(self._sharing) < MAX_TENANTS else SHARED_LANE
            account = self.accounts.get(lane)
            if account is None:
                account = self.accounts[lane] = Account(lane, tenant, tag=self.virtual_s)
            self._idle.pop(lane, None)
            self._names[tenant] = account
        if account.lane == SHARED_LANE:
            self._sharing[tenant] = self._sharing.get(tenant, 0) + 1
        return account

    def _leave(self, account: Account, tenant: str) -> None:
        """A call of the tenant left: names and accounts without calls are forgotten."""
        if account.lane == SHARED_LANE:
            self._sharing[tenant] -= 1
            if not self._sharing[tenant]:
                del self._sharing[tenant], self._names[tenant]
        elif not account.calls:
            del self._names[tenant]
        if not account.calls:
            self._idle[account.lane] = None
            if len(self._idle) > MAX_IDLE:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forgets the idle accounts without debt, and the older half of the others if they are still many."""
        kept = [lane for lane in self._idle if self.accounts[lane].tag > self.virtual_s]
        kept = kept[-(MAX_IDLE // 2) :]
        for lane in self._idle.keys() - set(kept):
            del self.accounts[lane]
            self.places.pop(lane, None)
        self._idle = dict.fromkeys(kept)


class TagTurns:
    """The tenant with the smallest tag is next."""

    def __init__(self, policy: TenantPolicy, places: dict[int, tuple[float, int]] | None = None) -> None:
        self._policy = policy
        self._ahead = places
        """In a copy: the places after starts that have not happened."""

    @property
    def places(self) -> dict[int, tuple[float, int]]:
        return self._policy.places if self._ahead is None else self._ahead

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        places = self.places
        try:
            return min(lanes, key=places.__getitem__)
        except KeyError:  # a queue holds calls of which the policy was not told
            unknown = (self._policy.virtual_s, 0)
            return min(lanes, key=lambda lane: (*places.get(lane, unknown), lane))

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        policy = self._policy
        account = policy.accounts.get(lane)
        if account is None:
            return
        if self._ahead is None:
            policy.virtual_s = max(policy.virtual_s, account.tag)
            policy.charge_start(lane)
        else:
            tag, backlog = self._ahead[lane]
            self._ahead[lane] = (tag + policy.price(lane) / account.weight, backlog)

    def copy(self) -> "TagTurns":
        return TagTurns(self._policy, dict(self.places))


def own_lane(tenant: str) -> int:
    """The lane of a tenant: the same in each process, and 63 bits wide, so that clients cannot aim at a tenant's lane."""
    return (
        int.from_bytes(hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1 | 1
    )
