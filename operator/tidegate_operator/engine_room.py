"""For how long must a new engine find no room before an old one stops for it?

Pure. An engine that stops keeps its GPUs until it has finished its calls, and Kubernetes creates the next new engine
meanwhile. A node that a cluster autoscaler adds takes minutes. In both cases the room comes without the loss of an engine,
so `rollout` stops one only after the lack has lasted. The instant since which it lasts is in an annotation of the
Deployment, because the condition of the pod also counts the time in which engines were leaving.
"""

import datetime
from collections.abc import Iterable

from tidegate_operator import engine_place, spec
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json
from tidegate_policy import duration

SINCE = f"{child_metadata.GROUP}/no-room-since"
"""Annotation: the instant since which a new engine has found no room, while no engine of the pool was leaving."""
PATIENCE_S = 60.0
"""Time for which the lack of room must last in a pool that the pool's own autoscaler does not scale. A scheduler needs
seconds to see room that has just become free."""
WAITS = (
    "finds no room for an engine of the new revision; an old one stops for it once that has lasted for {:g} s, in which no "
    "engine was leaving"
)


def patience_s(pool: Json, progress_s: int) -> float:
    """Time for which the lack of room must last: that in which the spec expects a new node, where the pool's own autoscaler
    starts engines. It is at most half of `progress_s`, the progress deadline, at which the change would be taken back."""
    asked = pool["spec"]
    if not any(item.get("scaledBy") == "autoscaler" for item in asked["nodePools"]):
        return min(PATIENCE_S, progress_s / 2)
    timeout = asked.get("autoscaling", {}).get("schedulingTimeout", spec.SCHEDULING)
    return min(duration.seconds(timeout), progress_s / 2)


def is_leaving(pods: Iterable[Json]) -> bool:
    """Whether an engine of the pool is leaving."""
    return any(map(_is_leaving, pods))


def is_freed_soon(new: Iterable[engine_place.Asks], pods: Iterable[Json], now: datetime.datetime) -> bool:
    """Whether an engine of the pool is leaving a place that one of the `new` ones can take. The instant of its deletion is
    that at which its time to finish calls is over, so an engine of a node that is lost counts no longer than that."""
    asked, late = list(new), datetime.timedelta(seconds=PATIENCE_S)
    return any(
        _is_leaving(pod)
        and bool(pod.get("spec", {}).get("nodeName"))
        and now < datetime.datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) + late
        and any(not any(each.obstacles(pod["spec"])) for each in asked)
        for pod in pods
    )


def _is_leaving(pod: Json) -> bool:
    return child_metadata.NODE_POOL in pod["metadata"].get("labels", {}) and "deletionTimestamp" in pod["metadata"]


def timestamp(now: datetime.datetime) -> str:
    return now.astimezone(datetime.UTC).isoformat()
