"""How far are the downloads of weights? The entry `weights` of each node pool in the status.

The kubelet tells which init containers run, ended or failed. The progress of one that runs is the last line of its log,
which `reconcile` asks for while a download runs, and at no other time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from tidegate_operator import pod_trouble
from tidegate_operator.render import child_metadata, engine_weights
from tidegate_operator.spec import Json
from tidegate_operator.weights import weight_report

NO_LINES: Mapping[str, str] = MappingProxyType({})
_URGENCY = ("Failed", "Downloading", "Waiting", "Ready")
"""States of pods; a node pool shows the first of those that its pods have."""
_LONGEST = 512
READ_S = 3.0
"""Longest time to read a line of a log: a kubelet that does not answer must not delay the reconcile of its pool."""


def downloading(pods: Iterable[Json]) -> dict[str, tuple[str, str]]:
    """By node pool: the first pod with a download that runs now, and its container. `of_pods` shows the progress of this
    one."""
    runs = [
        (node_pool, (pod["metadata"]["name"], each["name"]))
        for pod in pods
        for node_pool, each in _downloads(pod)
        if _runs(each)
    ]
    return dict(sorted(runs, reverse=True))


async def progress(
    pods: Iterable[Json], last_line: Callable[[str, str], Awaitable[str | None]], *, timeout_s: float = READ_S
) -> dict[str, str]:
    """By pod: the last line of the log of each download that `of_pods` shows. `last_line` reads that of a pod's
    container."""

    async def read(pod: str, container: str) -> str | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await last_line(pod, container)
        except TimeoutError:
            return None

    runs = list(downloading(pods).values())
    found = zip(runs, await asyncio.gather(*(read(pod, container) for pod, container in runs)), strict=True)
    return {pod: line for (pod, _), line in found if line}


def of_pods(pods: Iterable[Json], lines: Mapping[str, str] = NO_LINES) -> dict[str, Json]:
    """By node pool: state and message of its weights. `lines` holds the last line of the log by pod."""
    found: dict[str, tuple[str, str]] = {}
    for pod in sorted(pods, key=lambda item: str(item["metadata"]["name"])):
        for node_pool, container in _downloads(pod):
            each = _state(container, lines.get(pod["metadata"]["name"], ""))
            if node_pool not in found or _URGENCY.index(each[0]) < _URGENCY.index(found[node_pool][0]):
                found[node_pool] = each
    return {
        name: {"state": state, **({"message": message[:_LONGEST]} if message else {})}
        for name, (state, message) in found.items()
    }


def _downloads(pod: Json) -> Iterator[tuple[str, Json]]:
    """The node pool of a pod, and the status of each container that downloads weights; empty before it has one."""
    metadata = pod["metadata"]
    node_pool = metadata.get("labels", {}).get(child_metadata.NODE_POOL)
    containers = pod.get("spec", {}).get("initContainers", ())
    if node_pool is None or "deletionTimestamp" in metadata or pod_trouble.has_failed(pod):
        return
    statuses = {item["name"]: item for item in pod.get("status", {}).get("initContainerStatuses", ())}
    for item in containers:
        if engine_weights.is_download(item["name"]):
            yield node_pool, statuses.get(item["name"], {})


def _runs(container: Json) -> bool:
    return "running" in container.get("state", {})


def _state(container: Json, line: str) -> tuple[str, str]:
    state, last = container.get("state", {}), container.get("lastState", {})
    if _runs(container):
        return "Downloading", line
    ended = state.get("terminated") or last.get("terminated")
    if ended is None:
        return "Waiting", ""
    if ended.get("exitCode") == 0:
        return "Ready", ""
    told = weight_report.parse(ended.get("message", ""))
    return "Failed", told[1] if told else ended.get("message", "") or f"exit code {ended.get('exitCode')}"
