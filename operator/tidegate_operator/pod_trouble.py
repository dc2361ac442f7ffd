"""Why does a pod not run? The sentence of the scheduler or of the kubelet, as the pod's status has it."""

import re
from dataclasses import dataclass

from tidegate_operator.spec import Json
from tidegate_operator.weights import weight_report

STARTING = ("ContainerCreating", "PodInitializing")
FINAL = ("InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError")
"""Reasons of a container that waits, after which waiting longer does not help."""
_INSUFFICIENT = re.compile(r"\bInsufficient ([A-Za-z0-9./_-]*[A-Za-z0-9])")
CRASHES = 3
"""Restarts after which a container that waits for its next restart counts as broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTrouble:
    """Why a pod does not run."""

    pod: str
    reason: str
    message: str
    since: str
    """RFC 3339."""
    is_final: bool = False
    """Whether waiting longer does not help."""

    @property
    def sentence(self) -> str:
        return f"{self.pod}: {self.reason}: {self.message}" if self.message else f"{self.pod}: {self.reason}"

    @property
    def condition(self) -> str:
        """The reason of the condition `Degraded`."""
        return self.reason if self.reason in list(weight_report.Reason) else "PodsNotStarting"

    @property
    def lacks(self) -> frozenset[str]:
        """The resources that the pod requests and of which the cluster has too little, as the scheduler names them."""
        return frozenset(_INSUFFICIENT.findall(self.message)) if self.reason == "Unschedulable" else frozenset()


def is_ready(pod: Json) -> bool:
    """Whether the pod serves, and goes on serving."""
    conditions = pod.get("status", {}).get("conditions", ())
    is_up = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return is_up and "deletionTimestamp" not in pod["metadata"]


def has_place(pod: Json) -> bool:
    """Whether the pod takes room on a node, and no other pod gets it soon."""
    return bool(pod.get("spec", {}).get("nodeName")) and "deletionTimestamp" not in pod["metadata"]


def lacks_configuration(pod: Json) -> bool:
    """Whether a Secret or a ConfigMap that a container of the pod needs does not exist."""
    found = of(pod)
    return found is not None and found.reason == "CreateContainerConfigError"


def has_failed(pod: Json) -> bool:
    """Whether the pod has ended and starts no more, for example because its node evicted it. Kubernetes keeps it for long
    after another pod has taken its place."""
    return bool(pod.get("status", {}).get("phase") == "Failed")


def of(pod: Json) -> PodTrouble | None:
    """The pod's trouble; None if it runs, starts, or is being deleted."""
    status, metadata = pod.get("status", {}), pod["metadata"]
    if "deletionTimestamp" in metadata:
        return None
    name, created = metadata["name"], metadata.get("creationTimestamp", "")
    if has_failed(pod):
        reason, message = status.get("reason", "Failed"), status.get("message", "")
        return PodTrouble(pod=name, reason=reason, message=message, since=created, is_final=False)
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return PodTrouble(
                pod=name,
                reason=condition.get("reason", "Unschedulable"),
                message=condition.get("message", ""),
                since=condition.get("lastTransitionTime") or created,
            )
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason is None or reason in STARTING:
            continue
        ended = container.get("lastState", {}).get("terminated", {})
        crashed = reason == "CrashLoopBackOff" and container.get("restartCount", 0) >= CRASHES
        if told := weight_report.parse(ended.get("message", "")):
            is_final = crashed or told[0] in weight_report.LASTING
            return PodTrouble(pod=name, reason=told[0], message=told[1], since=created, is_final=is_final)
        exit_code = f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
        last = " ".join(part for part in (ended.get("reason", ""), exit_code, ended.get("message", "")) if part)
        message = "; ".join(part for part in (waiting.get("message", ""), last) if part)
        return PodTrouble(pod=name, reason=reason, message=message, since=created, is_final=reason in FINAL or crashed)
    return None
