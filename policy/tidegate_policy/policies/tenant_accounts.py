"""What the fair policies share: a lane and an account for each tenant.

`wfq`, `stride`, `cfs`, `rr` and `lottery` differ in the tenant that they choose next, and in the work that a start is
charged before the call is served. All else is here. An account holds the work that a tenant was charged, divided by the
weight of the call (its *tag*). A start is charged a price in advance. Each step then charges the work that the call really
received beyond that, and the end of the call returns a price that was not used. Service changes no key of waiting calls.

Work is seconds of the engine's time by its cost model. The fixed seconds of a step are divided by the greatest batch, since
fairness matters while the batch is full. Idle tenants collect no credit: a tenant whose first call begins to wait has at
least the tag of the tenant that was served last (start-time fair queueing).

A client may invent tenants. At most `MAX_TENANTS` have a lane of their own at a time, and the calls of further tenants
share one lane. Accounts of tenants without calls are kept only while they hold a debt, and at most `MAX_IDLE` of them.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
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
MEMORY = 0.1
"""Weight of a new call in the mean work of its tenant."""


@dataclass(slots=True, eq=False)
class Account:
    """The account of a lane."""

    lane: int
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
        self.mean_s = work_s if not self.mean_s else self.mean_s + MEMORY * (work_s - self.mean_s)


@dataclass(slots=True, eq=False)
class _Served:
    """A call that is served."""

    account: Account
    weight: float
    context_tokens: int
    floor_s: float
    """Work that the call is charged at least while it is served."""
    charged_s: float
    work_s: float = 0.0
    """Work that the call received since its start."""


@dataclass(slots=True, eq=False)
class _Present:
    """A call that waits or is served."""

    account: Account
    tenant: str
    waits: bool = True


class TenantPolicy(StaticPolicy):
    """The base of the policies that share the engine between tenants. Within a tenant the first to come goes first."""

    keys_change = True
    quantum_s = 0.0
    """Work beyond the price is charged in units of this size; 0 = exactly."""

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self.accounts: dict[int, Account] = {}
        """The accounts by lane."""
        self.virtual_s = 0.0
        """The tag of the tenant that was served last; it never falls."""
        self._names: dict[str, Account] = {}
        """The accounts of the tenants that have calls."""
        self._sharing: dict[str, int] = {}
        """Calls of each tenant that shares `SHARED_LANE`."""
        self._calls: dict[CallId, _Present] = {}
        self._served: dict[CallId, _Served] = {}
        self._backlogs = 0
        self._idle: dict[int, None] = {}
        """Lanes without calls whose accounts are kept, in the order in which they became idle."""

    # What the policies decide.

    def price(self, lane: int) -> float:
        """Seconds that a start in this lane is charged in advance. Only events change it."""
        raise NotImplementedError

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

    def rank(self, item: QueuedRequest) -> Key:
        """The most over-served tenant yields first, with its newest call."""
        account = self.accounts.get(self.lane(item))
        return (self.virtual_s if account is None else account.tag, item.call.arrived_at_s)

    def work_s(self, item: QueuedRequest) -> float:
        """The predicted work of a call, in the unit in which accounts are charged."""
        cost, call = self.context.cost(), item.call
        output_s = _output_s(cost) + cost.context_s * call.prompt_tokens
        return cost.prefill_s * call.prompt_tokens + output_s * call.output_predicted * call.sequences

    def tag(self, lane: int) -> float:
        account = self.accounts.get(lane)
        return self.virtual_s if account is None else account.tag

    def charge_start(self, lane: int, sign: float = 1.0) -> None:
        """Charges the price of a start to the account of a lane, or returns it."""
        account = self.accounts.get(lane)
        if account is not None:
            account.tag += sign * self.price(lane) / account.weight

    # Events.

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        call = item.call
        account = self._account(call.tenant)
        account.weight = 1.0 if account.lane == SHARED_LANE else call.weight
        if not account.mean_s:
            account.learn(self.work_s(item))
        account.calls += 1
        self._calls[call.id] = _Present(account, call.tenant)
        self._waits(account)
        return NONE_CHANGED

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        present = self._calls.get(item.call.id)
        if present is not None and present.waits:
            present.waits = False
            account = present.account
            account.waiting -= 1
            price_s = self.price(account.lane)
            self._served[item.call.id] = _Served(
                account, account.weight, item.call.prompt_tokens, self.floor(item, price_s), price_s
            )
        return NONE_CHANGED

    def on_skip(self, now: float, item: QueuedRequest) -> Changed:
        present = self._calls.get(item.call.id)
        if present is not None and self._served.pop(item.call.id, None) is not None:
            present.waits = True
            present.account.waiting += 1
        return NONE_CHANGED

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        cost = self.context.cost()
        served, quantum_s = self._served, self.quantum_s
        prompt_s, context_s = cost.prefill_s, cost.context_s
        output_s = _output_s(cost)
        for call_id, (prompt_tokens, output_tokens) in computed.items():
            call = served.get(call_id)
            if call is None:
                continue
            call.work_s += prompt_s * prompt_tokens + (output_s + context_s * call.context_tokens) * output_tokens
            if call.work_s <= call.floor_s:
                due_s = call.floor_s
            elif quantum_s:
                due_s = call.floor_s = -(-call.work_s // quantum_s) * quantum_s
            else:
                due_s = call.work_s
            if due_s != call.charged_s:
                self._charge(call, due_s)
        return NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        present = self._calls.get(item.call.id)
        if present is not None and not present.waits:
            self._settle(item.call.id)
            present.waits = True
            self._waits(present.account)
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        present = self._calls.pop(call_id, None)
        if present is None:
            return NONE_CHANGED
        account = present.account
        if present.waits:
            account.waiting -= 1
        else:
            served = self._served[call_id]
            if served.work_s:
                account.learn(served.work_s)
            self._settle(call_id)
        account.calls -= 1
        self._leave(present)
        return NONE_CHANGED

    # The accounts.

    def _charge(self, call: _Served, due_s: float) -> None:
        more_s = due_s - call.charged_s
        call.charged_s = due_s
        call.account.tag += more_s / call.weight
        self.on_charge(call.account, more_s / call.weight)

    def _settle(self, call_id: CallId) -> None:
        """The call is no longer served: it is charged exactly the work that it received."""
        call = self._served.pop(call_id)
        self._charge(call, call.work_s)

    def _waits(self, account: Account) -> None:
        """One more call of the account waits. A tenant of which no call waited collected no credit meanwhile."""
        if not account.waiting:
            self._backlogs += 1
            account.backlog = self._backlogs
            account.tag = max(account.tag, self.virtual_s)
            self.on_backlog(account)
        account.waiting += 1

    def on_backlog(self, account: Account) -> None:
        """The first call of an account begins to wait."""

    def _account(self, tenant: str) -> Account:
        """The account of a tenant that has a new call."""
        account = self._names.get(tenant)
        if account is None:
            lane = own_lane(tenant) if len(self._names) - len(self._sharing) < MAX_TENANTS else SHARED_LANE
            account = self.accounts.get(lane)
            if account is None:
                account = self.accounts[lane] = Account(lane, tag=self.virtual_s)
            self._idle.pop(lane, None)
            self._names[tenant] = account
        if account.lane == SHARED_LANE:
            self._sharing[tenant] = self._sharing.get(tenant, 0) + 1
        return account

    def _leave(self, present: _Present) -> None:
        """A call of the tenant left: names and accounts without calls are forgotten."""
        account = present.account
        if account.lane == SHARED_LANE:
            self._sharing[present.tenant] -= 1
            if not self._sharing[present.tenant]:
                del self._sharing[present.tenant], self._names[present.tenant]
        elif not account.calls:
            del self._names[present.tenant]
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
        self._idle = dict.fromkeys(kept)


class TagTurns:
    """The tenant with the smallest tag is next."""

    def __init__(self, policy: TenantPolicy, ahead: dict[int, float] | None = None) -> None:
        self._policy = policy
        self._ahead = ahead
        """In a copy: the charges of starts that have not happened."""

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        policy, ahead = self._policy, self._ahead
        accounts = policy.accounts
        best, best_tag, best_backlog = -1, float("inf"), 0
        for lane in lanes:
            account = accounts.get(lane)
            tag, backlog = (policy.virtual_s, lane) if account is None else (account.tag, account.backlog)
            if ahead is not None:
                tag += ahead.get(lane, 0.0)
            if tag < best_tag or (tag == best_tag and backlog < best_backlog):
                best, best_tag, best_backlog = lane, tag, backlog
        return best

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        policy = self._policy
        if self._ahead is None:
            policy.virtual_s = max(policy.virtual_s, policy.tag(lane))
            policy.charge_start(lane)
        elif (account := policy.accounts.get(lane)) is not None:
            self._ahead[lane] = self._ahead.get(lane, 0.0) + policy.price(lane) / account.weight

    def give_back(self, lane: int, lanes: AbstractSet[int]) -> None:
        self._policy.charge_start(lane, -1.0)

    def copy(self) -> "TagTurns":
        return TagTurns(self._policy, dict(self._ahead or {}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TagTurns) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def _state(self) -> object:
        ahead = self._ahead or {}
        return {lane: account.tag + ahead.get(lane, 0.0) for lane, account in self._policy.accounts.items()}


def _output_s(cost: CostModel) -> float:
    """Seconds of the engine's time for an output token, KV reads aside."""
    return cost.decode_s + cost.step_s / cost.max_batch


def own_lane(tenant: str) -> int:
    """The lane of a tenant: the same in each process, and 63 bits wide, so that clients cannot aim at a tenant's lane."""
    return (
        int.from_bytes(hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1 | 1
    )
