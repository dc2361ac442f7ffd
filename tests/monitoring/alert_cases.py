"""For each alert, series with which it fires and series with which it stays silent.

Series are in the notation of `promtool test rules`: `0+1x60` counts from 0 to 60 by steps of 1, one sample a minute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

POOL = 'namespace="serving",pool="chat"'
DAY = 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    alert: str
    fires: dict[str, str]
    silent: tuple[dict[str, str], ...]
    labels: dict[str, str]
    """Of the alert that fires, beside its severity."""
    at_min: int = 90
    interval_min: int = 1
    """Time between two samples, and between two evaluations. The alerts over days need few of them."""


def _calls(met: str, late: str, *, objective: float = 0.95) -> dict[str, str]:
    return {
        f'tidegate_slo_calls_total{{{POOL},class="chat",outcome="met"}}': met,
        f'tidegate_slo_calls_total{{{POOL},class="chat",outcome="late"}}': late,
        f'tidegate_slo_objective_ratio{{{POOL},class="chat"}}': f"{objective}x500",
    }


def _workflows(met: str, late: str, cancelled: str = "0x500") -> dict[str, str]:
    series = f'tidegate_workflow_deadline_total{{{POOL},template="sql",outcome='
    return {f'{series}"met"}}': met, f'{series}"late"}}': late, f'{series}"cancelled"}}': cancelled}


def _phases(*phases: tuple[int, float, float]) -> tuple[str, str]:
    """The values of two counters, of what met its target and of what missed it, that grow at one rate after the other.

    A phase has a number of samples, and by how much the two counters grow with each of them.
    """
    counts, texts = [0.0, 0.0], ["", ""]
    for samples, *growths in phases:
        for index, growth in enumerate(growths):
            texts[index] += f"{counts[index] + growth:g}+{growth:g}x{samples - 1} "
            counts[index] += growth * samples
    return texts[0].strip(), texts[1].strip()


def _one(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"{name}{{{POOL}{labels}}}": values}


IN_POOL = {"namespace": "serving", "pool": "chat"}
OF_CLASS = {**IN_POOL, "class": "chat"}
OF_TEMPLATE = {**IN_POOL, "template": "sql"}


def _burn_cases(stem: str, series: Callable[[str, str], dict[str, str]], labels: dict[str, str]) -> Iterator[Case]:
    """For each pair of windows: it fires alone, and each of its three conditions alone keeps it silent.

    The objective is 95%, so the pairs fire above 72%, 30%, 15% and 5%. Sentences name the pair that would fire.
    """
    yield Case(
        alert=f"{stem}Fast",
        fires=series(*_phases((340, 10, 0), (60, 2, 8))),  # 1 h and 5 min: 80%; 6 h: 13%
        silent=(
            series(*_phases((392, 10, 0), (8, 0, 10))),  # 5 min: 100%, but 1 h: 13%
            series(*_phases((340, 10, 0), (53, 0, 10), (7, 10, 0))),  # 1 h: 88%, but 5 min: 0
        ),
        labels=labels,
        at_min=399,
    )
    yield Case(
        alert=f"{stem}Fast",
        fires=series(*_phases((400, 6, 4))),  # 6 h and 30 min: 40%
        silent=(
            series(*_phases((365, 10, 0), (35, 6, 4))),  # 30 min: 40%, but 6 h: 4%
            series(*_phases((365, 6, 4), (35, 10, 0))),  # 6 h: 36%, but 30 min: 0
        ),
        labels=labels,
        at_min=399,
    )
    yield Case(
        alert=f"{stem}Fast",
        fires=series(*_phases((91, 0, 0.5))),
        silent=(series(*_phases((91, 0, 0.2))),),  # all windows: 100%, but 12 in 1 h, and 18 in all
        labels=labels,
    )
    yield Case(
        alert=f"{stem}Slowly",
        fires=series(*_phases((288, 200, 0), (144, 80, 20))),  # 1 d and 2 h: 20%; 3 d: 4%
        silent=(
            series(*_phases((414, 100, 0), (18, 80, 20))),  # 2 h: 20%, but 1 d: 3%
            series(*_phases((390, 70, 30), (42, 100, 0))),  # 1 d and 3 d: 21% and more, but 2 h and 6 h: 0
        ),
        labels=labels,
        at_min=4310,
        interval_min=10,
    )
    yield Case(
        alert=f"{stem}Slowly",
        fires=series(*_phases((432, 90, 10))),  # 3 d and 6 h: 10%
        silent=(series(*_phases((390, 100, 0), (42, 90, 10))),),  # 6 h: 10%, but 3 d: 1%
        labels=labels,
        at_min=4310,
        interval_min=10,
    )
    yield Case(
        alert=f"{stem}Slowly",
        fires=series(*_phases((289, 0, 0.2))),
        silent=(series(*_phases((289, 0, 0.05))),),  # all windows: 100%, but 7 in 1 d, and 14 in all
        labels=labels,
        at_min=2 * DAY,
        interval_min=10,
    )


def _acting(*operators: str) -> dict[str, str]:
    """A pool with two gateways, and `tidegate_operator_active` of each replica of the operator."""
    gateways = {k: v for name in "ab" for k, v in _one("tidegate_policy_info", "1x100", f',instance="{name}"').items()}
    active = 'tidegate_operator_active{namespace="system",job="operator",pod='
    return gateways | {f'{active}"{index}"}}': values for index, values in enumerate(operators)}


def _awake(desired: str, up: str) -> dict[str, str]:
    """A pool with one gateway, the number of engines that the operator wants, and whether its engine takes calls."""
    return (
        _one("tidegate_policy_info", "1x100", ',policy="edf"')
        | _one("tidegate_operator_engines_desired", desired, ',node_pool="a"')
        | _one("tidegate_engine_up", up, ',engine="a"')
    )


def _fault_cases(alert: str, counter: str, label: str, value: str) -> Iterator[Case]:
    """The series of a counter of faults begins with the first fault. `_xN` is N minutes without it, and `stale` ends it."""
    labels = {**IN_POOL, label: value}

    def counts(values: str, instance: str = "a") -> dict[str, str]:
        return _one(counter, values, f',instance="{instance}",{label}="{value}"')

    for fires, silent in (
        (counts("1x80 1+1x20"), counts("7x100")),
        (counts("_x80 1x20"), counts("0x100")),  # once; never
        (counts("_x80 7x20"), counts("_x80 0x20")),  # in a burst; not yet
        (counts("7x100") | counts("_x76 1x20", "b"), counts("_x60 7x40")),  # once, in another process; long ago
        (counts("_x80 7 stale _x20"), counts("7x80 stale _x20")),  # in a process that then ended; long before it ended
        (counts("7x80 stale _x4 1x20"), counts("7x74 stale 7x30")),  # after a restart; a scrape failed 15 minutes ago
        (counts("1x50 stale _x32 1x20"), counts("7x70 stale _x10 7x20")),  # the same; scrapes failed for 10 minutes
        (counts("7x60 stale _x18 1x20"), counts("7x40 stale _x30 7x40")),  # the same; for half an hour, 15 minutes ago
    ):
        yield Case(alert=alert, fires=fires, silent=(silent,), labels=labels)


CASES = (
    *_burn_cases("TidegateErrorBudgetBurns", _calls, OF_CLASS),
    *_burn_cases("TidegateWorkflowBudgetBurns", _workflows, OF_TEMPLATE),
    Case(
        alert="TidegateErrorBudgetBurnsFast",
        fires=_calls("0+2x200", "0+8x200"),
        silent=(
            _calls("0+10x200", "0+1x200"),  # twice the budget: not fast
            _calls("0+2x60 120+10x200", "0+8x60 480x200"),  # over: the short window is clean
            _calls("0x200", "0+0.2x200"),  # 12 calls in an hour: too few
        ),
        labels=OF_CLASS,
    ),
    Case(
        alert="TidegateErrorBudgetBurnsFast",  # 8% late is 16 times the budget of an objective of 99.5%
        fires=_calls("0+92x200", "0+8x200", objective=0.995),
        silent=(_calls("0+92x200", "0+8x200", objective=0.9),),
        labels=OF_CLASS,
    ),
    Case(
        alert="TidegateErrorBudgetBurnsFast",  # 80% late: an objective of 90% permits no burn rate of 14.4
        fires=_calls("0+2x200", "0+8x200", objective=0.9),
        silent=(_calls("0+4x200", "0+6x200", objective=0.85),),
        labels=OF_CLASS,
    ),
    Case(
        alert="TidegateErrorBudgetBurnsSlowly",
        fires=_calls("0+90x400", "0+10x400"),
        silent=(
            _calls("0+97x400", "0+3x400"),
            _calls("0+90x200 18000+100x200", "0+10x200 2000x200"),  # over for hours
        ),
        labels=OF_CLASS,
        at_min=2 * DAY,
        interval_min=10,
    ),
    Case(
        alert="TidegateWorkflowBudgetBurnsFast",
        fires=_workflows("0+1x200", "0+9x200"),
        silent=(_workflows("0+9x200", "0+1x200"), _workflows("0+9x200", "0x200", cancelled="0+90x200")),
        labels=OF_TEMPLATE,
    ),
    Case(
        alert="TidegateWorkflowBudgetBurnsSlowly",
        fires=_workflows("0+80x400", "0+20x400"),
        silent=(_workflows("0+98x400", "0+2x400"),),
        labels=OF_TEMPLATE,
        at_min=2 * DAY,
        interval_min=10,
    ),
    Case(
        alert="TidegateSaturated",
        fires=_one("tidegate_requests_total", "0+9x100", ',class="chat",outcome="ok"')
        | _one("tidegate_shed_total", "0+1x100", ',reason="saturated"'),
        silent=(
            _one("tidegate_requests_total", "0+99x100", ',class="chat",outcome="ok"')
            | _one("tidegate_shed_total", "0+1x100", ',reason="saturated"'),
            _one("tidegate_requests_total", "0+9x100", ',class="chat",outcome="ok"')
            | _one("tidegate_shed_total", "0+1x100", ',reason="tenant-limit"'),
        ),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateSaturated",
        fires=_one("tidegate_shed_total", "0+1x100", ',reason="saturated"'),  # no call was ever admitted
        silent=(_one("tidegate_shed_total", "0+1x100", ',reason="tenant-limit"'),),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateQueueOld",
        fires=_one("tidegate_queue_oldest_seconds", "45x100", ',class="chat"') | _calls("0+8x100", "0+2x100"),
        silent=(
            _one("tidegate_queue_oldest_seconds", "45x100", ',class="chat"') | _calls("0+10x100", "0x100"),
            _one("tidegate_queue_oldest_seconds", "5x100", ',class="chat"'),
        ),
        labels=OF_CLASS,
    ),
    Case(
        alert="TidegateNoEngines",
        fires=_one("tidegate_policy_info", "1x100", ',policy="edf"')
        | _one("tidegate_engine_up", "0x100", ',engine="a"'),
        silent=(
            _one("tidegate_policy_info", "1x100", ',policy="edf"') | _one("tidegate_engine_up", "1x100", ',engine="a"'),
            _one("tidegate_policy_info", "1x100", ',policy="edf"')
            | _one("tidegate_operator_engines_desired", "0x100", ',node_pool="a"'),  # scaled to zero
        ),
        labels=IN_POOL,
    ),
    *(
        Case(alert="TidegateNoEngines", fires=fires, silent=(silent,), labels=IN_POOL)
        for fires, silent in (
            # The engine of a woken pool does not start for 40 minutes; for 15.
            (_awake("0x50 1x50", "_x100"), _awake("0x75 1x25", "_x100")),
            # It served and was lost, soon after it started; it served before the pool went to zero.
            (_awake("0x70 1x30", "_x75 1x5 0x20"), _awake("1x70 0x10 1x20", "1x70 _x30")),
            # It was lost in a pool that has always had one; it waits for its weights, as one that is not up.
            (_awake("1x100", "1x80 0x20"), _awake("0x75 1x25", "_x80 0x20")),
        )
    ),
    Case(
        alert="TidegateEngineDown",
        fires=_one("tidegate_engine_up", "0x100", ',engine="a",instance="1"')
        | _one("tidegate_engine_up", "0x100", ',engine="a",instance="2"'),
        silent=(
            _one("tidegate_engine_up", "0x100", ',engine="a",instance="1"')
            | _one("tidegate_engine_up", "1x100", ',engine="a",instance="2"'),
        ),
        labels={**IN_POOL, "engine": "a"},
    ),
    Case(
        alert="TidegateEnginesSilent",
        fires=_one("tidegate_operator_engines_silent", "2x100"),
        silent=(_one("tidegate_operator_engines_silent", "0x80 1x2 0x20"),),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateEnginesMissing",
        fires=_one("tidegate_operator_engines_desired", "2x100", ',node_pool="a"')
        | _one("tidegate_operator_engines_ready", "1x100", ',node_pool="a"'),
        silent=(
            _one("tidegate_operator_engines_desired", "2x100", ',node_pool="a"')
            | _one("tidegate_operator_engines_ready", "1x80 2x20", ',node_pool="a"'),
        ),
        labels={**IN_POOL, "node_pool": "a"},
    ),
    Case(
        alert="TidegateStoreLost",
        fires=_one("tidegate_store_up", "0x100", ',instance="1"') | _one("tidegate_store_up", "1x100", ',instance="2"'),
        silent=(_one("tidegate_store_up", "1x100"), _one("tidegate_store_up", "1x89 0x20")),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateEndsUnrecorded",
        fires=_one("tidegate_workflow_unrecorded", "3x100"),
        silent=(_one("tidegate_workflow_unrecorded", "0x80 3x4 0x20"),),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateCertificateExpires",
        fires=_one("tidegate_certificate_expiry_timestamp_seconds", "864000x200"),
        silent=(
            _one("tidegate_certificate_expiry_timestamp_seconds", "5184000x200"),
            _one("tidegate_certificate_expiry_timestamp_seconds", "0x200"),  # no TLS
        ),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegatePolicyFlaps",
        fires=_one("tidegate_operator_decisions_total", "0+1x9 9+0.2x100", ',decision="switch"'),
        silent=(
            _one("tidegate_operator_decisions_total", "0x60 1x100", ',decision="switch"'),
            _one("tidegate_operator_decisions_total", "0+1x100", ',decision="override"'),
            _one("tidegate_operator_decisions_total", "0+1x100", ',decision="keep"'),
        ),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateNotScraped",
        fires=_one("up", "0x100", ',instance="10.0.0.1:8000"'),
        silent=(
            _one("up", "1x100", ',instance="10.0.0.1:8000"'),
            {'up{job="another"}': "0x100"},
        ),
        labels={**IN_POOL, "instance": "10.0.0.1:8000"},
    ),
    *_fault_cases("TidegateGatewayFault", "tidegate_background_errors_total", "loop", "store"),
    *_fault_cases("TidegatePolicyFault", "tidegate_engine_policy_failures_total", "hook", "urgency.key"),
    Case(
        alert="TidegatePoolDegraded",
        fires=_one("tidegate_operator_pool_condition", "1x100", ',condition="Degraded"'),
        silent=(
            _one("tidegate_operator_pool_condition", "0x100", ',condition="Degraded"'),
            _one("tidegate_operator_pool_condition", "1x100", ',condition="Ready"'),
        ),
        labels=IN_POOL,
    ),
    Case(
        alert="TidegateOperatorIdle",
        fires={'tidegate_operator_active{namespace="system",job="operator"}': "0x100"},
        silent=(
            {
                'tidegate_operator_active{namespace="system",job="operator",pod="a"}': "0x100",
                'tidegate_operator_active{namespace="system",job="operator",pod="b"}': "1x100",
            },
        ),
        labels={"namespace": "system", "job": "operator"},
    ),
    *(
        Case(alert="TidegateOperatorAbsent", fires=_acting(*fires), silent=silent, labels={})
        for fires, silent in (
            # No operator is read. One of two acts; one is back after 10 minutes; the other of two takes over.
            ((), (_acting("0x100", "1x100"), _acting("1x60 stale _x9 1x30"), _acting("1x70 stale _x3", "0x73 1x30"))),
            (("1x76 stale _x40",), (_acting("1x80 stale _x20"),)),  # it is gone for 14 minutes, and for 10
            (("0x100", "0x100"), (_acting("0x70 1x100", "0x100"),)),
            (("1x60 stale _x4 1 stale _x4 1 stale _x3 0x2 _x4 1 stale _x4 1 _x30",), (_acting("1x100"),)),  # it crashes
            (("_x100",), ({'tidegate_operator_active{namespace="system",job="operator"}': "_x100"},)),  # no pools
            (("_x100",), ({'tidegate_policy_info{instance="local",policy="edf"}': "1x100"},)),  # a gateway without pool
        )
    ),
    Case(
        alert="TidegateOperatorErrors",
        fires={'tidegate_operator_work_errors_total{job="operator",queue="reconcile"}': "0+1x100"},
        silent=({'tidegate_operator_work_errors_total{job="operator",queue="reconcile"}': "0+1x4 5x100"},),
        labels={"job": "operator", "queue": "reconcile"},
    ),
    Case(
        alert="TidegateOperatorBehind",
        fires={'tidegate_operator_queue_age_seconds{job="operator",queue="reconcile"}': "120x100"},
        silent=({'tidegate_operator_queue_age_seconds{job="operator",queue="reconcile"}': "5x100"},),
        labels={"job": "operator", "queue": "reconcile"},
    ),
)
