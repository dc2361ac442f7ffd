"""Steering of the pools of a cluster: pods and specs go to a steering driver, and its outcomes to status and events.

An outcome is written to the status before it is put in force. So an operator that dies in between leaves it to its
successor, which puts it in force. Before each observation the gateways are asked for their state, which tells whether a
person has overridden the policy; after each one a gateway receives the policy too. All these calls carry the token in the
pool's Secret, which is read when the steering of a pool begins, and again while an engine or a gateway rejects it.
"""

import datetime
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from tidegate_control import steering_driver
from tidegate_operator import (
    cluster,
    error_budget,
    operator_metrics,
    pod_trouble,
    pool_driver,
    pool_secret,
    pool_status,
    reconcile,
    spec,
    steering_status,
    store_status,
)
from tidegate_operator.cluster import watch_cache
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json
from tidegate_policy.steer import guards, selectors, steer_memory, steering_loop

log = logging.getLogger(__name__)

WRITER = "tidegate-steering"
"""Field manager of the part of the status that this module writes."""
WAIT_S = 3.0
"""Time until the next attempt for a pool that cannot be steered."""

LATE = "DEADLINE_EXCEEDED"
"""How the error of an engine begins that did not answer a call in time."""
_FIXED = "spec.policy.name"
"""Reason of a policy that the spec fixes."""

Locate = Callable[[Json], str | None]
"""Address of a pod's EngineControl."""


class Admin(pool_driver.Admin, Protocol):
    """A pool's gateways."""

    @property
    def has_answered(self) -> bool: ...

    @property
    def answers(self) -> bool: ...

    @property
    def alpha(self) -> float | None: ...

    @property
    def stores(self) -> Mapping[str, bool | None]: ...

    async def ask(self, gateways: Collection[str]) -> None: ...

    def override(self) -> steering_loop.Override | None: ...

    def targets(self) -> Mapping[str, Mapping[str, error_budget.Counts]]: ...

    def others(self, policies: Collection[str]) -> Mapping[str, str]: ...

    async def follow(
        self, policy: str, reason: str, *, alternatives: Sequence[str] = (), expected: str = ""
    ) -> None: ...


def ready_address(pod: Json, port: int = child_metadata.CONTROL_PORT) -> str | None:
    """host:port, by default of EngineControl, in a pod that is ready and not being deleted; None for any other pod."""
    address = pod.get("status", {}).get("podIP")
    return host_and_port(address, port) if address and pod_trouble.is_ready(pod) else None


def host_and_port(host: str, port: int) -> str:
    """The address with brackets around an IPv6 address, as gateways name engines."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def gateway_addresses(pods: Sequence[Json]) -> list[str]:
    """host:port of the admin ports of the ready gateways."""
    gateways = (pod for pod in pods if pod["metadata"]["labels"].get(child_metadata.COMPONENT) == "gateway")
    found = (ready_address(pod, child_metadata.ADMIN_PORT) for pod in gateways)
    return [address for address in found if address is not None]


@dataclass(slots=True, kw_only=True)
class _Steered:
    uid: str
    driver: steering_driver.SteeringDriver
    admin: Admin
    token: str | None
    secret: str
    """Name of the Secret that the token comes from."""
    read_at_s: float
    """When the Secret was read last."""
    budgets: error_budget.ErrorBudgets = field(default_factory=error_budget.ErrorBudgets)
    kept: Json = field(default_factory=dict)
    """What was stated last of the fields that stay without engines (`steering_status.KEPT`)."""
    failing: Set[str] = frozenset()
    """The engines that did not accept the policy at the last attempt."""


class PoolSteering(pool_driver.PoolDriver[Admin, _Steered]):
    """The drivers of all pools of this operator. `steer` is the work of a `workqueue.Workqueue`."""

    def __init__(
        self,
        api: cluster.Cluster,
        rules: reconcile.Rules,
        *,
        reads: cluster.Reader,
        admin_of: Callable[[str, str | None], Admin],
        clock: Callable[[], datetime.datetime],
        monotonic: Callable[[], float | None] = lambda: None,
        locate: Locate = ready_address,
        ask_of: Callable[[spec.Pool], steering_driver.Ask | None] = lambda pool: None,
        metrics: operator_metrics.OperatorMetrics | None = None,
    ) -> None:
        """`ask_of` gives the way in which a pool's model is asked, for pools with the selector `llm`."""
        super().__init__(api, rules, reads=reads, admin_of=admin_of, clock=clock, monotonic=monotonic)
        self._metrics = metrics or operator_metrics.OperatorMetrics()
        self._locate = locate
        self._ask_of = ask_of

    async def steer(self, key: watch_cache.Key) -> float | None:
        """One observation of a pool; returns the seconds until the next one is due, None when the pool does not exist."""
        body = await self._reads.pool(*key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            await self._forget(key)
            return None
        if self._rules.is_foreign(body):
            await self._forget(key)
            return WAIT_S
        pods = await self._reads.pods(*key)
        node_pool_of = self._engines(pods)
        try:
            pool = self._parse(body, await self._reads.children(*key))
        except spec.InvalidSpecError:
            return await self._wait(body, node_pool_of)  # `reconcile` reports the fault; the engines keep their policy
        if not node_pool_of:
            return await self._wait(body, ())
        now = self._clock()
        steered = await self._driven(key, body, pool, now.timestamp())
        driver, admin = steered.driver, steered.admin
        driver.ask = self._ask_of(pool)
        await driver.retarget(node_pool_of)
        gateways = gateway_addresses(pods)
        await admin.ask(gateways)
        by_hand = admin.override() or (None if admin.has_answered else _restored(driver, now.timestamp()))
        before, behind = driver.active_policy, driver.not_following()
        outcome = driver.observe(now.timestamp(), by_hand or _fixed(pool), monotonic_s=self._monotonic())
        if outcome.window is not None or outcome.verdict.kind is not guards.Kind.KEEP:
            self._metrics.decided(key, before, outcome.verdict)
        if outcome.judged is not None:
            self._metrics.judged(key, outcome.state.active, outcome.judged)
        store = None
        if outcome.window is not None:
            steered.budgets.add(now.timestamp(), admin.targets(), gateways=gateways, classes=pool.class_names)
            store = store_status.condition(admin.stores)
        status = body.get("status", {})
        trouble = (
            steering_status.rejection(driver.engines.rejections(), steered.secret)
            or steering_status.silence(driver.engines.silent(), node_pool_of)
            or steering_status.disobedience(before, behind, admin.others({before, outcome.state.active}))
        )
        ours = steering_status.of_steering(
            status,
            pool,
            outcome,
            driver.settings.guards,
            admin.alpha,
            node_pool_of,
            now,
            trouble=trouble,
            store=store,
        )
        steered.kept = {name: ours[name] for name in steering_status.KEPT}
        ours["classes"] = steering_status.classes(status, pool, None if outcome.window is None else steered.budgets)
        await self._persist(body, pool, ours, outcome)
        errors = await driver.enforce()
        if fresh := errors.keys() - steered.failing:
            address = min(fresh)
            shown = (*key, len(fresh), outcome.verdict.policy, address, errors[address])
            log.warning("%s/%s: %d engines did not accept policy %s, for example %s: %s", *shown)
        steered.failing = errors.keys()
        state = outcome.state
        await admin.follow(
            state.active, steering_driver.explained(outcome), alternatives=state.alternatives, expected=state.expected
        )
        is_late = any(error.startswith(LATE) for error in errors.values())
        self._observed(key, answered=admin.answers and not is_late)
        return driver.settings.observation_period_s

    def silent(self) -> dict[watch_cache.Key, int]:
        """How many engines of each pool do not report."""
        return {key: len(steered.driver.engines.silent()) for key, steered in self._known.items()}

    async def close(self) -> None:
        for key in [*self._known]:
            await self._forget(key)

    async def _driven(self, key: watch_cache.Key, body: Json, pool: spec.Pool, now: float) -> "_Steered":
        """The driver of this pool with its present settings and token; an earlier pool of the same name has a driver of its
        own."""
        settings, secret = settings_of(pool.steering), child_metadata.secret_name(pool)
        known = self._known.get(key)
        if known is not None and (known.uid, known.secret) == (pool.uid, secret) and not _is_rejected(known, now):
            known.driver.settings = settings
            return known
        token = await pool_secret.token(self._api, pool)
        if known is not None and (known.uid, known.secret, known.token) == (pool.uid, secret, token):
            known.read_at_s, known.driver.settings = now, settings
            return known
        await self._forget(key)
        driver = steering_driver.SteeringDriver(_remembered(body), settings, now=now, token=token)
        admin = self._admin_of(pool.namespace, token)
        self._known[key] = _Steered(uid=pool.uid, driver=driver, admin=admin, token=token, secret=secret, read_at_s=now)
        return self._known[key]

    async def _wait(self, body: Json, addresses: Collection[str]) -> float:
        """Makes no decision and disconnects from all other engines: another pool may get the address of a deleted pod. The
        status says that the pool has no engine or, if it has some, that its spec is invalid."""
        metadata, before = body["metadata"], body.get("status", {})
        key = (metadata["namespace"], metadata["name"])
        self._observed(key)
        known = self._known.get(key)
        if known is not None:
            await known.driver.retarget(addresses)
        if reconcile.owner_of(body) == self._rules.operator:
            kept = {name: before[name] for name in steering_status.KEPT if name in before}
            if known is not None and known.uid == metadata["uid"]:
                kept |= known.kept  # the status may not have come back yet
            state = steering_status.with_invalid_spec if addresses else steering_status.without_engines
            await self._write(body, state(before, kept, generation=metadata["generation"], now=self._clock()))
        return WAIT_S

    async def _forget(self, key: watch_cache.Key) -> None:
        self._gone(key)
        if steered := self._known.pop(key, None):
            self._metrics.forget(key)
            await steered.driver.close()

    def _engines(self, pods: Sequence[Json]) -> dict[str, str]:
        """Address to node pool."""
        labelled = ((pod, pod["metadata"]["labels"].get(child_metadata.NODE_POOL)) for pod in pods)
        located = ((self._locate(pod), node_pool) for pod, node_pool in labelled if node_pool is not None)
        return {address: node_pool for address, node_pool in located if address is not None}

    async def _persist(self, body: Json, pool: spec.Pool, ours: Json, outcome: steering_loop.Outcome) -> None:
        for event in steering_status.events(pool, outcome, self._clock()):
            log.info("%s/%s: %s: %s", pool.namespace, pool.name, event.reason, event.message)
            await self._api.record(event)
        await self._write(body, ours)

    async def _write(self, body: Json, ours: Json) -> None:
        if pool_status.changed(body.get("status", {}), ours, owns=steering_status.MEASURED):
            metadata = body["metadata"]
            await self._api.apply_status(metadata["namespace"], metadata["name"], ours, writer=WRITER)


def _is_rejected(steered: _Steered, now: float) -> bool:
    """Whether an engine or a gateway rejects the token, so that the Secret should be read again."""
    rejected = bool(steered.driver.engines.rejections()) or steered.admin.rejects_token
    return rejected and pool_driver.may_read_again(steered.read_at_s, now)


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
