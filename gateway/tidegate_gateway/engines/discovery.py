"""Which engines are there? A fixed list, the addresses behind a headless service's name, or the pods of an InferencePool;
one health check for each.

While a name server does not answer, its last answer stands. A name without an address has no engines: those that it had
leave once they fail their checks, so that a name server which forgets a name drops no engine that serves. Engines that a
name no longer has stay until its new ones have been checked, so that the only engine of a pool can be replaced under load.
The cost profile of an engine is read once, at start.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

from tidegate_gateway import engine_entries, gateway_settings, http_client, settings_decoder
from tidegate_gateway.engines import health_check, inference_pool
from tidegate_gateway.lifecycle import engine_directory, placement
from tidegate_gateway.observe import background_loop
from tidegate_policy import cost
from tidegate_policy.model import EngineId

logger = logging.getLogger("tidegate.gateway")

RESOLVE_TIMEOUT_S = 5.0

NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)
"""The name server's answer for a name without an address, such as that of a node pool without engines."""

Find = Callable[[], Awaitable[list[health_check.Address] | None]]
"""The engines of one source; None = its last answer stands."""
Profiles = Callable[[str], Mapping[str, object]]
"""Name of a shipped profile -> its `cost` mapping. Raises `LookupError` or `ValueError`."""


class Discovery:
    """All engines of this gateway, and their health checks."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        connections: http_client.Connections,
        *,
        directory: engine_directory.EngineDirectory,
        placements: placement.Placements,
        profiles: Profiles,
    ) -> None:
        self.known: dict[EngineId, health_check.EngineHealth] = {}
        self._served = health_check.ServedModel(settings.model, self.known, directory)
        self._settings = settings
        self._connections = connections
        self._directory = directory
        self._placements = placements
        self._profiles = profiles
        self._checks: dict[EngineId, asyncio.Task[None]] = {}
        self._static = [_static(engine, self._cost(engine.profile, engine.cost)) for engine in settings.engines]
        self._names: list[Find] = [
            functools.partial(_addresses, service, self._cost(service.profile, service.cost))
            for service in settings.services
        ]
        self._unread = len(self._names) + (settings.inference_pool.name is not None)
        """Sources of engines that have not been read yet."""
        self._pool: inference_pool.PoolReader | None = None
        if settings.inference_pool.name is not None:
            self._pool = inference_pool.PoolReader(settings.inference_pool)

    @property
    def knows_pool(self) -> bool:
        """The InferencePool exists, or none is set."""
        return self._pool is None or self._pool.is_known

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Discovers and checks engines until cancelled."""
        async with self._pool or contextlib.nullcontext(), asyncio.TaskGroup() as group:
            for address in self._static:
                self._appeared(group, loops, address)
            for find in self._names:
                group.create_task(self._follow(group, loops, find, forgets=True))
            if self._pool is not None:
                group.create_task(self._follow(group, loops, self._pods, forgets=False))

    async def first_look(self) -> None:
        """Returns when each engine has been checked once, or after the time of one check: a gateway that takes calls before
        it knows an engine rejects them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.health.timeout_s):
                while (
                    self._unread
                    or len(self.known) < len(self._static)
                    or not all(health.checks for health in self.known.values())
                ):
                    await asyncio.sleep(0.005)

    def _cost(self, profile: str | None, inline: Mapping[str, float] | None) -> cost.CostModel | None:
        try:
            mapping = inline if inline is not None else None if profile is None else self._profiles(profile)
            return None if mapping is None else cost.from_mapping(mapping)
        except (LookupError, ValueError) as error:
            named = profile or "given inline"
            raise settings_decoder.BadSettings(f"the cost profile {named} cannot be used: {error}") from error

    async def _pods(self) -> list[health_check.Address] | None:
        found = None if self._pool is None else await self._pool.read()
        return None if found is None else [_at(address) for address in found]

    @property
    def waiting(self) -> int:
        """Calls that wait at the engines, as these reported last."""
        return sum([known.load.waiting or 0 for known in self.known.values()])

    async def _follow(
        self, group: asyncio.TaskGroup, loops: background_loop.BackgroundLoops, find: Find, *, forgets: bool
    ) -> None:
        """Follows the engines of one source, which may forget all of them for a while if it `forgets`."""
        mine: set[EngineId] = set()

        async def resolve() -> None:
            addresses = await find()
            if addresses is None:
                return
            found = {address.id: address for address in addresses}
            for address in found.values():
                if address.id not in self.known:
                    self._appeared(group, loops, address)
            mine.update(found)
            if all(self.known[engine].checks for engine in found):  # else the successors cannot serve yet
                for gone in mine & self.known.keys() - found.keys():
                    if found or not forgets or self.known[gone].reason is not None:
                        self._disappeared(gone)
                mine.intersection_update(self.known)

        await loops.step("discovery", resolve)
        self._unread -= 1
        while True:
            await asyncio.sleep(self._settings.health.resolve_s)
            await loops.step("discovery", resolve)

    def _appeared(
        self, group: asyncio.TaskGroup, loops: background_loop.BackgroundLoops, address: health_check.Address
    ) -> None:
        logger.info("engine %s is checked at %s", address.id, address.url)
        health = self.known[address.id] = health_check.EngineHealth(address=address)
        self._directory.on_report(health.report())
        check = health_check.HealthCheck(
            health,
            self._served,
            settings=self._settings,
            connections=self._connections,
            directory=self._directory,
            placements=self._placements,
        )
        self._checks[address.id] = group.create_task(check.run(loops))

    def _disappeared(self, engine: EngineId) -> None:
        logger.info("engine %s is gone", engine)
        self._checks.pop(engine).cancel()
        del self.known[engine]
        self._directory.on_engine_gone(engine)


def _static(engine: engine_entries.StaticEngine, model: cost.CostModel | None) -> health_check.Address:
    return health_check.Address(
        id=EngineId(engine.id), url=engine.base_url, control=engine.control, node_pool=engine.node_pool, cost=model
    )


def _at(address: str) -> health_check.Address:
    """An engine of which nothing else is known."""
    return health_check.Address(id=EngineId(address), url=f"http://{address}", control=None, node_pool="", cost=None)


async def _addresses(
    service: engine_entries.EngineService, model: cost.CostModel | None
) -> list[health_check.Address] | None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(service.name, service.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return [] if error.errno in NO_ADDRESS else None
    except TimeoutError:
        return None
    hosts = sorted({str(entry[4][0]) for entry in found})
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    return [
        health_check.Address(
            id=EngineId(f"{host}:{service.port}"),
            url=f"http://{host}:{service.port}",
            control=None if service.control_port is None else f"{host}:{service.control_port}",
            node_pool=service.node_pool,
            cost=model,
        )
        for host in shown
    ]
