"""How far are the reports of engines believed? One engine that lies, or whose counters run away, must not steer a pool.

A report is first clamped to what one window can have: no more missed targets than targets, for example. Then the weight of
an engine is bounded: an engine that claims many times the calls of the others counts as a few of them. Its ratios stay, so
an engine that really has most of the calls is still evidence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tidegate_policy.qos import Histogram, Qos, Targets, TenantService

LEAST_ENGINES = 3
"""With fewer engines nothing tells which of them is wrong."""
TIMES_OTHERS, FREE_CALLS = 4.0, 200
"""The calls that an engine counts for: as many times the mean of the others, and at least so many less the calls of all
others. The second number lets one engine of an almost idle pool have all the calls."""
OUTLIER = 2.0
"""An engine whose calls, or preemptions, are this many times above the bound is named."""
PREEMPTIONS_A_CALL = 8
"""More preemptions for each finished call are not believed."""
LONGEST_WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """The reports that count, by engine, and a sentence about each engine whose numbers cannot be believed."""

    reports: Mapping[str, Qos]
    outliers: Mapping[str, str]
    shares: Mapping[str, float]
    """By engine: the share of its calls that counts, where it is less than all."""


def believed(reports: Mapping[str, Qos]) -> Believed:
    """The reports of one window, each clamped, and none heavier than its bound."""
    outliers = {}
    counted = {}
    shares = {}
    clamped = {engine: possible(report) for engine, report in reports.items()}
    total = sum(map(_calls, clamped.values()))
    for engine, report in clamped.items():
        raw, calls = reports[engine], _calls(report)
        counted[engine] = report
        if raw.preemptions > OUTLIER * PREEMPTIONS_A_CALL * max(report.finished, 1):
            outliers[engine] = f"it reports {raw.preemptions} preemptions for {report.finished} finished calls"
        if raw.missed > raw.with_target:
            outliers[engine] = f"it reports {raw.missed} missed targets of {raw.with_target}"
        if len(clamped) >= LEAST_ENGINES:
            others = total - calls
            bound = max(TIMES_OTHERS * others / (len(clamped) - 1), FREE_CALLS - others)
            if calls > bound:
                shares[engine] = bound / calls
                counted[engine] = scaled(report, shares[engine])
            if calls > OUTLIER * bound:
                outliers[engine] = f"it reports {calls} calls, and the other engines {total - calls} together"
    return Believed(reports=counted, outliers=outliers, shares=shares)


def within(report: Qos, longest_s: float) -> Qos:
    """The report, whose window is at most as long as the time that has passed."""
    return report if report.window_s <= longest_s else replace(report, window_s=longest_s)


def possible(report: Qos) -> Qos:
    """The report with each number clamped to what one window can have."""
    if _is_possible(report):
        return report
    return replace(
        report,
        window_s=min(max(report.window_s, 0.0), LONGEST_WINDOW_S),
        missed=min(report.missed, report.with_target),
        blocked=min(report.blocked, report.ttft.count),
        preemptions=min(report.preemptions, PREEMPTIONS_A_CALL * report.finished),
        tenants={
            name: tenant._replace(**asdict(_possible(tenant.targets, report.with_target)))
            for name, tenant in report.tenants.items()
        },
        classes={name: _possible(targets, report.with_target) for name, targets in report.classes.items()},
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
                with_target=less(tenant.with_target),
                missed=less(tenant.missed),
            )
            for name, tenant in report.tenants.items()
        },
        classes={name: targets(full) for name, full in report.classes.items()},
    )


def _calls(report: Qos) -> int:
    """The calls that a window is about."""
    times = max(report.ttft.count, report.tpot.count, report.service.count)
    return max(report.finished, report.with_target, report.arrived, times) + report.waiting


def _is_possible(report: Qos) -> bool:
    """Whether `possible` has nothing to clamp, which it can tell without a copy of the report."""
    most = report.with_target
    return (
        0.0 <= report.window_s <= LONGEST_WINDOW_S
        and report.missed <= report.with_target
        and report.blocked <= report.ttft.count
        and report.preemptions <= PREEMPTIONS_A_CALL * report.finished
        and all(missed <= wanted <= most for _, _, _, wanted, missed in report.tenants.values())
        and all(each.missed <= each.with_target <= most for each in report.classes.values())
    )


def _possible(targets: Targets, most: int) -> Targets:
    """The targets of a part of the calls, of which `most` have a target."""
    with_target = min(targets.with_target, most)
    return Targets(with_target=with_target, missed=min(targets.missed, with_target))
