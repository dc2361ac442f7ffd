"""Dashboards of Grafana as values, and their JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """`percentunit`, `s` or `short`."""
    kind: str = "timeseries"
    """`timeseries`, `stat` or `state-timeline`."""
    width: int = 8
    stacked: bool = False

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel at a place of the grid."""
        targets = [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(self.queries)
        ]
        drawing = {"fillOpacity": 20 if self.stacked else 5, "stacking": {"mode": "normal" if self.stacked else "none"}}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.meaning,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": self.unit, **({"custom": drawing} if self.kind == "timeseries" else {})},
                "overrides": [],
            },
            "options": {},
            "targets": targets,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard."""

    name: str
    query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Vertical lines at instants at which `expr` begins to hold."""

    name: str
    expr: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    variables: tuple[Variable, ...]
    annotations: tuple[Annotation, ...]
    rows: Sequence[tuple[str, Sequence[Panel]]]
    """Titles and panels. The panels of a row fill lines of the grid from the left."""

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]

    def text(self) -> str:
        """The dashboard as Grafana imports it."""
        document = {
            "uid": self.uid,
            "title": self.title,
            "tags": ["tidegate"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "timezone": "",
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [*self._variables()]},
            "annotations": {"list": [*self._annotations()]},
            "panels": [*self._placed()],
        }
        return json.dumps(document, indent=1) + "\n"

    def _variables(self) -> Iterator[dict[str, Any]]:
        yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
        for variable in self.variables:
            yield {
                "name": variable.name,
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": variable.query, "refId": "A"},
                "refresh": 2,
                "sort": 1,
            }

    def _annotations(self) -> Iterator[dict[str, Any]]:
        for annotation in self.annotations:
            yield {
                "name": annotation.name,
                "datasource": SOURCE,
                "enable": True,
                "expr": annotation.expr,
                "titleFormat": annotation.title,
                "iconColor": "blue",
                "step": "30s",
            }

    def _placed(self) -> Iterator[dict[str, Any]]:
        number, y = 0, 0
        for title, panels in self.rows:
            number += 1
            yield {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
            x, y = 0, y + 1
            for panel in panels:
                if x + panel.width > WIDTH:
                    x, y = 0, y + HEIGHT
                number += 1
                yield panel.json(number, x, y)
                x += panel.width
            y += HEIGHT
