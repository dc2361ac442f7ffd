"""Canaries of the pools of a cluster: the states of gateways and the pods go to `tidegate_policy.rollout.canary`, and its
decisions to the status, from which `rollout` takes them, and to the gateways, which divide the calls.

A decision is written to the status before it is put in force, so an operator that dies in between leaves it to its
successor. The successor counts the calls of the present step anew. While no gateway answers, no step ends. Instants are
those of the wall clock, because the status keeps them; they move with its steps.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidegate_operator import (
    canary_figures,
    canary_hold,
    canary_status,
    pool_driver,
    pool_status,
    pool_steering,
    spec,
)
from tidegate_operator.cluster import watch_cache
from tidegate_operator.render import child_metadata, engine_weights
from tidegate_operator.spec import Json
from tidegate_policy import clock_steps
from tidegate_policy.rollout import canary

log = logging.getLogger(__name__)

WRITER = "tidegate-canary"
"""Field manager of the part of the status that is written here."""
PERIOD_S = 2.0


class Admin(pool_driver.Admin, Protocol):
    """A pool's gateways."""

    async def services(self, addresses: Collection[str]) -> Mapping[str, canary_figures.EngineServices]: ...

    async def divide(self, addresses: Collection[str], engines: Collection[str], weight: int | None) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Canary:
    uid: str
    tested: canary_hold.Tested
    state: canary.CanaryState
    access: pool_driver.Access[Admin]
    steps: clock_steps.ClockSteps = field(default_factory=clock_steps.ClockSteps)
    figures: canary_figures.CanaryFigures = field(default_factory=canary_figures.CanaryFigures)
    weight: int | None = None
    """The share of the calls that the new engines got at the last observation."""
    ends: dict[str, int] = field(default_factory=dict)
    """By the uid of a pod of the new revision: how often its engine had ended when the pod was first seen to serve."""


class PoolCanary(pool_driver.PoolDriver[Admin, _Canary]):
    """The canaries of all pools of this operator. `test` is the work of a `workqueue.Workqueue`."""

    async def test(self, key: watch_cache.Key) -> float | None:
        """One observation of a pool; returns the seconds until the next one is due, None while the pool has no canary."""
        body = await self._reads.pool(*key)
        if body is None or "deletionTimestamp" in body["metadata"] or self._rules.is_foreign(body):
            self._known.pop(key, None)
            self._gone(key)
            return None
        children = await self._reads.children(*key)
        tested = canary_hold.under_test(body, children)
        pods = await self._reads.pods(*key)
        if tested is None:
            await self._end(key, body, pods, keeps_decision=canary_hold.awaits_engines(body, children))
            return None
        try:
            pool = self._parse(body, children)
        except spec.InvalidSpecError:  # `reconcile` reports the fault; the canary stays as it is
            known = self._known.get(key)
            if known is not None and (known.uid, known.tested) == (body["metadata"]["uid"], tested):
                await _divide(known, pods)
            return PERIOD_S
        settings = _settings(pool, tested)
        now, passed_s = self._clock().timestamp(), self._monotonic()
        current = await self._begun(key, body, pool, tested, now)
        if step_s := current.steps.step_s(now, passed_s):
            current.state = canary.shifted(current.state, step_s)
        sides = _Sides.of(pods, tested)
        is_known = bool(current.ends) or current.state.phase is not canary.Phase.TESTING
        for pod in sides.serving if is_known else sides.new:  # a new operator does not know which of them have served
            current.ends.setdefault(pod["metadata"]["uid"], _ends(pod))
        gateways = pool_steering.gateway_addresses(pods)
        current.figures.add(
            await current.access.admin.services(gateways),
            gateways=gateways,
            engines=set(filter(None, map(_engine, pods))),
            classes=pool.class_names,
        )
        before = current.state
        current.state = canary.step(
            now,
            before,
            canary.Observation(
                serves=bool(sides.serving),
                was_removed=not any(_is_kept(pod, current.ends) for pod in sides.new),
                crash=next(_crashes(sides.new, current.ends), None),
                old_serves=bool(sides.old),
                paused=pool.rollout.paused,
                new=current.figures.of(filter(None, map(_engine, sides.new))),
                old=current.figures.of(sides.old),
            ),
            settings,
        )
        current.weight = canary.weight(current.state, settings, new=len(sides.serving), old=sides.others)
        ours = canary_status.of_canary(tested, current.state, current.weight)
        if current.state != before:
            if not current.state.stops:  # the same step goes on with the calls that it has had
                current.figures.begin()
            shown = (*key, tested.node_pool, current.state.phase.value, current.state.reason)
            log.info("%s/%s: canary of %s: %s: %s", *shown)
            if told := canary_status.event(pool, tested, current.state):
                await self._api.record(told)
        if pool_status.changed(body.get("status", {}), ours, owns=canary_status.WRITTEN):
            await self._api.apply_status(*key, ours, writer=WRITER)
        await _divide(current, pods)
        return PERIOD_S

    async def _begun(
        self, key: watch_cache.Key, body: Json, pool: spec.Pool, tested: canary_hold.Tested, now: float
    ) -> _Canary:
        """The canary of this revision. The Secret is read again while a gateway rejects the token."""
        known = self._known.get(key)
        if known is not None and (known.uid, known.tested) == (pool.uid, tested):
            known.access = await self._access(pool, now, known.access)
            return known
        state = canary_status.remembered(body, tested, now) or canary.begin(now, tested.revision)
        made = _Canary(uid=pool.uid, tested=tested, state=state, access=await self._access(pool, now))
        self._known[key] = made
        return made

    async def _end(self, key: watch_cache.Key, body: Json, pods: Sequence[Json], *, keeps_decision: bool) -> None:
        """The pool has no canary any more: its calls go to all engines. The status says nothing of it, unless it
        `keeps_decision`."""
        self._gone(key)
        if known := self._known.pop(key, None):
            await known.access.admin.divide(pool_steering.gateway_addresses(pods), (), None)
        if "rollout" in body.get("status", {}) and not keeps_decision:
            await self._api.apply_status(*key, {}, writer=WRITER)


def _settings(pool: spec.Pool, tested: canary_hold.Tested) -> canary.CanarySettings:
    """Those of the spec, and in which time an engine of the node pool must serve."""
    settings = pool.rollout.canary
    assert settings is not None  # `under_test` finds no canary without it
    found = (engine_weights.longest_start_s(pool, each) for each in pool.node_pools if each.name == tested.node_pool)
    return replace(settings, start_s=next(found, pool.engine.startup_s) + spec.START_SLACK_S)


async def _divide(current: _Canary, pods: Sequence[Json]) -> None:
    """Has the gateways send the present share of the calls to the new engines. They forget it after a while."""
    names = [name for pod in _Sides.of(pods, current.tested).new if (name := _engine(pod))]
    await current.access.admin.divide(pool_steering.gateway_addresses(pods), names, current.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The engines of the two revisions."""

    new: Sequence[Json]
    """The pods of the new revision, ready or not."""
    serving: Sequence[Json]
    """Those of them that are ready."""
    old: Sequence[str]
    """The ready engines with which the new ones are compared: those of the same node pool, else all others."""
    others: int
    """Ready engines of the pool that have not the new revision."""

    @staticmethod
    def of(pods: Sequence[Json], tested: canary_hold.Tested) -> "_Sides":
        engines = [pod for pod in pods if child_metadata.NODE_POOL in pod["metadata"]["labels"]]
        same = [pod for pod in engines if pod["metadata"]["labels"][child_metadata.NODE_POOL] == tested.node_pool]
        new = [
            pod for pod in same if pod["metadata"].get("annotations", {}).get(canary_hold.REVISION) == tested.revision
        ]
        beside, elsewhere = ([pod for pod in each if pod not in new] for each in (same, engines))
        ready = _ready(elsewhere)
        serving = [pod for pod in new if _ready([pod])]
        return _Sides(new=new, serving=serving, old=_ready(beside) or ready, others=len(ready))


def _ready(pods: Sequence[Json]) -> list[str]:
    """The names of the ready engines of these pods."""
    found = (pool_steering.ready_address(pod, child_metadata.HTTP_PORT) for pod in pods)
    return [name for name in found if name is not None]


def _engine(pod: Json) -> str | None:
    """The name by which gateways know the engine of a pod, ready or not; None before it has an address."""
    host = pod.get("status", {}).get("podIP")
    return pool_steering.host_and_port(host, child_metadata.HTTP_PORT) if host else None


def _ends(pod: Json) -> int:
    """How often a container of the pod has ended."""
    states = pod.get("status", {}).get("containerStatuses", ())
    return sum(item.get("restartCount", 0) + ("terminated" in item.get("state", {})) for item in states)


def _crashes(pods: Sequence[Json], before: Mapping[str, int]) -> Iterator[str]:
    """A clause for each engine that ended after its pod had been seen to serve. A pod that is being deleted ends by
    itself."""
    for pod in pods:
        metadata = pod["metadata"]
        if "deletionTimestamp" not in metadata and _ends(pod) > before.get(metadata["uid"], _ends(pod)):
            yield f"{metadata['name']}: the engine ended after it had served{_exit(pod)}"


def _is_kept(pod: Json, served: Collection[str]) -> bool:
    """Whether this pod has served, by its uid, and nobody deletes it."""
    return pod["metadata"]["uid"] in served and "deletionTimestamp" not in pod["metadata"]


def _exit(pod: Json) -> str:
    for item in pod["status"]["containerStatuses"]:
        last = item.get("state", {}).get("terminated") or item.get("lastState", {}).get("terminated")
        if last:
            return f" ({last.get('reason', 'Error')}, exit code {last.get('exitCode', '?')})"
    return ""
