"""`rr`: tenants take turns (deficit round robin, Shreedhar and Varghese 1995, with weights).

A round visits the tenants in a fixed order. Each visit adds one quantum of work for each unit of weight, and the tenant's
calls start while its balance is positive. A start is charged the mean work of its tenant, then what its call really
received. A tenant whose balance is negative waits until rounds have paid it.
"""

from collections.abc import Set as AbstractSet

from tidegate_policy.policies.policy_contract import Parameter, SchedulerContext
from tidegate_policy.policies.tenant_accounts import Account, TenantPolicy


class Rr(TenantPolicy):
    """The tags of the accounts only tell which tenant is over-served, for victims."""

    name = "rr"
    PARAMETERS = (
        Parameter(
            name="quantum_s",
            default=0.25,
            low=0.001,
            high=60.0,
            unit="seconds",
            meaning="Each round adds this much work to the balance of a tenant of weight 1.",
        ),
    )

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._rounds = RoundTurns(self, self.parameters["quantum_s"])
        self.turns = self._rounds

    def on_charge(self, account: Account, more_s: float) -> None:
        self._rounds.charge(account.lane, more_s)

    def on_backlog(self, account: Account) -> None:
        self.catch_up(account)
        self._rounds.balances[account.lane] = min(self._rounds.balances.get(account.lane, 0.0), 0.0)

    def _forget_idle(self) -> None:
        super()._forget_idle()
        balances = self._rounds.balances
        for lane in balances.keys() - self.accounts.keys():
            del balances[lane]


class RoundTurns:
    """The balances of the tenants, in seconds for each unit of weight, and the tenant at which the round stands."""

    def __init__(
        self, policy: Rr, quantum_s: float, balances: dict[int, float] | None = None, at: int = -1, *, real: bool = True
    ) -> None:
        self.balances = {} if balances is None else balances
        self._policy = policy
        self._quantum_s = quantum_s
        self._at = at
        self._real = real

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        get, at, quantum_s = self.balances.get, self._at, self._quantum_s
        first, first_rounds = -1, float("inf")
        for lane in lanes:
            balance = get(lane, 0.0)
            rounds = (0 if lane >= at else 1) if balance > 0 else -balance // quantum_s + 1
            if rounds < first_rounds or (rounds == first_rounds and lane < first):
                first, first_rounds = lane, rounds
        return first

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        rounds = self._rounds_until(lane)
        if rounds:
            for each in lanes:
                balance = self.balances.get(each, 0.0) + rounds * self._quantum_s
                self.balances[each] = min(balance, self._quantum_s)
        self._at = lane
        self.charge(lane, self._price(lane))
        if self._real:
            self._policy.charge_start(lane)

    def copy(self) -> "RoundTurns":
        return RoundTurns(self._policy, self._quantum_s, dict(self.balances), self._at, real=False)

    def charge(self, lane: int, work_s: float) -> None:
        self.balances[lane] = self.balances.get(lane, 0.0) - work_s

    def _price(self, lane: int) -> float:
        account = self._policy.accounts.get(lane)
        return 0.0 if account is None else self._policy.price(lane) / account.weight

    def _rounds_until(self, lane: int) -> int:
        """Rounds that must begin before this lane may start a call."""
        balance = self.balances.get(lane, 0.0)
        if balance > 0:
            return 0 if lane >= self._at else 1
        return int(-balance // self._quantum_s) + 1
