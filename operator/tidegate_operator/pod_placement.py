"""Where do the pods of a component run? The part of a spec that the scheduler reads, the same for every component."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
"""A piece of a Kubernetes object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Each field has the form that it has in a Pod."""

    node_selector: Json
    tolerations: tuple[Json, ...]
    affinity: Json
    priority_class: str | None
    annotations: Json
    """Of the pods."""

    @staticmethod
    def of(item: Json) -> "Placement":
        """The placement in the part of a spec that describes the component."""
        return Placement(
            node_selector=item.get("nodeSelector", {}),
            tolerations=tuple(item.get("tolerations", ())),
            affinity=item.get("affinity", {}),
            priority_class=item.get("priorityClassName"),
            annotations=item.get("podAnnotations", {}),
        )

    def pod_fields(self) -> dict[str, Any]:
        """The fields of a pod's spec; none for an empty placement."""
        fields = {
            "nodeSelector": dict(self.node_selector),
            "tolerations": list(self.tolerations),
            "affinity": dict(self.affinity),
            "priorityClassName": self.priority_class,
        }
        return {name: value for name, value in fields.items() if value}
