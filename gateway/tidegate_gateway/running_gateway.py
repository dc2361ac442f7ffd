"""The parts of one gateway, put together: the object that the edges serve.

It decides nothing. It builds the parts, runs their loops, and tells whether the gateway is ready.
"""

import asyncio
import random
import time
from collections.abc import Callable

from tidegate_gateway import gateway_settings, http_client, tenant_budget
from tidegate_gateway.callers import authentication
from tidegate_gateway.coordination import policy_choice, pool_clock, pool_exchange
from tidegate_gateway.engines import discovery
from tidegate_gateway.lifecycle import (
    admission,
    calls,
    engine_client,
    engine_directory,
    placement,
    placement_loop,
    settlement,
    tenant_tokens,
)
from tidegate_gateway.observe import background_loop, prometheus_metrics, recent_decisions, tracing_spans
from tidegate_gateway.openai import engine_fields
from tidegate_gateway.relqueries import relquery_runner, relquery_service
from tidegate_gateway.store import prompt_stream, relquery_store, store_contract, store_link, tenant_ids
from tidegate_gateway.workflows import call_ends, workflow_service
from tidegate_policy import gateway_core


class Gateway:
    """One gateway process's parts."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        connections: http_client.Connections,
        store: store_contract.Store | None,
        relqueries: relquery_store.RelQueryStore | None = None,
        ends: call_ends.CallEnds | None = None,
        prompts: prompt_stream.PromptStream | None = None,
        *,
        profiles: discovery.Profiles,
        traces: tracing_spans.Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.draining = False
        self.leaving: list[Callable[[], None]] = []
        """Called while the gateway drains: asks clients to connect elsewhere."""
        self.bodies = tenant_budget.TenantBudget(settings.limits.bodies_bytes)
        """The bytes of bodies and messages at all client ports."""
        self.authentication = authentication.Authentication(settings.auth)
        self.link = store_link.StoreLink(store)
        self.metrics = prometheus_metrics.Metrics(gateway_settings.objectives(settings))
        self.recent = recent_decisions.RecentDecisions()
        self.loops = background_loop.BackgroundLoops(self.metrics)
        self.core = gateway_core.GatewayCore(gateway_settings.core_settings(settings), random.Random())
        self.placements = placement.Placements(self.core, self.metrics, self.recent, clock=clock)
        self.directory = engine_directory.EngineDirectory(self.placements)
        self.discovery = discovery.Discovery(
            settings, connections, directory=self.directory, placements=self.placements, profiles=profiles
        )
        ids = tenant_ids.TenantIds(by_tenant=settings.auth.required)
        self.workflows = workflow_service.Workflows(
            self.link, self.metrics, settings.workflows, ends, over=self.placements.workflow_over, ids=ids
        )
        self.tokens = tenant_tokens.TenantTokens(self.link, clock=clock)
        self.policy = policy_choice.PolicyChoice(
            settings.policy,
            self.core,
            self.link,
            self.metrics,
            waiting=lambda: self.core.dispatcher.waiting + self.discovery.waiting,
            clock=clock,
            wall=wall,
        )
        self.pool_clock = pool_clock.PoolClock(clock, wall)
        self.exchange = pool_exchange.PoolExchange(
            settings.store,
            self.link,
            self.core,
            prompts,
            directory=self.directory,
            placements=self.placements,
            policy=self.policy,
            clock=clock,
            pool=self.pool_clock,
            metrics=self.metrics,
        )
        self._fields = fields = engine_fields.EngineFields(settings.classes, settings.default_class, settings.allow)
        self.calls = calls.Calls(
            settings,
            admission=admission.Admission(
                self.core,
                directory=self.directory,
                workflows=self.workflows,
                tokens=self.tokens,
                fields=fields,
                grace_s=settings.store.grace_s,
                isolate_tenants=settings.dispatch.isolate_tenants,
                clock=clock,
            ),
            placements=self.placements,
            client=engine_client.EngineClient(connections, limits=settings.limits),
            directory=self.directory,
            settlement=settlement.Settlement(self.tokens, self.workflows),
            metrics=self.metrics,
            traces=traces,
            clock=clock,
            wall=self.pool_clock,
        )

        self.relquery_runner = relquery_runner.RelQueryRunner(
            settings.relqueries,
            relqueries,
            self.link,
            calls=self.calls,
            core=self.core,
            most_prompt_bytes=settings.limits.body_bytes,
            metrics=self.metrics,
            draining=lambda: self.draining,
            clock=clock,
        )
        self.relqueries = relquery_service.RelQueries(
            settings, self.link, relqueries, self.relquery_runner, self.directory, fields, ids
        )

    def take_over(self, settings: gateway_settings.Settings) -> None:
        """Replaces what `settings_reload.RELOADED` names by the groups of `settings`."""
        self.settings = settings
        self.metrics.set_classes(gateway_settings.objectives(settings))
        self.core.set_classes(settings.classes, settings.default_class, settings.tenants)
        self._fields.set_classes(settings.classes, settings.default_class)
        self.workflows.set_templates(settings.workflows)
        self.policy.configure(settings.policy)

    def problems(self) -> tuple[str, list[str]]:
        """ready, degraded, unready or draining, and the reasons."""
        if self.draining:
            return "draining", ["this gateway is shutting down"]
        if not self.directory.serves and not self.settings.queue.hold_s:
            return "unready", ["no engine can take calls"]
        if not self.authentication.can_verify:
            return "unready", ["the public keys of the tokens' issuer could not be read yet"]
        if not self.directory.serves:
            return "degraded", ["no engine can take calls: they wait until one is started"]
        if self.link.store is None:
            return "degraded", ["no store is set: workflows are shed, single calls are served"]
        if not self.link.up:
            return "degraded", ["the store does not answer: workflows are shed, single calls are served"]
        return "ready", []

    async def run(self) -> None:
        """Runs the background loops until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(placement_loop.run(self.placements, self.loops))
            for part in (
                self.discovery,
                self.authentication,
                self.workflows,
                self.tokens,
                self.exchange,
                self.relquery_runner,
            ):
                group.create_task(part.run(self.loops))
