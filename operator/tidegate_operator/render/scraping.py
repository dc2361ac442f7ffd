"""How Prometheus reads the metrics of a pool: annotations of Services, and what the NetworkPolicies admit.

The metrics of a vLLM engine are on the port of its API, so whoever may read them may call the engine. No pod may unless
the operator is told which pods are Prometheus.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate_operator.render import child_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraping:
    """The Prometheus of the cluster."""

    annotate: bool = False
    """Whether Services have the annotations `prometheus.io/scrape`, `port` and `path`."""
    namespace: str | None = None
    """Namespace of its pods; None admits none."""
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of its pods; empty for all pods of the namespace."""

    def announced(self, service: child_metadata.Manifest, port: int) -> child_metadata.Manifest:
        """The Service with the annotations by which a plain Prometheus finds the metrics of its pods."""
        if not self.annotate:
            return service
        notes = {"scrape": "true", "port": str(port), "path": "/metrics"}
        return child_metadata.annotated(service, {f"prometheus.io/{key}": value for key, value in notes.items()})

    def admitted(self, port: str) -> list[dict[str, Any]]:
        """The rule of a NetworkPolicy that admits Prometheus to a port; none without a Prometheus."""
        if self.namespace is None:
            return []
        peer = {
            "podSelector": {"matchLabels": dict(self.pod_labels)},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
        }
        return [{"from": [peer], "ports": [{"port": port}]}]
