"""The parts of one gateway, put together: what `web`, `rpc` and `admin` serve.

It owns what no part owns alone: readiness, the active policy (a person's override, else steering's choice, else the
settings), and the exchange with the other gateways. `app` builds it and runs its loops.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp

from tidegate_gateway import calibrate, gateway_settings, perceive
from tidegate_gateway.engines import discovery
from tidegate_gateway.lifecycle import admission, engine_client
from tidegate_gateway.lifecycle.placement import Router
from tidegate_gateway.lifecycle.relay import Serving
from tidegate_gateway.observe import prometheus_metrics, tracing_spans
from tidegate_gateway.openai import error_table, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_service
from tidegate_policy import choose, dispatcher, policies
from tidegate_policy.model import EngineId, WorkflowId

logger = logging.getLogger("tidegate.gateway")

AUTO_ALPHA = 0.2
"""What `alpha: auto` is; HexGen's best values lie between 0.1 and 0.4."""
LONGEST_OVERRIDE_S = 7 * 24 * 3600.0
DEFAULT_OVERRIDE_S = 600.0
"""For which an override holds that does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    name: str
    source: Literal["override", "steered", "settings"]
    reason: str
    left_s: float | None = None


class Gateway:
    """One gateway process's parts and their common state."""

    def __init__(
        self,
        told: gateway_settings.Settings,
        session: aiohttp.ClientSession,
        kept: store_contract.Store | None,
        *,
        profiles: discovery.Profiles,
        traces: tracing_spans.Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.told = told
        self.clock = clock
        self.kept = kept
        self.traces = traces
        self.draining = False
        self.meters = prometheus_metrics.Telemetry()
        self.perception = perceive.Perception()
        alpha = AUTO_ALPHA if isinstance(told.dispatch.alpha, str) else told.dispatch.alpha
        self.core = dispatcher.Dispatcher(
            policy=told.policy.name,
            dispatch=choose.Dispatch(rule=told.dispatch.rule, alpha=alpha, beta=told.dispatch.beta),
            limits=dispatcher.Limits(max_waiting=told.queue.max_requests, ttl_s=told.queue.ttl_s),
            rng=random.Random(),
        )
        self.fleet = discovery.Fleet(told, session, profiles=profiles, clock=clock)
        self.router = Router(
            self.core,
            engine_client.Client(session, limits=told.limits),
            self.meters,
            timeouts=told.timeouts,
            address=self.fleet.url,
            on_attempt=self.fleet.on_attempt,
            on_served=self._served,
            clock=clock,
        )
        self.fleet.listener = self.router
        self.flows = workflow_service.Workflows(told, kept, self.perception, self.meters, costs=self.fleet.costs)
        self.admission = admission.Admission(
            told,
            self.perception,
            self.flows,
            spend=self._spend,
            waiting=lambda: self.core.waiting,
            costs=self.fleet.costs,
            models=lambda: self.fleet.models,
        )
        self.policy = ActivePolicy(name=told.policy.name, source="settings", reason="the settings")
        self.meters.on_policy(told.policy.name, told.policy.name, "")
        self._chosen: store_contract.Exchange = store_contract.Exchange()
        self._override_until_s: float | None = None

    # Readiness.

    def problems(self) -> tuple[str, list[str]]:
        """ready, degraded, unready or draining, and why."""
        if self.draining:
            return "draining", ["this gateway is shutting down"]
        if not any(known.reason is None for known in self.fleet.known.values()):
            return "unready", ["no engine can take calls"]
        if self.kept is None:
            return "degraded", ["no store is set: workflows are refused, single calls are served"]
        if not self.flows.up:
            return "degraded", ["the store does not answer: workflows are refused, single calls are served"]
        return "ready", []

    # The policy.

    async def choose_policy(
        self, kind: Literal["override", "steered"], name: str | None, *, reason: str, for_s: float | None
    ) -> ActivePolicy:
        """A person's or the steering loop's choice, shared with all gateways; None takes it back.

        Raises `GatewayError`.
        """
        if name is not None and name not in policies.POLICIES:
            known = ", ".join(sorted(policies.POLICIES))
            raise BadRequest(f"policy {name[:64]!r} is unknown; known are {known}", param="policy")
        if kind == "override":
            for_s = DEFAULT_OVERRIDE_S if for_s is None else for_s
        if for_s is not None and not 0 < for_s <= LONGEST_OVERRIDE_S:
            raise BadRequest(f"for_s must be more than 0 and at most {LONGEST_OVERRIDE_S:.0f} (7 days)", param="for_s")
        if self.kept is None:
            # One gateway without a store: the choice lives in this process.
            chosen = None if name is None else store_contract.Chosen(policy=name, reason=reason, left_s=for_s)
            if kind == "override":
                self._override_until_s = None if for_s is None or chosen is None else self.clock() + for_s
                self._apply(dataclasses.replace(self._chosen, override=chosen))
            else:
                self._apply(dataclasses.replace(self._chosen, steered=chosen))
            return self.policy
        try:
            self._apply(await self.kept.choose_policy(kind, name, reason, for_s))
        except store_contract.Unavailable as error:
            raise error_table.store_unavailable() from error
        return self.policy

    def _apply(self, learned: store_contract.Exchange) -> None:
        """Makes the highest-ranking choice the order of the waiting queue."""
        self._chosen = learned
        if learned.override is not None:
            active = _active("override", learned.override)
        elif learned.steered is not None:
            active = _active("steered", learned.steered)
        else:
            active = ActivePolicy(name=self.told.policy.name, source="settings", reason="the settings")
        if active.name not in policies.POLICIES:
            logger.error("policy %r is unknown here (a newer version set it?); %s stays", active.name, self.core.policy)
            return
        before, self.policy = self.core.policy, active
        if active.name != before:
            count = self.core.on_policy(active.name)
            self.meters.on_policy(before, active.name, active.source)
            logger.warning(
                "policy %s -> %s (%s): %d waiting calls re-ordered", before, active.name, active.reason, count
            )

    # Calls.

    @contextlib.asynccontextmanager
    async def answer(self, now: float, ask: parsed_request.Ask) -> AsyncIterator[Serving]:
        """The answer to an ask that arrived at `now`, once it has begun. Raises `GatewayError`."""
        traced = None if self.traces is None else self.traces.begin(ask, now)
        if traced is not None:
            ask = dataclasses.replace(ask, traceparent=traced.traceparent)
        served: Serving | None = None
        admitted_s: float | None = None
        problem: str | None = None
        try:
            job = await self.admission.admit(now, ask)
            admitted_s, served = self.clock(), self.router.serve(job)
            async with served:
                yield served
        except error_table.GatewayError as error:
            problem = error.code
            if isinstance(error, error_table.Refused):
                self.meters.shed.labels(error.reason.value).inc()
            raise
        finally:
            if traced is not None:
                if problem is None and served is not None and served.outcome != "ok":
                    problem = served.outcome
                traced.end(self.clock(), admitted_s=admitted_s, serving=served, error=problem)

    # Loops.

    async def run(self) -> None:
        """Everything that goes on beside requests, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fleet.run())
            group.create_task(self.router.run())
            group.create_task(self.flows.run())
            group.create_task(self.admission.run())
            group.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Tells the other gateways of this one and learns of them; while the store is down, what was known stands."""
        while True:
            if self.kept is None:
                self._count_down()
                await asyncio.sleep(self.told.store.sync_s)
                continue
            try:
                await self._exchange_once(self.kept)
            except store_contract.Unavailable as error:
                if self.flows.up:
                    logger.error("%s: workflows are refused until it does", error)
                self.flows.up = False
            else:
                if not self.flows.up:
                    logger.warning("the store answers")
                self.flows.up = True
            await asyncio.sleep(self.told.store.sync_s * random.uniform(0.8, 1.2))

    def _count_down(self) -> None:
        """What the store does where there is one: an override has less time left, and ends."""
        override = self._chosen.override
        if override is None or self._override_until_s is None:
            return
        left_s = self._override_until_s - self.clock()
        now = dataclasses.replace(override, left_s=left_s) if left_s > 0 else None
        self._apply(dataclasses.replace(self._chosen, override=now))

    async def _exchange_once(self, kept: store_contract.Store) -> None:
        own = {state.id: self.core.own_backlog(state.id) for state in self.core.engines()}
        learned = await kept.exchange({engine: backlog for engine, backlog in own.items() if backlog})
        self.fleet.on_others(learned.others)
        self.router.cancel_workflows(map(WorkflowId, learned.cancelled))
        self._apply(learned)
        for gateway in learned.dead:
            if await kept.forget(gateway, workflow_service.BATCH):
                logger.warning("gateway %s is gone; its calls are forgotten", gateway)

    # What parts tell each other.

    async def _spend(self, tenant: str, tokens: int, per_minute: int, used: bool) -> float:
        if self.kept is None or not self.flows.up:
            return 0.0  # without the store nobody counts; serving goes before metering
        try:
            return await self.kept.spend(tenant, tokens, per_minute, used=used)
        except store_contract.Unavailable:
            self.flows.up = False
            return 0.0

    def _served(self, served: Serving) -> None:
        self.meters.on_served(served)
        if served.outcome == "ok" and served.engine is not None:
            self._observe(served, served.engine)
        call = served.job.call
        told = {"tenant": call.tenant, "class": call.slo_class, "workflow": call.workflow, "stage": call.stage}
        told["engine"] = served.engine
        logger.info(
            "call %s%s attempt=%d queue_ms=%d outcome=%s",
            call.id,
            "".join(f" {name}={value}" for name, value in told.items() if value),
            served.attempt,
            round(served.queue_s * 1000),
            served.outcome,
        )

    def _observe(self, served: Serving, engine: EngineId) -> None:
        if served.sent_s is None or served.first_s is None or served.finished_s is None:
            return
        meter = served.reply.meter
        self.fleet.on_observation(
            engine,
            calibrate.Observation(
                prompt_tokens=meter.prompt_tokens or served.job.call.prompt_tokens,
                tokens=round(meter.generated / served.job.call.sequences),
                ttft_s=served.first_s - served.sent_s if served.job.ask.stream else None,
                whole_s=served.finished_s - served.sent_s,
                beside=(served.beside + self.router.calls_at(engine)) / 2,
                alone=served.beside <= 0,
            ),
        )


def _active(source: Literal["override", "steered"], chosen: store_contract.Chosen) -> ActivePolicy:
    return ActivePolicy(name=chosen.policy, source=source, reason=chosen.reason or source, left_s=chosen.left_s)
