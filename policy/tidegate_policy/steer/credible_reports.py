"""How far are the reports of engines believed? One engine that lies, or whose counters run away, must not steer a pool.

A report is first clamped to what one window can have: no more missed targets than targets, for example. Then the weight of
an engine is bounded: an engine that claims many times the calls of the others counts as a few of them. Its ratios stay, so
an engine that really has most of the calls is still evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidegate_policy.qos import Histogram, Qos, Targets, TenantService

LEAST_ENGINES = 3
"""With fewer engines nothing tells which of them is wrong."""
TIMES_OTHERS, FREE_CALLS = 4.0, 200
"""The calls that an engine counts for: as many times the mean of the others, and so many more. The second number lets one
engine of an almost idle pool have all the calls."""
OUTLIER = 10.0
"""An engine whose calls, or preemptions, are this many times above the bound is named."""
PREEMPTIONS_A_CALL = 8
"""More preemptions for each call are not believed. One of two engines that claims so many is no emergency of the pool."""
LONGEST_WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """The reports that count, by engine, and a sentence about each engine whose numbers cannot be believed."""

    reports: Mapping[str, Qos]
    outliers: Mapping[str, str]


def believed(reports: Mapping[str, Qos]) -> Believed:
    """The reports of one window, each clamped, and none heavier than its bound."""
    outliers = {}
    counted = {}
    clamped = {engine: possible(report) for engine, report in reports.items()}
    total = sum(map(_calls, clamped.values()))
    for engine, report in clamped.items():
        raw, calls = reports[engine], _calls(report)
        counted[engine] = report
        if raw.preemptions > OUTLIER * (calls + FREE_CALLS):
            outliers[engine] = f"it reports {raw.preemptions} preemptions of {calls} calls"
        if raw.missed > raw.with_target:
            outliers[engine] = f"it reports {raw.missed} missed targets of {raw.with_target}"
        if len(clamped) >= LEAST_ENGINES:
            bound = TIMES_OTHERS * (total - calls) / (len(clamped) - 1) + FREE_CALLS
            if calls > bound:
                counted[engine] = scaled(report, bound / calls)
            if calls > OUTLIER * bound:
                outliers[engine] = f"it reports {calls} calls, and the other engines {total - calls} together"
    return Believed(reports=counted, outliers=outliers)


def possible(report: Qos) -> Qos:
    """The report with each number clamped to what one window can have."""
    return replace(
        report,
        window_s=min(max(report.window_s, 0.0), LONGEST_WINDOW_S),
        missed=min(report.missed, report.with_target),
        blocked=min(report.blocked, report.ttft.count),
        preemptions=min(report.preemptions, PREEMPTIONS_A_CALL * _calls(report)),
        tenants={name: _possible_tenant(tenant) for name, tenant in report.tenants.items()},
        classes={name: _possible(targets) for name, targets in report.classes.items()},
    )


def scaled(report: Qos, factor: float) -> Qos:
    """The report with all counts multiplied by `factor` (0 to 1) and rounded down."""

    def less(count: int) -> int:
        return int(count * factor)

    def targets(full: Targets) -> Targets:
        return Targets(with_target=less(full.with_target), missed=less(full.missed))

    def histogram(full: Histogram) -> Histogram:
        return Histogram(counts=tuple(map(less, full.counts)))

    return replace(
        report,
        arrived=less(report.arrived),
        finished=less(report.finished),
        waiting=less(report.waiting),
        preemptions=less(report.preemptions),
        ttft=histogram(report.ttft),
        tpot=histogram(report.tpot),
        service=histogram(report.service),
        with_target=less(report.with_target),
        missed=less(report.missed),
        blocked=less(report.blocked),
        tenants={
            name: TenantService(
                weight=tenant.weight,
                served_tokens=less(tenant.served_tokens),
                waiting=less(tenant.waiting),
                targets=targets(tenant.targets),
            )
            for name, tenant in report.tenants.items()
        },
        classes={name: targets(full) for name, full in report.classes.items()},
    )


def _calls(report: Qos) -> int:
    """The calls that a window is about."""
    return max(report.finished, report.ttft.count, report.with_target, report.arrived) + report.waiting


def _possible(targets: Targets) -> Targets:
    return targets if targets.missed <= targets.with_target else replace(targets, missed=targets.with_target)


def _possible_tenant(tenant: TenantService) -> TenantService:
    targets = _possible(tenant.targets)
    return tenant if targets is tenant.targets else replace(tenant, targets=targets)
