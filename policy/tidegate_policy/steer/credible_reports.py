"""How far are the reports of engines believed? One engine that lies, or whose counters run away, must not steer a pool.

A report is first clamped to what one window can have: no more missed targets than targets, for example. Then the weight of
an engine is bounded: an engine that claims many times the calls of the others counts as a few of them. Its ratios stay, so
an engine that really has most of the calls is still evidence. Two numbers are bounded more closely, because a few calls of
one engine could change them for a whole pool: the spread of the work, and the calls that waited for longer than their own
work. `credible_tenants` bounds what engines claim about tenants.
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
        for what, count, calls_of in (
            ("works", raw.service.count, raw.arrived),
            ("times per token", raw.tpot.count, raw.finished),
            ("targets", raw.with_target, raw.finished),
        ):
            if count > OUTLIER * max(calls_of, 1):
                outliers[engine] = f"it reports {count} {what} of {calls_of} calls"
        if len(clamped) >= LEAST_ENGINES:
            others = total - calls
            bound = max(TIMES_OTHERS * others / (len(clamped) - 1), FREE_CALLS - others)
            if calls > bound:
                shares[engine] = bound / calls
                counted[engine] = scaled(report, shares[engine])
            if calls > OUTLIER * bound:
                outliers[engine] = f"it reports {calls} calls, and the other engines {total - calls} together"
    if len(clamped) >= LEAST_ENGINES and total > FREE_CALLS:
        counted = _levelled(counted)
    return Believed(reports=counted, outliers=outliers, shares=shares)


def _levelled(reports: Mapping[str, Qos]) -> dict[str, Qos]:
    """The reports in which no engine decides alone how widely the work differs, and how many calls waited for longer than
    their own work. The squares of an engine's works count for at most `TIMES_OTHERS` times the mean of the others. Its
    blocked calls do too, or for all calls of an engine with a mean number of calls."""
    squares = {engine: report.service.squares_s2 for engine, report in reports.items()}
    all_squares = sum(squares.values())
    all_blocked = sum([report.blocked for report in reports.values()])
    all_started = sum([report.ttft.count for report in reports.values()])
    rest, found = len(reports) - 1, {}
    for engine, report in reports.items():
        most_s2 = TIMES_OTHERS * (all_squares - squares[engine]) / rest
        blocked = max(TIMES_OTHERS * (all_blocked - report.blocked), all_started - report.ttft.count) / rest
        if squares[engine] > most_s2:
            report = replace(report, service=_part(report.service, most_s2 / squares[engine]))
        found[engine] = report if report.blocked <= blocked else replace(report, blocked=int(blocked))
    return found


def within(report: Qos, longest_s: float) -> Qos:
    """The report, whose window is at most as long as the time that has passed."""
    return report if report.window_s <= longest_s else replace(report, window_s=longest_s)


def possible(report: Qos) -> Qos:
    """The report with each number clamped to what one window can have."""
    if _is_possible(report):
        return report
    with_target = min(report.with_target, report.finished)
    return replace(
        report,
        window_s=min(max(report.window_s, 0.0), LONGEST_WINDOW_S),
        with_target=with_target,
        missed=min(report.missed, with_target),
        blocked=min(report.blocked, report.ttft.count),
        preemptions=min(report.preemptions, PREEMPTIONS_A_CALL * report.finished),
        service=_of_calls(report.service, report.arrived),
        tpot=_of_calls(report.tpot, report.finished),
        tenants={
            name: tenant._replace(**asdict(_possible(tenant.targets, with_target)))
            for name, tenant in report.tenants.items()
        },
        classes={name: _possible(targets, with_target) for name, targets in report.classes.items()},
    )


def scaled(report: Qos, factor: float) -> Qos:
    """The report with all counts multiplied by `factor` (0 to 1) and rounded down."""

    def less(count: int) -> int:
        return int(count * factor)

    def targets(full: Targets) -> Targets:
        return Targets(with_target=less(full.with_target), missed=less(full.missed))

    return replace(
        report,
        arrived=less(report.arrived),
        finished=less(report.finished),
        waiting=less(report.waiting),
        preemptions=less(report.preemptions),
        ttft=_part(report.ttft, factor),
        tpot=_part(report.tpot, factor),
        service=_part(report.service, factor),
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
        and report.missed <= report.with_target <= report.finished
        and report.service.count <= report.arrived
        and report.tpot.count <= report.finished
        and report.blocked <= report.ttft.count
        and report.preemptions <= PREEMPTIONS_A_CALL * report.finished
        and all(missed <= wanted <= most for _, _, _, wanted, missed in report.tenants.values())
        and all(each.missed <= each.with_target <= most for each in report.classes.values())
    )


def _of_calls(times: Histogram, calls: int) -> Histogram:
    """The durations, of which each call has at most one."""
    return times if times.count <= calls else _part(times, calls / times.count)


def _part(full: Histogram, factor: float) -> Histogram:
    """The histogram with its counts multiplied by `factor` (0 to 1) and rounded down."""
    return Histogram(counts=tuple([int(count * factor) for count in full.counts]))


def _possible(targets: Targets, most: int) -> Targets:
    """The targets of a part of the calls, of which `most` have a target."""
    with_target = min(targets.with_target, most)
    return Targets(with_target=with_target, missed=min(targets.missed, with_target))
