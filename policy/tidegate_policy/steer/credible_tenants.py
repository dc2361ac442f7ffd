"""How far are the reports about tenants believed? One engine must not make a pool look unfair.

Only tenants that wait count in the fairness index. Of three or more engines, at least two must report that a tenant waits,
and the weight of the tenant is the one in the middle of theirs. The tokens count in full, or without those of the engine
that served each tenant most, whichever is the fairer distribution: so a pool is unfair only if it is so without the word of
any single engine. `credible_reports` bounds the other numbers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate_policy import qos
from tidegate_policy.steer import credible_reports

Tenants = Mapping[str, qos.TenantService]

LEAST_WITNESSES = 2
"""Engines that must report that a tenant waits."""


class TenantRecord:
    """What the engines of a pool have reported about its tenants since the last decision."""

    def __init__(self) -> None:
        self._sums: dict[str, qos.TenantService] = {}
        self._most: dict[str, int] = {}
        """By tenant: the tokens of the engine that reported most of them, summed over the observations."""
        self._newest: dict[str, Tenants] = {}
        """The tenants in the newest report of each engine."""

    def add(self, reports: Mapping[str, Sequence[qos.Qos]], shares: Mapping[str, float]) -> None:
        """One observation. `shares` are the shares of the engines that claim too many calls. The tenants are summed over
        all engines at once, because only the decision reads them, and their sum for each engine over the whole time would
        be most of its work."""
        every: list[Tenants] = [self._sums]
        most: dict[str, int] = {}
        for engine, windows in reports.items():
            if not windows:
                continue
            share = shares.get(engine)
            believed = [credible_reports.possible(window) for window in windows]
            if share is not None:
                believed = [credible_reports.scaled(window, share) for window in believed]
            self._newest[engine] = believed[-1].tenants
            together = (
                believed[0].tenants if len(believed) == 1 else qos.tenants_of([each.tenants for each in believed], ())
            )
            for name, (_, served, *_) in together.items():
                if served > most.get(name, 0):
                    most[name] = served
            every.append(together)
        self._sums = qos.tenants_of(every, ())
        for name in most.keys() & self._sums.keys():
            self._most[name] = self._most.get(name, 0) + most[name]

    def together(self) -> dict[str, qos.TenantService]:
        """The service of each tenant in the whole time."""
        if len(self._newest) < credible_reports.LEAST_ENGINES:
            return qos.tenants_of([self._sums], self._newest.values())
        waiting: dict[str, list[int]] = {}
        weights: dict[str, list[float]] = {}
        for tenants in self._newest.values():
            for name, tenant in tenants.items():
                weights.setdefault(name, []).append(tenant.weight)
                if tenant.waiting:
                    waiting.setdefault(name, []).append(tenant.waiting)
        found = {}
        for name, tenant in self._sums.items():
            seen = waiting.get(name, ())
            found[name] = tenant._replace(
                weight=statistics.median_high(weights[name]) if name in weights else tenant.weight,
                waiting=sum(seen) if len(seen) >= LEAST_WITNESSES else 0,
            )
        return self._fairer(found)

    def _fairer(self, found: dict[str, qos.TenantService]) -> dict[str, qos.TenantService]:
        without = {
            name: tenant._replace(served_tokens=tenant.served_tokens - self._most.get(name, 0))
            for name, tenant in found.items()
        }
        everything, rest = (replace(qos.NOTHING, tenants=each).fairness for each in (found, without))
        if everything is None or (rest is not None and rest <= everything):
            return found
        return without
