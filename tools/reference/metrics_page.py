"""docs/metrics.md from the metrics themselves: their HELP texts are the meanings."""

import prometheus_client

from tidegate_engine import meters
from tidegate_gateway.observe import prometheus_metrics
from tidegate_operator import operator_metrics

OPENING = """# Metrics

`tools/reference/generate` makes this page from the metrics; the meanings are their HELP texts. They are in the text format
of Prometheus. A gateway serves them on its admin port and, unless `listen.clientMetrics` is off, on its client port. In
Kubernetes they are on port 8002, named `metrics`. An engine serves them on its own `/metrics`, beside vLLM's metrics. The
operator serves them on port 8081, named `metrics`. [alerts.md](alerts.md) has alerts on them.
Units are seconds and ratios. A label whose values clients choose has at most 100 values; further values are `other`.
"""
CLOSING = """## Look at these first

`tidegate top` and the page at `/` show the most important of them without a Prometheus ([operations.md](operations.md)).

- `tidegate_slo_attainment_ratio` below the promised share;
- `tidegate_shed_total` rising;
- `tidegate_engine_up` at 0;
- `tidegate_workflow_unrecorded` above 0 for long: the store is away;
- `tidegate_prediction_error_ratio` far from 1: a cost profile does not fit its card;
- `tidegate_background_errors_total` rising: a fault of the gateway, or a file of settings or keys that it cannot
  use; its log tells which;
- `tidegate_engine_policy_failures_total` rising: a fault of a policy or regulator, which the engine's log describes. The
  engine serves by arrival meanwhile.
"""


def page() -> str:
    meters.Prometheus()
    gateway = _rows(prometheus_metrics.Metrics().registry)
    engine = [row for row in _rows(prometheus_client.REGISTRY) if "`tidegate_engine" in row]
    of_operator = operator_metrics.OperatorMetrics()
    of_operator.add_pools(list, dict)
    operator = _rows(of_operator.registry)
    head = ["| name | type | meaning |", "|---|---|---|"]
    lines = [OPENING, "## Of a gateway\n", *head, *gateway, "", "## Of a real engine\n", *head, *engine]
    lines += ["", "## Of the operator\n", *head, *operator, "", CLOSING]
    return "\n".join(lines)


def _rows(registry: prometheus_client.CollectorRegistry) -> list[str]:
    rows = []
    for collector in registry._collector_to_names:
        for metric in collector.describe() if hasattr(collector, "describe") else ():
            names = getattr(collector, "_labelnames", None) or getattr(metric, "_labelnames", ())
            labels = f"{{{','.join(names)}}}" if names else ""
            total = "_total" if metric.type == "counter" else ""
            rows.append(f"| `{metric.name}{total}{labels}` | {metric.type} | {metric.documentation} |")
    return rows
