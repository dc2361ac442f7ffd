"""Rules of Prometheus as values, and their file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

RUNBOOKS = "docs/alerts.md"
"""Where `runbook_url` points in the file. The chart puts its `monitoring.runbooks` in the place of this path."""
HEAD = "# `tools/monitoring/generate` makes this file, for `rule_files` of Prometheus and for the chart's PrometheusRule.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A series that Prometheus computes."""

    name: str
    expr: str

    @property
    def rule(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert."""

    name: str
    expr: str
    severity: str
    """`critical`: a person must act now. `warning`: within the day."""
    summary: str
    description: str
    lasts: str = "0m"
    """How long `expr` must hold before the alert fires."""

    @property
    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.lasts} if self.lasts != "0m" else {}),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated one after the other."""

    name: str
    rules: Sequence[Recording | Alert] = field(default_factory=tuple)


def text(groups: Iterable[Group]) -> str:
    """The rule file of these groups."""
    document = {"groups": [{"name": group.name, "rules": [rule.rule for rule in group.rules]} for group in groups]}
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)
