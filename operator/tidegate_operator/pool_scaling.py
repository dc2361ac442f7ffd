"""Autoscaling of the pools of a cluster: the states of gateways and the pods go to `tidegate_policy.scale.autoscaler`, and
its decisions to the status, from which `replica_allocation` takes them.

A decision is written to the status before it is put in force, so an operator that dies in between leaves it to its
successor. A node pool that another autoscaler scales keeps what it has. Without a gateway that answers nothing changes,
and while one of several does not answer, engines only come. A gateway that misses one answer or two is waited for.
Instants are those of the wall clock, because the status keeps them; they move with its steps.
"""

import datetime
import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidegate_operator import (
    canary_hold,
    gateway_loads,
    node_pool_cost,
    node_pool_spec,
    pod_trouble,
    pool_driver,
    pool_status,
    pool_steering,
    replica_allocation,
    scale_status,
    spec,
)
from tidegate_operator.cluster import watch_cache
from tidegate_operator.render import child_metadata, engine_weights
from tidegate_operator.spec import Json
from tidegate_policy import clock_steps, duration
from tidegate_policy.admit import entitlements
from tidegate_policy.predict import engine_cost
from tidegate_policy.scale import autoscaler, slo_headroom

log = logging.getLogger(__name__)

WRITER = "tidegate-autoscaling"
"""Field manager of the part of the status that is written here."""
PERIOD_S = 10.0
WAIT_S = 30.0
"""Time until a pool without autoscaled node pools is looked at again."""
RIVALS_S = 30.0
"""Time between two lists of other autoscalers."""
START_S = 120.0
"""The start time of an engine while none has been seen to start."""
MISSED = 3
"""A gateway counts as silent from so many missed answers in a row."""


class Admin(pool_driver.Admin, Protocol):
    """A pool's gateways."""

    async def loads(self, addresses: Collection[str]) -> Mapping[str, gateway_loads.GatewayLoad]: ...


@dataclass(slots=True, kw_only=True)
class _Scaled:
    uid: str
    access: pool_driver.Access[Admin]
    state: autoscaler.ScaleState
    seen_at_s: float
    steps: clock_steps.ClockSteps = field(default_factory=clock_steps.ClockSteps)
    loads: gateway_loads.GatewayLoads = field(default_factory=gateway_loads.GatewayLoads)
    missed: int = 0
    """So many times in a row, until now, a gateway has not answered."""
    stated: Json = field(default_factory=dict)
    """The part of the status that was stated last."""
    obstacles: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Since when this operator has seen each obstacle to an engine."""
    sentences: dict[str, str] = field(default_factory=dict)
    """By node pool: what the scheduler or the quota said last of an engine for which there was no room."""
    rivals: Sequence[Json] = ()
    rivals_at_s: float = float("-inf")

    def shift(self, by_s: float) -> None:
        """The wall clock was set by so many seconds."""
        self.state = autoscaler.shifted(self.state, by_s)
        self.seen_at_s += by_s
        self.rivals_at_s += by_s
        self.obstacles = {key: at_s + by_s for key, at_s in self.obstacles.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """Why an engine of a node pool does not exist, or has no node."""

    key: tuple[str, str]
    """The object that tells of it, and since when, by the clock of the API server."""
    sentence: str


class PoolScaling(pool_driver.PoolDriver[Admin, _Scaled]):
    """The autoscalers of all pools of this operator. `scale` is the work of a `workqueue.Workqueue`."""

    async def scale(self, key: watch_cache.Key) -> float | None:
        """One observation of a pool; returns the seconds until the next one is due, None when the pool does not exist."""
        body = await self._reads.pool(*key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)
            return None
        if self._rules.is_foreign(body):
            self._forget(key)
            return WAIT_S
        pods, children = await self._reads.pods(*key), await self._reads.children(*key)
        try:
            pool = self._parse(body, children)
        except spec.InvalidSpecError:
            await self._suspend(key, body)  # `reconcile` reports the fault; the engines stay
            return WAIT_S
        own = [each for each in pool.node_pools if each.autoscaled]
        if not own:
            self._forget(key)
            await self._withdraw(body)
            return WAIT_S
        now, passed_s = self._clock(), self._monotonic()
        counts = replica_allocation.desired(pool, replica_allocation.of_deployments(children))
        scaled = await self._begun(key, body, pool, {each.name: counts[each.name] for each in own}, now.timestamp())
        if step_s := scaled.steps.step_s(now.timestamp(), passed_s):
            scaled.shift(step_s)
        taken = await self._taken(scaled, pool, own, now.timestamp())
        gateways = pool_steering.gateway_addresses(pods)
        seen = await scaled.access.admin.loads(gateways)
        self._observed(key, answered=len(seen) == len(gateways))
        scaled.missed = scaled.missed + 1 if len(seen) < len(gateways) else 0
        if 0 < scaled.missed < MISSED:
            return PERIOD_S  # the next answers report this time too
        if not seen:
            scaled.state = autoscaler.unseen(now.timestamp(), scaled.state)
            scaled.stated = scale_status.of_decision(
                body.get("status", {}), pool, scaled.state, {}, taken, now, trouble=scale_status.silence()
            )
            await self._persist(body, scaled.stated)
            return PERIOD_S
        free = [each for each in own if each.name not in taken]
        before = {each.name: scaled.state.wanted.get(each.name, counts[each.name]) for each in free}
        stuck = _stuck(scaled, pool, free, pods, children, now.timestamp())
        observation = _observation(
            pool,
            scaled.loads.add(seen),
            [_node_pool(pool, each, _of(pods, each), stuck[each.name]) for each in free],
            seconds=now.timestamp() - scaled.seen_at_s,
            is_whole=len(seen) == len(gateways),
        )
        scaled.state, decision = autoscaler.step(
            now.timestamp(), replace(scaled.state, wanted=before), observation, pool.autoscaling.settings
        )
        scaled.seen_at_s = now.timestamp()
        scaled.sentences |= {name: sentences[0] for name, sentences in stuck.items() if sentences}
        short = autoscaler.without_room(now.timestamp(), scaled.state)
        sentences = {name: text for name, text in scaled.sentences.items() if stuck.get(name) or name in short}
        scaled.stated = scale_status.of_decision(
            body.get("status", {}),
            pool,
            scaled.state,
            decision.node_pools,
            taken,
            now,
            trouble=scale_status.unschedulable(sentences) or scale_status.partial_silence(seen, gateways),
        )
        if decision.changed:
            told = scale_status.event(pool, scaled.state, before)
            log.info("%s/%s: %s: %s", *key, told.reason, told.message)
            await self._api.record(told)
        await self._persist(body, scaled.stated)
        return PERIOD_S

    def _forget(self, key: watch_cache.Key) -> None:
        self._known.pop(key, None)
        self._gone(key)

    async def _begun(
        self, key: watch_cache.Key, body: Json, pool: spec.Pool, counts: Mapping[str, int], now: float
    ) -> _Scaled:
        """The autoscaler of this pool; an earlier pool of the same name has one of its own. The Secret is read again while
        a gateway rejects the token."""
        known = self._known.get(key)
        if known is not None and known.uid == pool.uid:
            known.access = await self._access(pool, now, known.access)
            return known
        state = scale_status.remembered(body, counts, now)
        made = _Scaled(uid=pool.uid, access=await self._access(pool, now), state=state, seen_at_s=now)
        self._known[key] = made
        return made

    async def _taken(
        self, scaled: _Scaled, pool: spec.Pool, own: Sequence[node_pool_spec.NodePool], now: float
    ) -> dict[str, str]:
        """The node pools that a HorizontalPodAutoscaler scales too, each with its name. KEDA's are among them."""
        if now - scaled.rivals_at_s >= RIVALS_S:
            scaled.rivals, scaled.rivals_at_s = await self._api.autoscalers(pool.namespace), now
        taken: dict[str, str] = {}
        for rival in scaled.rivals:
            target, name = rival["spec"]["scaleTargetRef"], f"HorizontalPodAutoscaler {rival['metadata']['name']}"
            for each in own:
                deployment = child_metadata.engine_name(pool, each.name)
                if (target["kind"], target["name"]) in (
                    ("Deployment", deployment),
                    (child_metadata.KIND, pool.name),
                ):
                    taken[each.name] = name
        return taken

    async def _withdraw(self, body: Json) -> None:
        """Takes back what was written while the pool had autoscaled node pools."""
        if "autoscaling" in body.get("status", {}):
            metadata = body["metadata"]
            await self._api.apply_status(metadata["namespace"], metadata["name"], {}, writer=WRITER)

    async def _suspend(self, key: watch_cache.Key, body: Json) -> None:
        """Says that nothing is decided while the spec is invalid, if an autoscaler has decided before."""
        known, status = self._known.get(key), body.get("status", {})
        stated = scale_status.decided(status)
        if known is not None and known.uid == body["metadata"]["uid"]:
            stated = known.stated  # the last decision may not have come back yet
            known.state = autoscaler.unseen(self._clock().timestamp(), known.state)
        if stated:
            generation, now = body["metadata"]["generation"], self._clock()
            await self._persist(body, scale_status.with_invalid_spec(status, stated, generation=generation, now=now))

    async def _persist(self, body: Json, ours: Json) -> None:
        if pool_status.changed(body.get("status", {}), ours, owns=scale_status.WRITTEN):
            metadata = body["metadata"]
            await self._api.apply_status(metadata["namespace"], metadata["name"], ours, writer=WRITER)


def _observation(
    pool: spec.Pool,
    load: gateway_loads.PoolLoad,
    node_pools: Sequence[autoscaler.NodePool],
    *,
    seconds: float,
    is_whole: bool,
) -> autoscaler.Observation:
    objectives = {item["name"]: float(item.get("objective", entitlements.OBJECTIVE)) / 100 for item in pool.classes}
    tpots_s = [duration.seconds(item["tpot"]) for item in pool.classes if "tpot" in item]
    return autoscaler.Observation(
        seconds=seconds,
        arrived=load.arrived,
        waiting=load.waiting,
        queued=load.queued,
        running=load.out,
        targets={
            name: slo_headroom.Targets(
                objective=objectives.get(name, entitlements.OBJECTIVE / 100),
                with_target=counts.with_target,
                missed=counts.with_target - counts.met,
            )
            for name, counts in load.targets.items()
        },
        tpot_s=min(tpots_s, default=None),
        is_whole=is_whole,
        node_pools=node_pools,
    )


def _node_pool(
    pool: spec.Pool,
    node_pool: node_pool_spec.NodePool,
    pods: Sequence[Json],
    stuck: Sequence[str],
) -> autoscaler.NodePool:
    """What the core must know of a node pool with these pods."""
    return autoscaler.NodePool(
        name=node_pool.name,
        cost=node_pool_cost.model(pool.engine, node_pool) or engine_cost.STARTING,
        price=node_pool.engine_cost,
        low=node_pool.min_replicas,
        high=node_pool.max_replicas or node_pool.min_replicas,
        ready=sum(pool_steering.ready_address(pod) is not None for pod in pods),
        start_s=_start_s(pods, engine_weights.longest_start_s(pool, node_pool) + spec.START_SLACK_S),
        unschedulable=len(stuck),
    )


def _start_s(pods: Sequence[Json], longest_s: float) -> float:
    """The median time that the ready engines took from the creation of their pods. An engine that has restarted, or was not
    ready for a while, is ready since then; so those with a restart, or with more than the longest start, do not count."""
    ready = [
        (_instant(item["lastTransitionTime"]) - _instant(pod["metadata"]["creationTimestamp"])).total_seconds()
        for pod in pods
        if not any(each.get("restartCount") for each in pod.get("status", {}).get("containerStatuses", ()))
        for item in pod.get("status", {}).get("conditions", ())
        if item["type"] == "Ready" and item["status"] == "True" and item.get("lastTransitionTime")
    ]
    taken = [seconds for seconds in ready if seconds <= longest_s]
    return max(statistics.median(taken), 1.0) if taken else START_S


def _of(pods: Sequence[Json], node_pool: node_pool_spec.NodePool) -> list[Json]:
    """The pods of a node pool."""
    return [pod for pod in pods if pod["metadata"]["labels"].get(child_metadata.NODE_POOL) == node_pool.name]


def _stuck(
    scaled: _Scaled,
    pool: spec.Pool,
    node_pools: Sequence[node_pool_spec.NodePool],
    pods: Sequence[Json],
    children: Sequence[Json],
    now: float,
) -> dict[str, list[str]]:
    """By node pool: a sentence for each of its wanted engines that the cluster has not taken for longer than a new node
    takes, as long as this operator has seen it."""
    obstacles = {each.name: _unscheduled(_of(pods, each)) + _rejected(children, each) for each in node_pools}
    keys = {one.key for found in obstacles.values() for one in found}
    scaled.obstacles = {key: scaled.obstacles.get(key, now) for key in keys}
    replicas = replica_allocation.of_deployments(children)
    stuck: dict[str, list[str]] = {}
    for each in node_pools:
        lasting = [
            one.sentence
            for one in obstacles[each.name]
            if now - scaled.obstacles[one.key] >= pool.autoscaling.scheduling_s
        ]
        surplus = len(_counted(_of(pods, each))) - replicas.get(each.name, 0)
        stuck[each.name] = lasting[max(surplus, 0) :]  # a Deployment that changes has more pods than it wants
    return stuck


def _is_live(pod: Json) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and not pod_trouble.has_failed(pod)


def _counted(pods: Sequence[Json]) -> list[Json]:
    """The live pods of a node pool. Those of a revision that replaces one that serves do not count: they say nothing of the
    room for the engines that serve."""
    live = [pod for pod in pods if _is_live(pod)]
    serving = {canary_hold.revision_of(pod) for pod in live if pod_trouble.is_ready(pod)}
    return [pod for pod in live if not serving or canary_hold.revision_of(pod) in serving]


def _unscheduled(pods: Sequence[Json]) -> list[_Obstacle]:
    """The pods of a node pool that no node takes."""
    return [
        _Obstacle(key=(trouble.pod, trouble.since), sentence=trouble.sentence)
        for pod in _counted(pods)
        if (trouble := pod_trouble.of(pod)) is not None and trouble.reason == "Unschedulable"
    ]


def _rejected(children: Sequence[Json], node_pool: node_pool_spec.NodePool) -> list[_Obstacle]:
    """An obstacle for each engine of a node pool whose pod the API server rejects, for a quota."""
    for body in children:
        if body["kind"] != "Deployment" or body["metadata"]["labels"].get(child_metadata.NODE_POOL) != node_pool.name:
            continue
        name = body["metadata"]["name"]
        missing = body["spec"].get("replicas", 1) - body.get("status", {}).get("replicas", 0)
        for condition in body.get("status", {}).get("conditions", ()):
            if pool_status.is_rejection(condition):
                sentence = f"{name}: {condition.get('message', 'its pods are rejected')}"
                return [_Obstacle(key=(name, condition["lastTransitionTime"]), sentence=sentence)] * max(missing, 0)
    return []


def _instant(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
