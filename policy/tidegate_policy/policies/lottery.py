"""`lottery`: a random draw decides each start (Waldspurger and Weihl 1994).

A tenant holds tickets for its weight. Calls differ in work, so a tenant with small calls gets more tickets in proportion
(the paper's compensation tickets): tickets are weight over the mean work of the tenant's calls. The expected share of the
work is then the share of the weights. The draws come from a counter and a seed, so the same seed gives the same result, a
queue can list the order in advance, and a start that did not happen returns its draw.
"""

import bisect
import itertools
from collections.abc import Set as AbstractSet

from tidegate_policy.policies.policy_contract import SchedulerContext
from tidegate_policy.policies.tenant_accounts import Account, TenantPolicy

_MASK = (1 << 64) - 1


class Lottery(TenantPolicy):
    """The tags of the accounts only tell which tenant is over-served, for victims."""

    name = "lottery"

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self.tickets: dict[int, float] = {}
        """The tickets of each lane whose work is known; the others have one."""
        self.turns = LotteryTurns(self, self.context.random.getrandbits(64))

    def on_backlog(self, account: Account) -> None:
        self.catch_up(account)

    def on_learnt(self, account: Account) -> None:
        self.tickets[account.lane] = account.weight / account.mean_s

    def _forget_idle(self) -> None:
        super()._forget_idle()
        for lane in self.tickets.keys() - self.accounts.keys():
            del self.tickets[lane]


class LotteryTurns:
    """Each start uses one draw."""

    def __init__(self, policy: Lottery, seed: int, draws: int = 0, *, real: bool = True) -> None:
        self._policy = policy
        self._seed = seed
        self._draws = draws
        self._real = real

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        if len(lanes) == 1:
            return next(iter(lanes))
        ordered = sorted(lanes)
        get = self._policy.tickets.get
        ends = list(itertools.accumulate(get(lane, 1.0) for lane in ordered))
        place = bisect.bisect_right(ends, _uniform(self._seed, self._draws) * ends[-1])
        return ordered[min(place, len(ordered) - 1)]

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        self._draws += 1
        if self._real:
            self._policy.charge_start(lane)

    def copy(self) -> "LotteryTurns":
        return LotteryTurns(self._policy, self._seed, self._draws, real=False)


def _uniform(seed: int, count: int) -> float:
    """The number `count` of a sequence of uniform numbers in [0, 1) (SplitMix64)."""
    mixed = (seed + (count + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
