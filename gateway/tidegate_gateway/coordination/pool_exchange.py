"""What do the gateways of a pool tell each other? Backlogs, what tenants have there, leases, cancelled workflows, the
policy, and which prompts they sent where, through the store.

While the store is down, the last known state stands, except that of the tenants.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from tidegate_gateway import gateway_settings
from tidegate_gateway.coordination import policy_choice, pool_clock
from tidegate_gateway.lifecycle import engine_directory, placement
from tidegate_gateway.observe import background_loop, prometheus_metrics
from tidegate_gateway.store import prompt_stream, store_contract, store_link
from tidegate_gateway.workflows import workflow_service
from tidegate_policy import gateway_core
from tidegate_policy.admit import tenant_load
from tidegate_policy.model import WorkflowId

logger = logging.getLogger("tidegate.gateway")


class PoolExchange:
    """The exchange of one gateway with the others."""

    def __init__(
        self,
        settings: gateway_settings.Store,
        link: store_link.StoreLink,
        core: gateway_core.GatewayCore,
        prompts: prompt_stream.PromptStream | None,
        *,
        directory: engine_directory.EngineDirectory,
        placements: placement.Placements,
        policy: policy_choice.PolicyChoice,
        clock: Callable[[], float],
        pool: pool_clock.PoolClock,
        metrics: prometheus_metrics.Metrics,
    ) -> None:
        self._settings = settings
        self._link = link
        self._core = core
        self._prompts = prompts
        self._directory = directory
        self._placements = placements
        self._policy = policy
        self._clock = clock
        self._pool_clock = pool
        self._metrics = metrics

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Exchanges until cancelled."""
        while True:
            await loops.step("exchange", self._step)
            await asyncio.sleep(self._settings.sync_s * random.uniform(0.8, 1.2))

    async def _step(self) -> None:
        store = self._link.store
        if store is None:
            self._policy.count_down()
            return
        try:
            await self._exchange(store)
        except store_contract.Unavailable as error:
            if self._link.up:
                logger.error("%s: workflows are shed until the store answers", error)
            self._link.up = False
            self._policy.count_down()
            # What was known of the tenants grows old.
            self._core.dispatcher.tenants.on_others(self._clock(), tenant_load.NO_LOAD, 1)
        else:
            if not self._link.up:
                logger.warning("the store answers")
            self._link.up = True

    async def _exchange(self, store: store_contract.Store) -> None:
        own = {engine.facts.id: engine.own for engine in self._core.engines if engine.own}
        choices = self._policy.choices
        sent_at_s = self._clock()
        learned = await store.exchange(own, self._core.dispatcher.tenants.load(sent_at_s))
        if learned.now_s is not None:
            self._pool_clock.on_exchange(learned.now_s, sent_at_s=sent_at_s, answered_at_s=self._clock())
        if learned.lost_s is not None:
            self._metrics.store_losses.inc()
            self._metrics.store_lost_seconds.inc(learned.lost_s)
            logger.error(
                "the store has lost the writes of at least %.1f s that it had acknowledged: workflows, relQueries and ends "
                "of calls of that time are unknown to it, and their clients must send them again",
                learned.lost_s,
            )
        self._core.dispatcher.tenants.on_others(self._clock(), learned.tenants, learned.gateways)
        self._directory.on_others(learned.others)
        self._placements.cancel_workflows(map(WorkflowId, learned.cancelled))
        self._policy.follow(learned, choices=choices)
        for gateway in learned.dead:
            with contextlib.suppress(store_contract.Slow):  # the next exchange goes on
                if await store.forget(gateway, workflow_service.BATCH):
                    logger.warning("gateway %s is gone; its calls are forgotten", gateway)
        await self._exchange_prompts(learned.gateways)

    async def _exchange_prompts(self, gateways: int) -> None:
        """While there are several gateways, each learns which prefixes the others' calls have left at the engines.

        A failure is no trouble of the store: what was sent is then not told."""
        sent = self._core.dispatcher.prefixes.untold(gateways=gateways)
        if self._prompts is not None and gateways > 1:
            with contextlib.suppress(store_contract.Unavailable):
                self._core.dispatcher.on_sent_elsewhere(await self._prompts.exchange(sent))
