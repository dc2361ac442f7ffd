"""How far are the reports about tenants believed? One engine must not make a pool look unfair.

Only tenants that wait count in the fairness index. Of three or more engines, at least two must report that a tenant waits,
and the weight of the tenant is the one in the middle of theirs. The tokens count in full, or without those of the engine
that served each tenant most, whichever is the fairer distribution: so a pool is unfair only if it is so without the word of
any single engine. `credible_reports` bounds the other numbers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidegate_policy import qos
from tidegate_policy.steer import credible_reports

Tenants = Mapping[str, qos.TenantService]

LEAST_WITNESSES = 2
"""Engines that must report that a tenant waits."""


class TenantRecord:
    """What the engines of a pool have reported about its tenants since the last decision."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}
        """By tenant: served tokens, calls with a target, and missed targets. Of more than `qos.MOST_TENANTS` those count
        that come first, so that the time of a decision has a bound."""
        self._most: dict[str, int] = {}
        """By tenant: the tokens of the engine that reported most of them, summed over the observations."""
        self._newest: dict[str, Tenants] = {}
        """The tenants in the newest report of each engine."""

    def add(self, reports: Mapping[str, Sequence[qos.Qos]], shares: Mapping[str, float]) -> None:
        """One observation. `shares` are the shares of the engines that claim too many calls. The tenants are summed over
        all engines at once, because only the decision reads them, and their sum for each engine over the whole time would
        be most of its work."""
        most: dict[str, int] = {}
        for engine, windows in reports.items():
            served_here: dict[str, int] = {}
            share = shares.get(engine)
            for window in map(credible_reports.possible, windows):
                self._newest[engine] = (window if share is None else credible_reports.scaled(window, share)).tenants
                self._sum(self._newest[engine], served_here)
            for name, served in served_here.items():
                if served > most.get(name, 0):
                    most[name] = served
        for name, served in most.items():
            self._most[name] = self._most.get(name, 0) + served

    def _sum(self, tenants: Tenants, served_here: dict[str, int]) -> None:
        """Adds a window to the sums, and to the tokens of its engine in this observation."""
        sums = self._sums
        for name, (_, served, _, wanted, missed) in tenants.items():
            found = sums.get(name)
            if found is None:
                if len(sums) >= qos.MOST_TENANTS:
                    continue
                found = sums[name] = [0, 0, 0]
            found[0] += served
            found[1] += wanted
            found[2] += missed
            served_here[name] = served_here.get(name, 0) + served

    def together(self) -> dict[str, qos.TenantService]:
        """The service of each tenant in the whole time."""
        waiting: dict[str, list[int]] = {}
        weights: dict[str, list[float]] = {}
        for tenants in self._newest.values():
            for name, tenant in tenants.items():
                weights.setdefault(name, []).append(tenant.weight)
                if tenant.waiting:
                    waiting.setdefault(name, []).append(tenant.waiting)
        is_judged = len(self._newest) >= credible_reports.LEAST_ENGINES
        witnesses, weight_of = (LEAST_WITNESSES, statistics.median_high) if is_judged else (1, max)
        found = {
            name: qos.TenantService(
                weight_of(weights[name]) if name in weights else 1.0,
                served,
                sum(waiting[name]) if len(waiting.get(name, ())) >= witnesses else 0,
                wanted,
                missed,
            )
            for name, (served, wanted, missed) in self._sums.items()
        }
        return self._fairer(found) if is_judged else found

    def _fairer(self, found: dict[str, qos.TenantService]) -> dict[str, qos.TenantService]:
        without = {
            name: tenant._replace(served_tokens=tenant.served_tokens - self._most.get(name, 0))
            for name, tenant in found.items()
        }
        everything, rest = (replace(qos.NOTHING, tenants=each).fairness for each in (found, without))
        if everything is None or (rest is not None and rest <= everything):
            return found
        return without
