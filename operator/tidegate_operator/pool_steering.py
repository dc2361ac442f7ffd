"""Steering of the pools of a cluster: pods and specs go to a steering driver, and its outcomes to status and events.

An outcome is written to the status before it is put in force. So an operator that dies in between leaves it to its
successor, which puts it in force. Before each observation a gateway is asked whether a person has overridden the policy;
after each one the gateways receive the policy too.
"""

import datetime
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate_control import steering_driver
from tidegate_operator import cluster, pool_status, reconcile, spec
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json
from tidegate_policy import qos
from tidegate_policy.steer import guards, selectors, steer_memory, steering_loop

log = logging.getLogger(__name__)

WRITER = "tidegate-steering"
"""Field manager of the part of the status that this module writes."""
MEASURED = ("sloAttainment", "alpha")
"""Fields of the status, and of its node pools, that are absent while there is no measurement."""
WAIT_S = 3.0
"""Time until the next attempt for a pool that cannot be steered."""

_REASONS = {
    guards.Kind.SWITCH: "PolicySwitched",
    guards.Kind.ROLLBACK: "PolicyRolledBack",
    guards.Kind.BYPASS: "PolicyBypassed",
    guards.Kind.OVERRIDE: "PolicyOverridden",
}
_FIXED = "spec.policy.name"
"""Reason of a policy that the spec fixes."""

Key = tuple[str, str]
"""Namespace and name of a pool."""
Locate = Callable[[Json], str | None]
"""Address of a pod's EngineControl."""


class Admin(Protocol):
    """A pool's gateways; `gateway_admin.GatewayAdmin` calls them over HTTP."""

    @property
    def has_answered(self) -> bool: ...

    @property
    def alpha(self) -> float | None: ...

    async def override(self) -> steering_loop.Override | None: ...

    async def follow(self, policy: str, reason: str) -> None: ...


def admin_url(pool: spec.Pool) -> str:
    """Address of the admin port of a pool's gateways."""
    service = f"{child_metadata.component_name(pool, 'gateway')}-internal"
    return f"http://{service}.{pool.namespace}.svc:{child_metadata.ADMIN_PORT}"


def ready_address(pod: Json) -> str | None:
    """host:port of EngineControl in a pod that is ready and not being deleted; None for any other pod."""
    seen = pod.get("status", {})
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in seen.get("conditions", ()))
    if not ready or "deletionTimestamp" in pod["metadata"] or not seen.get("podIP"):
        return None
    host = seen["podIP"]
    return f"[{host}]:{child_metadata.CONTROL_PORT}" if ":" in host else f"{host}:{child_metadata.CONTROL_PORT}"


@dataclass(slots=True, kw_only=True)
class _Steered:
    uid: str
    driver: steering_driver.SteeringDriver
    admin: Admin
    failing: Set[str] = frozenset()
    """The engines that did not accept the policy at the last attempt."""


class PoolSteering:
    """The drivers of all pools of this operator. `steer` is the work of a `workqueue.Workqueue`."""

    def __init__(
        self,
        api: cluster.Cluster,
        rules: reconcile.Rules,
        *,
        reads: cluster.Reader,
        admin_of: Callable[[spec.Pool], Admin],
        clock: Callable[[], datetime.datetime],
        locate: Locate = ready_address,
    ) -> None:
        self._api = api
        self._reads = reads
        self._rules = rules
        self._admin_of = admin_of
        self._clock = clock
        self._locate = locate
        self._steered: dict[Key, _Steered] = {}

    async def steer(self, key: Key) -> float | None:
        """One observation of a pool; returns the seconds until the next one is due, None when the pool does not exist."""
        body = await self._reads.pool(*key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            await self._forget(key)
            return None
        if self._rules.is_foreign(body):
            await self._forget(key)
            return WAIT_S
        node_pool_of = self._engines(await self._reads.pods(*key))
        try:
            pool = spec.parse(body, self._rules.known)
        except spec.InvalidSpecError:
            return await self._wait(key, node_pool_of)  # `reconcile` reports the fault; the engines keep their policy
        if not node_pool_of:
            return await self._wait(key, ())
        now = self._clock()
        steered = await self._driven(key, body, pool, now.timestamp())
        driver, admin = steered.driver, steered.admin
        await driver.retarget(node_pool_of)
        by_hand = await admin.override() or (None if admin.has_answered else _restored(driver, now.timestamp()))
        outcome = driver.observe(now.timestamp(), by_hand or _fixed(pool))
        silent = driver.engines.silent()
        ours = of_steering(body.get("status", {}), pool, outcome, admin.alpha, node_pool_of, now, silent=silent)
        await self._persist(body, pool, ours, outcome)
        errors = await driver.enforce()
        if fresh := errors.keys() - steered.failing:
            address = min(fresh)
            shown = (*key, len(fresh), outcome.verdict.policy, address, errors[address])
            log.warning("%s/%s: %d engines did not accept policy %s, for example %s: %s", *shown)
        steered.failing = errors.keys()
        await admin.follow(outcome.state.active, outcome.state.reason)
        return driver.settings.observation_period_s

    async def close(self) -> None:
        for key in [*self._steered]:
            await self._forget(key)

    async def _driven(self, key: Key, body: Json, pool: spec.Pool, now: float) -> "_Steered":
        """The driver of this pool with its present settings; an earlier pool of the same name has a driver of its own."""
        settings = settings_of(pool.steering)
        if key in self._steered and self._steered[key].uid != pool.uid:
            await self._forget(key)
        if key not in self._steered:
            driver = steering_driver.SteeringDriver(_remembered(body), settings, now=now)
            self._steered[key] = _Steered(uid=pool.uid, driver=driver, admin=self._admin_of(pool))
        self._steered[key].driver.settings = settings
        return self._steered[key]

    async def _wait(self, key: Key, addresses: Collection[str]) -> float:
        """Makes no decision and disconnects from all other engines: another pool may get the address of a deleted pod."""
        if key in self._steered:
            await self._steered[key].driver.retarget(addresses)
        return WAIT_S

    async def _forget(self, key: Key) -> None:
        if steered := self._steered.pop(key, None):
            await steered.driver.close()

    def _engines(self, pods: Sequence[Json]) -> dict[str, str]:
        """Address to node pool."""
        labelled = ((pod, pod["metadata"]["labels"].get(child_metadata.NODE_POOL)) for pod in pods)
        located = ((self._locate(pod), node_pool) for pod, node_pool in labelled if node_pool is not None)
        return {address: node_pool for address, node_pool in located if address is not None}

    async def _persist(self, body: Json, pool: spec.Pool, ours: Json, outcome: steering_loop.Outcome) -> None:
        if event := _event(pool, outcome):
            log.info("%s/%s: %s: %s", pool.namespace, pool.name, event.reason, event.message)
            await self._api.record(event)
        if pool_status.changed(body.get("status", {}), ours, owns=MEASURED):
            await self._api.apply_status(pool.namespace, pool.name, ours, writer=WRITER)


def _fixed(pool: spec.Pool) -> steering_loop.Override | None:
    if pool.steering.fixed is None:
        return None
    return steering_loop.Override(policy=pool.steering.fixed, reason=_FIXED)


def _restored(driver: steering_driver.SteeringDriver, now: float) -> steering_loop.Override | None:
    """A person's override that an earlier operator wrote to the status. The spec's own override is read from the spec."""
    held = driver.active_override(now)
    return None if held is None or held.reason == _FIXED else held


def settings_of(item: spec.Steering) -> steering_loop.Settings:
    return steering_loop.Settings(
        allow=item.allow,
        parameters=item.parameters,
        interval_s=item.interval_s,
        selector=selectors.SELECTORS[item.selector](),
        guards=guards.GuardSettings(dwell_s=item.dwell_s, window_s=item.rollback_window_s, rho=item.rollback_rho),
    )


def of_steering(
    before: Json,
    pool: spec.Pool,
    outcome: steering_loop.Outcome,
    alpha: float | None,
    node_pool_of: Mapping[str, str],
    now: datetime.datetime,
    *,
    silent: Collection[str] = (),
) -> dict[str, Any]:
    """The part of the status that steering writes: always complete, as server-side apply requires. `silent` are the
    addresses of the engines that do not report."""
    state = outcome.state
    since = datetime.datetime.fromtimestamp(state.since_at_s, datetime.UTC)
    stated: dict[str, Any] = {
        "activePolicy": {
            "name": state.active,
            "since": reconcile.timestamp(since),
            "reason": state.reason,
            "override": state.kind is guards.Kind.OVERRIDE,
        },
        "steering": steer_memory.written(state),
        "conditions": pool_status.timed(
            [_silence(silent, node_pool_of) or _stability(state, settings_of(pool.steering).guards, now.timestamp())],
            before.get("conditions", ()),
            generation=pool.generation,
            now=reconcile.timestamp(now),
        ),
    }
    if outcome.window is None:  # between two decisions the measurements stay
        # An earlier version of the operator wrote floats.
        kept = {
            item["name"]: _decimal(float(item["sloAttainment"]))
            for item in before.get("nodePools", ())
            if "sloAttainment" in item
        }
        total = _decimal(float(before["sloAttainment"])) if "sloAttainment" in before else None
    else:
        kept = _attainments(outcome.window, node_pool_of)
        total = _attainment(outcome.window.values())
    names = {node_pool.name for node_pool in pool.node_pools}
    stated["nodePools"] = [{"name": name, "sloAttainment": kept[name]} for name in sorted(kept) if name in names]
    measured = {"sloAttainment": total, "alpha": None if alpha is None else _decimal(alpha)}
    return stated | {key: value for key, value in measured.items() if value is not None}


def _attainments(window: Mapping[str, qos.Qos], node_pool_of: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str | None] = {
        name: _attainment(report for address, report in window.items() if node_pool_of.get(address) == name)
        for name in set(node_pool_of.values())
    }
    return {name: value for name, value in found.items() if value is not None}


def _attainment(reports: Any) -> str | None:
    """Share of the calls with a target that met it; None when there were none."""
    together = qos.across(reports)
    return _decimal(1 - together.miss_ratio) if together.with_target else None


def _decimal(value: float) -> str:
    """A number as the status has it: fields of the API are no floats."""
    return f"{round(value, 4):g}"


def _silence(silent: Collection[str], node_pool_of: Mapping[str, str]) -> pool_status.Condition | None:
    """The condition of a pool of which no engine reports; None for any other pool."""
    if not node_pool_of or not set(node_pool_of) <= set(silent):
        return None
    count = len(node_pool_of)
    message = f"None of the {count} ready engines reports, so the policy that they serve by is unknown."
    return pool_status.Condition(type="PolicyStable", status=False, reason="EnginesSilent", message=message)


def _stability(state: guards.SteerState, settings: guards.GuardSettings, now: float) -> pool_status.Condition:
    age_s, shown = now - state.since_at_s, f"{state.active}: {state.reason}"
    if state.kind is guards.Kind.BYPASS:
        return pool_status.Condition(type="PolicyStable", status=False, reason="Bypass", message=shown)
    if age_s < guards.minimum_dwell_s(state, settings) and state.kind is not guards.Kind.OVERRIDE:
        return pool_status.Condition(type="PolicyStable", status=False, reason="Switched", message=shown)
    return pool_status.Condition(type="PolicyStable", status=True, reason="Settled", message=shown)


def _event(pool: spec.Pool, outcome: steering_loop.Outcome) -> pool_status.Event | None:
    kind, verdict = outcome.verdict.kind, outcome.verdict
    if kind is guards.Kind.KEEP:
        return None
    return pool_status.Event(
        namespace=pool.namespace,
        pool=pool.name,
        uid=pool.uid,
        reason=_REASONS[kind],
        message=f"Engines now serve by {verdict.policy}: {verdict.reason}",
        at=reconcile.timestamp(datetime.datetime.fromtimestamp(outcome.state.since_at_s, datetime.UTC)),
        warning=kind in (guards.Kind.ROLLBACK, guards.Kind.BYPASS),
    )


def _remembered(body: Json) -> guards.SteerState | None:
    """The loop's memory in the status; None when there is none that this version can read."""
    kept = body.get("status", {}).get("steering")
    if kept is None:
        return None
    try:
        return steer_memory.read(kept)
    except (KeyError, TypeError, ValueError) as error:
        log.warning(
            "the steering loop starts without memory, because its memory in the status cannot be read: %s", error
        )
        return None
