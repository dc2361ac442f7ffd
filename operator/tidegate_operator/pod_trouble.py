"""Why does a pod not run? The sentence of the scheduler or of the kubelet, as the pod's status has it."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate_operator.spec import Json
from tidegate_operator.weights import weight_report

STARTING = ("ContainerCreating", "PodInitializing")
FINAL_AFTER_S = {
    "InvalidImageName": 0.0,
    "ErrImageNeverPull": 0.0,
    "ErrImagePull": 60.0,
    "ImagePullBackOff": 60.0,
    "CreateContainerConfigError": 60.0,
}
"""By the reason of a container that waits: the age from which waiting longer does not help, in seconds. A registry that
fails once, and a Secret that is applied a little later, need a moment."""
MOUNTING_S = 120.0
"""Time for which a pod may wait for its volumes and its network before this counts as trouble, in seconds."""
NOT_MOUNTED = (
    "its volumes or network are not ready: a Secret, ConfigMap or claim that it mounts may not exist, or a folder of the "
    "node; see kubectl describe pod {}"
)
"""The kubelet tells more of this only in events."""
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
    usual_s: float = 0.0
    """Age up to which this is usual while a pod starts, so that nothing tells of it, in seconds."""
    final_after_s: float = math.inf
    """Age from which waiting longer does not help, in seconds."""

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
        return PodTrouble(pod=name, reason=reason, message=message, since=created)
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
        if reason is None:
            continue
        if reason in STARTING:
            if since := _unmounted_since(status.get("conditions", ())):
                message = NOT_MOUNTED.format(name)
                return PodTrouble(pod=name, reason=reason, message=message, since=since, usual_s=MOUNTING_S)
            continue
        ended = container.get("lastState", {}).get("terminated", {})
        crashed = reason == "CrashLoopBackOff" and container.get("restartCount", 0) >= CRASHES
        since = created if crashed else _waits_since(created, status.get("conditions", ()), ended)
        if told := weight_report.parse(ended.get("message", "")):
            final_after_s = 0.0 if crashed or told[0] in weight_report.LASTING else math.inf
            return PodTrouble(pod=name, reason=told[0], message=told[1], since=since, final_after_s=final_after_s)
        exit_code = f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
        last = " ".join(part for part in (ended.get("reason", ""), exit_code, ended.get("message", "")) if part)
        message = "; ".join(part for part in (waiting.get("message", ""), last) if part)
        final_after_s = 0.0 if crashed else FINAL_AFTER_S.get(reason, math.inf)
        return PodTrouble(pod=name, reason=reason, message=message, since=since, final_after_s=final_after_s)
    return None


def _unmounted_since(conditions: Iterable[Json]) -> str | None:
    """Since when a pod on a node has neither its volumes nor its network; None if it has both."""
    found = (item for item in conditions if (item["type"], item["status"]) == ("PodReadyToStartContainers", "False"))
    return next((item.get("lastTransitionTime") for item in found), None)


def _waits_since(created: str, conditions: Iterable[Json], ended: Json) -> str:
    """Since when a container waits, as far as the status of its pod tells: since it ended, since the step before it in the
    start of the pod, or else since the creation of the pod."""
    steps = ("PodScheduled", "PodReadyToStartContainers", "Initialized")
    done = [item for item in conditions if item["type"] in steps and item["status"] == "True"]
    return max([created, ended.get("finishedAt") or "", *(item.get("lastTransitionTime") or "" for item in done)])
