"""How fast is an error budget spent? Recorded ratios, and alerts by several windows and burn rates.

The error budget of a class is the share of its calls with a target that may miss it: 1 - objective. A burn rate of 1 spends
the budget of 30 days in exactly 30 days. An alert needs a long window, in which enough was spent to matter, and a short
one, in which it is still being spent. So it fires early and ends soon after the trouble does.

Gateways export the objective of each class, so the rules name no class and need no change with the spec. Workflows have one
objective, because templates have none of their own.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import rule_model

WINDOWS = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600, "1d": 86400, "3d": 259200}
"""The recorded windows, in seconds."""
ENOUGH = 25
"""Calls (or workflows) of the long window below which no alert fires: a few of them tell nothing about a share."""
MOST = 0.75
"""A share of missed targets that always counts as fast. With an objective below 95%, a burn rate of 14.4 cannot occur."""
WORKFLOW_OBJECTIVE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """A burn rate that a long and a short window must both exceed."""

    rate: float
    long: str
    short: str


FAST = (Burn(rate=14.4, long="1h", short="5m"), Burn(rate=6, long="6h", short="30m"))
"""2% of the budget of 30 days in an hour, 5% in six."""
SLOW = (Burn(rate=3, long="1d", short="2h"), Burn(rate=1, long="3d", short="6h"))
"""10% in a day, or in three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """What counts, and which of it is an error."""

    prefix: str
    """Of the recorded series."""
    counter: str
    counted: str
    """Label matcher of what counts at all; empty for everything."""
    errors: str
    """Label matcher of the errors."""
    label: str
    """The label that has an objective of its own."""
    budget: str
    """Expression of the error budget."""
    word: str
    noun: str

    @property
    def by(self) -> str:
        return f"by (namespace, pool, {self.label})"

    def calls(self, window: str) -> str:
        """Name of the recorded rate of what counts."""
        return f"{self.prefix}s:rate{window}"

    def ratio(self, window: str) -> str:
        """Name of the recorded share of errors."""
        return f"{self.prefix}_error:ratio_rate{window}"

    @property
    def budget_name(self) -> str:
        return f"{self.prefix}_budget:ratio"


CALLS = Indicator(
    prefix="tidegate:slo_call",
    counter="tidegate_slo_calls_total",
    counted="",
    errors='outcome!="met"',
    label="class",
    budget="1 - max by (namespace, pool, class) (tidegate_slo_objective_ratio)",
    word="Class",
    noun="targets",
)
WORKFLOWS = Indicator(
    prefix="tidegate:workflow",
    counter="tidegate_workflow_deadline_total",
    counted='outcome!="cancelled"',
    errors='outcome=~"late|failed|expired"',
    label="template",
    budget=f"0 * max by (namespace, pool, template) (tidegate_workflow_deadline_total) + {1 - WORKFLOW_OBJECTIVE:.2f}",
    word="Workflow template",
    noun="deadlines",
)


def groups() -> Iterator[rule_model.Group]:
    """The recorded series, then the alerts."""
    for indicator in (CALLS, WORKFLOWS):
        name = "calls" if indicator is CALLS else "workflows"
        yield rule_model.Group(name=f"tidegate-slo-{name}", rules=(*_recordings(indicator), *_alerts(indicator)))


def _recordings(of: Indicator) -> Iterator[rule_model.Recording]:
    yield rule_model.Recording(name=of.budget_name, expr=of.budget)
    for window in WINDOWS:
        calls = of.calls(window)
        yield rule_model.Recording(name=calls, expr=f"sum {of.by} (rate({of.counter}{{{of.counted}}}[{window}]))")
        errors = f"sum {of.by} (rate({of.counter}{{{of.errors}}}[{window}]))"
        yield rule_model.Recording(name=of.ratio(window), expr=f"({errors} or 0 * {calls}) / ({calls} > 0)")


def _alerts(of: Indicator) -> Iterator[rule_model.Alert]:
    shown = f"{{{{ $labels.{of.label} }}}} of pool {{{{ $labels.namespace }}}}/{{{{ $labels.pool }}}}"
    missed = f"misses {{{{ $value | humanizePercentage }}}} of its {of.noun}"
    for burns, speed, severity in ((FAST, "Fast", "critical"), (SLOW, "Slowly", "warning")):
        stem = "TidegateErrorBudgetBurns" if of is CALLS else "TidegateWorkflowBudgetBurns"
        first, second = burns
        yield rule_model.Alert(
            name=f"{stem}{speed}",
            expr=" or ".join(_burns(of, burn) for burn in burns),
            severity=severity,
            lasts="1m" if burns is FAST else "10m",
            summary=f"{of.word} {{{{ $labels.{of.label} }}}} spends its error budget {speed.lower()}.",
            description=f"{of.word} {shown} {missed}: in the last {first.long} and {first.short} more than {first.rate:g} "
            f"times what its objective allows, or in the last {second.long} and {second.short} more than "
            f"{second.rate:g} times.",
        )


def _burns(of: Indicator, burn: Burn) -> str:
    limit = f"clamp_max({burn.rate:g} * {of.budget_name}, {MOST})"
    enough = f"{of.calls(burn.long)} * {WINDOWS[burn.long]} >= {ENOUGH}"
    return f"({of.ratio(burn.long)} > {limit} and {of.ratio(burn.short)} > {limit} and {enough})"


def names() -> set[str]:
    """The recorded series."""
    return {
        rule.name
        for rule in itertools.chain.from_iterable(group.rules for group in groups())
        if isinstance(rule, rule_model.Recording)
    }
