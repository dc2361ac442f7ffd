"""One pool, from what its spec says to what exists: the only way in which this operator changes anything.

Level-based: it reads everything, decides by the pure modules (`spec`, `replica_allocation`,
`render`, `plan`, `pool_status`), writes
the difference, and can be stopped between any two writes, because running it again starts from what is there. It does
not care what woke it. A spec that cannot be built changes the status alone: what runs keeps running.
"""

import datetime
import enum
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidegate_operator import cluster, objects, plan, pool_status, render, replica_allocation, spec
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

WRITER = "tidegate-operator"
"""Field manager of the part of the status that is written here."""
COUNTED = ("desired", "ready")
"""Fields of a node pool in the status that are stated while the spec has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is the same for all pools of an operator."""

    images: render.Images
    known: spec.Known
    operator_namespace: str


class Result(enum.Enum):
    GONE = "gone"
    SETTLED = "settled"
    """Nothing more is to be done until something changes."""
    REJECTED = "rejected"
    """The API server has refused something; later it may not."""


def timestamp(instant: datetime.datetime) -> str:
    """An instant as Kubernetes writes it, with microseconds, which events have and conditions accept."""
    return instant.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def reconcile(api: cluster.Cluster, namespace: str, name: str, *, rules: Rules, now: datetime.datetime) -> Result:
    """Brings one pool to what it should be.

    Raises ClusterError when the API server cannot be asked; the caller tries again later.
    """
    body = await api.pool(namespace, name)
    if body is None or "deletionTimestamp" in body["metadata"]:
        return Result.GONE  # and its children by garbage collection
    children = list(await api.children(namespace, name))
    try:
        pool = spec.parse(body, rules.known)
    except spec.InvalidSpecError as error:
        await _report(api, body, children, [("InvalidSpec", str(problem)) for problem in error.problems], now)
        return Result.SETTLED
    desired = render.manifests(
        pool, replica_allocation.desired(pool), images=rules.images, operator_namespace=rules.operator_namespace
    )
    observed = [*children, *await _same_names(api, desired, children)]
    todo = plan.steps(pool.uid, desired, observed)
    problems = [("NameTaken", f"{reference} exists and belongs to someone else") for reference in todo.taken]
    written: list[Json] = []
    for manifest in todo.apply:
        try:
            written.append(await api.apply(manifest))
        except cluster.RejectedError as error:
            problems.append(("Refused", f"{objects.Reference.of(manifest)}: {error}"))
    current = _newest(children, written)
    leaving = dict(todo.delete)
    if not problems and plan.can_spare(desired, current.values()):
        for reference, uid in leaving.items():
            await api.delete(reference, uid)
            del current[reference]
        leaving = {}
    await _report(api, body, [*current.values()], problems, now, leaving={item.name for item in leaving})
    return Result.REJECTED if problems else Result.SETTLED


async def _same_names(api: cluster.Cluster, desired: Sequence[Json], children: Sequence[Json]) -> list[Json]:
    """Objects under the names that we want which do not carry our label, so were not listed."""
    listed = {objects.Reference.of(child) for child in children}
    unlisted = [reference for reference in map(objects.Reference.of, desired) if reference not in listed]
    found = [await api.get(reference) for reference in unlisted]
    return [body for body in found if body is not None]


def _newest(children: Sequence[Json], written: Sequence[Json]) -> dict[objects.Reference, Json]:
    return {objects.Reference.of(body): body for body in [*children, *written]}


async def _report(
    api: cluster.Cluster,
    body: Json,
    children: Sequence[Json],
    problems: Sequence[tuple[str, str]],
    now: datetime.datetime,
    *,
    leaving: Collection[str] = (),
) -> None:
    metadata, before = body["metadata"], body.get("status", {})
    parts = pool_status.workloads(child for child in children if objects.controller_uid(child) == metadata["uid"])
    stated = pool_status.timed(
        pool_status.conditions(parts, problems, leaving=leaving),
        before.get("conditions", ()),
        generation=metadata["generation"],
        now=timestamp(now),
    )
    told = {item["type"]: item for item in before.get("conditions", ())}
    for condition in stated:
        if event := _event(metadata, told.get(condition["type"], {}), condition):
            log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
            await api.record(event)
    ours = pool_status.of_reconcile(parts, stated, pool=metadata["name"], generation=metadata["generation"])
    if pool_status.changed(before, ours, owns=COUNTED):
        await api.apply_status(metadata["namespace"], metadata["name"], ours, writer=WRITER)


def _event(metadata: Json, before: Json, condition: Json) -> pool_status.Event | None:
    """The event that goes with a condition's change: one when the pool turns ready, one for each new trouble."""
    turned = before.get("status") != condition["status"] or before.get("message") != condition["message"]
    if condition["status"] != "True" or not turned or condition["type"] not in ("Ready", "Degraded"):
        return None
    return pool_status.Event(
        namespace=metadata["namespace"],
        pool=metadata["name"],
        uid=metadata["uid"],
        reason=condition["reason"],
        message=condition["message"],
        at=condition["lastTransitionTime"],
        warning=condition["type"] == "Degraded",
    )
