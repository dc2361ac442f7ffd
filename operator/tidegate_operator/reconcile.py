"""Reconciles one pool: from its spec to the objects that exist. Only this module changes them.

Level-based: a reconcile starts from what exists and decides by the pure modules (`spec`, `replica_allocation`, `render`,
`plan`, `pool_status`). It writes the difference and may be stopped between any two writes, because the next run starts from
what exists then. The cause of a run does not matter. A spec that cannot be built changes the status alone: the pool keeps
running as it was.
"""

import asyncio
import datetime
import enum
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidegate_operator import (
    cluster,
    objects,
    plan,
    pod_trouble,
    pool_profiles,
    pool_secret,
    pool_status,
    render,
    replica_allocation,
    rollout,
    spec,
    spec_problems,
    weight_status,
)
from tidegate_operator.render import child_metadata, scraping
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

WRITER = "tidegate-operator"
"""Field manager of the part of the status that is written here."""
HELD = "waits for its turn"
NAMES_AT_ONCE = 8
"""Objects of one pool that are asked for at the same time. A pool may have 105, and all pools share the connections."""
COUNTED = ("desired", "ready", "weights")
"""Fields of a node pool in the status that are written here, and removed when they are no longer stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The configuration that all pools of an operator share."""

    images: render.Images
    known: spec_problems.Known
    operator_namespace: str
    operator: str
    """Namespace and Lease of the operator, which mark the pools that it owns."""
    prometheus: scraping.Scraping = render.NO_PROMETHEUS
    ipv6: bool = False
    """Whether pods have addresses of IPv6."""

    def is_foreign(self, body: Json) -> bool:
        """Whether another operator owns the pool."""
        return owner_of(body) not in (None, self.operator)


def owner_of(body: Json) -> str | None:
    """The operator that owns the pool; None for a pool without an owner."""
    owner: str | None = body["metadata"].get("annotations", {}).get(child_metadata.OWNER)
    return owner


class Result(enum.Enum):
    GONE = "gone"
    SETTLED = "settled"
    """The pool needs nothing until something changes."""
    FOREIGN = "foreign"
    """The pool belongs to another operator."""
    REJECTED = "rejected"
    """The API server rejected a write; it may accept the write later."""


def timestamp(instant: datetime.datetime) -> str:
    """An instant as Kubernetes writes it, with microseconds, which events have and conditions accept."""
    return instant.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def timestamp_of(at_s: float) -> str:
    """As `timestamp`, for seconds since 1970."""
    return timestamp(datetime.datetime.fromtimestamp(at_s, datetime.UTC))


async def reconcile(api: cluster.Cluster, namespace: str, name: str, *, rules: Rules, now: datetime.datetime) -> Result:
    """Reads one pool from the API server and brings it to its desired state.

    Raises ClusterError when the API server cannot be asked; the caller tries again later.
    """
    body = await api.pool(namespace, name)
    children, pods = objects.owned(body, await api.children(namespace, name)), await api.pods(namespace, name)
    return await carry_out(api, body, children, pods, rules=rules, now=now)


async def carry_out(
    api: cluster.Cluster,
    body: Json | None,
    children: Sequence[Json],
    pods: Sequence[Json],
    *,
    rules: Rules,
    now: datetime.datetime,
) -> Result:
    """Brings a pool from `children`, which it owns, and `pods`, as the API server just listed them, closer to its desired
    state. Engines change one after the other (`rollout`), so several runs may be needed. Raises ClusterError."""
    if body is None or "deletionTimestamp" in body["metadata"]:
        return Result.GONE  # garbage collection deletes the children
    name = body["metadata"]["name"]
    if rules.is_foreign(body):
        return Result.FOREIGN
    try:
        if owner_of(body) is None and not await api.claim(body["metadata"]["namespace"], name, rules.operator):
            return Result.FOREIGN  # the event of the other operator's claim follows
    except cluster.RejectedError as error:
        await write_report(api, body, _report(body, children, pods, [_refused(body, error)], now))
        return Result.REJECTED
    lines = await weight_status.progress(pods, functools.partial(api.last_line, body["metadata"]["namespace"]))
    profiles = pool_profiles.resolve(body, await pool_profiles.read(api, body), children, rules.known.profiles)
    try:
        pool = spec.parse(body, rules.known, profiles.profiles)
    except spec.InvalidSpecError as error:
        await write_report(api, body, _report(body, children, pods, _invalid(error), now, lines=lines))
        return Result.SETTLED
    refused: list[tuple[str, str]] = []
    if (total := replica_allocation.total_to_state(body)) is not None:
        try:
            await api.state_replicas(pool.namespace, pool.name, total)
        except cluster.RejectedError as error:
            refused.append(_refused(body, error))
    await asyncio.sleep(0)  # for others, as in `pending_report`
    rendered = _desired(pool, rules, children)
    unlisted = await _same_names(api, rendered, children)
    if strayed := objects.owned(body, unlisted):  # they have lost the pool's label
        children = [*children, *strayed]
        rendered = _desired(pool, rules, children)
    staged = rollout.staged(body, rendered, children, pods, now=now)
    desired = staged.desired
    await asyncio.sleep(0)
    todo = plan.steps(pool.uid, desired, _newest(unlisted, children).values())
    expected = _expected(profiles, staged)
    problems = [*expected, *refused]
    if obstacle := await pool_secret.ensure(api, pool):
        problems.append(obstacle)
    problems += [("NameTaken", f"{reference} exists and belongs to another owner") for reference in todo.taken]
    written: list[Json] = []
    for manifest in todo.apply:
        try:
            written.append(await api.apply(manifest))
        except cluster.RejectedError as error:
            problems.append(("Refused", f"{objects.Reference.of(manifest)}: {error}"))
    current = _newest(children, written)
    pending_deletion = dict(todo.delete)
    if not problems and not staged.held and plan.can_spare(desired, current.values()):
        for reference, uid in pending_deletion.items():
            await api.delete(reference, uid)
            del current[reference]
        pending_deletion = {}
    names = {reference.name for reference in pending_deletion}
    waiting = {**dict.fromkeys(names, "stays until the others are ready"), **_waiting(staged)}
    await write_report(api, body, _report(body, current.values(), pods, problems, now, waiting=waiting, lines=lines))
    return Result.REJECTED if len(problems) > len(expected) else Result.SETTLED


async def pending_report(
    body: Json | None,
    children: Sequence[Json],
    pods: Sequence[Json],
    *,
    rules: Rules,
    now: datetime.datetime,
    given: pool_profiles.Given | None = None,
) -> Json | None:
    """The part of the status that `carry_out` would write for a pool, children and pods that are up to date, if it would
    write nothing else; empty if it would write nothing at all. `given` is the ConfigMap of profiles that the pool names.
    None if the objects must be looked at: while weights are downloaded, because their progress must be asked for, and while
    the pool is degraded, because only a write shows whether it still is, and while a pod lacks a Secret or a ConfigMap,
    which may be the pool's own: nothing watches Secrets. It asks nobody, but takes several steps of the event loop: a very
    large pool takes a tenth of a second, for which the renewal of the Lease does not wait."""
    if body is None or "deletionTimestamp" in body["metadata"] or owner_of(body) is None:
        return None
    if any(pod_trouble.lacks_configuration(pod) for pod in pods):
        return None
    if pool_profiles.named(body) != (None if given is None else given.name):
        return None
    if rules.is_foreign(body) or weight_status.downloading(pods) or replica_allocation.total_to_state(body) is not None:
        return None
    profiles = pool_profiles.resolve(body, given, children, rules.known.profiles)
    try:
        pool = spec.parse(body, rules.known, profiles.profiles)
    except spec.InvalidSpecError as error:
        report = _report(body, children, pods, _invalid(error), now)
    else:
        await asyncio.sleep(0)
        rendered = _desired(pool, rules, children)
        await asyncio.sleep(0)
        staged = rollout.staged(body, rendered, children, pods, now=now)
        await asyncio.sleep(0)
        if plan.steps(pool.uid, staged.desired, children) != plan.NOTHING:
            return None
        report = _report(body, children, pods, _expected(profiles, staged), now, waiting=_waiting(staged))
    if not _is_news(body, report):
        return {}
    return None if _is_degraded(body) else report


async def write_report(api: cluster.Cluster, body: Json, report: Json) -> Json:
    """Writes what a reconcile states of a pool to its status, if that changes it, and then records events of what turned: a
    status that cannot be written would turn at each attempt. Returns the pool as it is then. Raises ClusterError."""
    metadata, written = body["metadata"], body
    if _is_news(body, report):
        written = await api.apply_status(metadata["namespace"], metadata["name"], report, writer=WRITER)
    before = {item["type"]: item for item in body.get("status", {}).get("conditions", ())}
    for condition in report["conditions"]:
        if event := _event(metadata, before.get(condition["type"], {}), condition):
            log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
            await api.record(event)
    return written


def _desired(pool: spec.Pool, rules: Rules, children: Iterable[Json]) -> Sequence[Json]:
    counts = replica_allocation.desired(pool, replica_allocation.of_deployments(children))
    return render.manifests(
        pool,
        counts,
        images=rules.images,
        operator_namespace=rules.operator_namespace,
        prometheus=rules.prometheus,
        ipv6=rules.ipv6,
    )


def _waiting(staged: rollout.Rollout) -> dict[str, str]:
    """By workload: why it does not follow the spec yet."""
    return {**dict.fromkeys(staged.held, HELD), **staged.told}


def _expected(profiles: pool_profiles.Resolved, staged: rollout.Rollout) -> list[tuple[str, str]]:
    """The problems that no further write shows."""
    return [*staged.problems, *((pool_profiles.REASON, sentence) for sentence in profiles.kept)]


def _refused(body: Json, error: cluster.RejectedError) -> tuple[str, str]:
    return ("Refused", f"ServingPool {body['metadata']['name']}: {error}")


def _invalid(error: spec.InvalidSpecError) -> list[tuple[str, str]]:
    return [(pool_status.INVALID_SPEC, str(problem)) for problem in error.problems]


async def _same_names(api: cluster.Cluster, desired: Sequence[Json], children: Sequence[Json]) -> list[Json]:
    """Objects that have a desired name but not the pool's label, so that no list of children holds them."""
    listed = {objects.Reference.of(child) for child in children}
    unlisted = [reference for reference in map(objects.Reference.of, desired) if reference not in listed]
    free = asyncio.Semaphore(NAMES_AT_ONCE)

    async def get(reference: objects.Reference) -> Json | None:
        async with free:
            return await api.get(reference)

    found = await asyncio.gather(*map(get, unlisted))
    return [body for body in found if body is not None]


def _newest(children: Sequence[Json], written: Sequence[Json]) -> dict[objects.Reference, Json]:
    return {objects.Reference.of(body): body for body in [*children, *written]}


def _report(
    body: Json,
    children: Iterable[Json],
    pods: Sequence[Json],
    problems: Sequence[tuple[str, str]],
    now: datetime.datetime,
    *,
    waiting: Mapping[str, str] = pool_status.NOTHING_WAITS,
    lines: Mapping[str, str] = weight_status.NO_LINES,
) -> Json:
    """The part of the status that reconciling writes."""
    metadata = body["metadata"]
    parts = pool_status.workloads(children)
    valid = all(reason != pool_status.INVALID_SPEC for reason, _ in problems)
    needs = pool_status.Needs.of(body)
    conditions = pool_status.timed(
        [
            *pool_status.conditions(parts, problems, pods, needs=needs, waiting=waiting, now=now),
            pool_status.authentication(body, valid=valid),
        ],
        body.get("status", {}).get("conditions", ()),
        generation=metadata["generation"],
        now=timestamp(now),
    )
    return pool_status.of_reconcile(body, parts, conditions, weight_status.of_pods(pods, lines))


def of_another_operator(body: Json, rules: Rules, now: datetime.datetime) -> pool_status.Event:
    """The event that tells that this operator leaves a pool alone."""
    metadata = body["metadata"]
    return pool_status.Event(
        namespace=metadata["namespace"],
        pool=metadata["name"],
        uid=metadata["uid"],
        reason="OwnedByAnother",
        message=f"The operator {rules.operator} leaves this pool alone, because the operator {owner_of(body)} owns it. To "
        f"hand it over: kubectl annotate spool/{metadata['name']} {child_metadata.OWNER}={rules.operator} --overwrite",
        at=timestamp(now),
        warning=True,
    )


def _is_news(body: Json, report: Json) -> bool:
    return pool_status.changed(body.get("status", {}), report, owns=COUNTED)


def _is_degraded(body: Json) -> bool:
    conditions = body.get("status", {}).get("conditions", ())
    return any(item["type"] == "Degraded" and item["status"] == "True" for item in conditions)


def _event(metadata: Json, before: Json, condition: Json) -> pool_status.Event | None:
    """The event that goes with a condition's change: one when the pool turns ready, one for each new trouble, and one when
    its gateways begin to serve callers without authentication."""
    turned = before.get("status") != condition["status"] or before.get("message") != condition["message"]
    told = {("Ready", "True"), ("Degraded", "True"), (pool_status.AUTHENTICATED, "False")}
    if not turned or (condition["type"], condition["status"]) not in told:
        return None
    return pool_status.Event(
        namespace=metadata["namespace"],
        pool=metadata["name"],
        uid=metadata["uid"],
        reason=condition["reason"],
        message=condition["message"],
        at=condition["lastTransitionTime"],
        warning=condition["type"] != "Ready",
    )
