"""Which engines are there, and which of them can take a call now?

Discovery (a fixed list, or the addresses behind a headless service's name), a look at each engine every second, and the
record of the calls that it failed. What follows from all three is one `EngineState` for the dispatcher, sent whenever it
changes. An engine is trusted once it has answered /health and listed the gateway's model; its metrics are shown to people
and count only in its favour: while it is seen to generate, calls wait longer for it. How calls are spread is the
dispatcher's business.
"""

import asyncio
import contextlib
import logging
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import grpc
import orjson

from tidegate_gateway import calibrate, decode, outliers, scrape, settings
from tidegate_policy import cost, dispatcher
from tidegate_policy.model import NO_BACKLOG, Backlog, EngineId
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

logger = logging.getLogger("tidegate.gateway")

MODELS_EVERY = 30
"""Looks between two readings of /v1/models."""

Profiles = Callable[[str], Mapping[str, object]]
"""Name of a shipped profile -> its `cost` mapping. Raises `LookupError` or `ValueError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an engine is and what is known of it beforehand."""

    id: EngineId
    url: str
    control: str | None
    node_pool: str
    cost: cost.CostModel | None
    """None = it came without a profile and is calibrated from its own calls."""


@dataclass(slots=True, kw_only=True)
class Known:
    """What the last looks showed of one engine."""

    address: Address
    reason: str | None = "not looked at yet"
    """Why it cannot take calls; None = it can."""
    misses: int = 0
    """Looks in a row that failed: after one, calls go elsewhere if they can; after `unhealthy_after` it is down."""
    looks: int = 0
    models: tuple[str, ...] = ()
    load: scrape.Load = field(default_factory=scrape.Load)
    record: outliers.Record = field(default_factory=outliers.Record)
    calibration: calibrate.Calibration = field(default_factory=calibrate.Calibration)
    policy: str | None = None
    """The order of its own queue, if its control port says so."""
    fallback: str | None = None
    """Why our scheduler does not run in it, if it does not."""
    simulated: str | None = None
    """The profile that it pretends to be, if it is no real engine."""

    @property
    def cost(self) -> cost.CostModel:
        return self.address.cost or self.calibration.cost


class Listener(Protocol):
    """Who is told of changes: the router."""

    def on_engine(self, state: dispatcher.EngineState) -> None: ...
    def on_engine_gone(self, engine: EngineId) -> None: ...
    def on_engine_lost(self, engine: EngineId) -> None: ...
    def on_engine_works(self, engine: EngineId) -> None: ...


class Fleet:
    """All engines of this gateway."""

    def __init__(
        self, told: settings.Settings, session: aiohttp.ClientSession, *, profiles: Profiles, clock: Callable[[], float]
    ) -> None:
        self.known: dict[EngineId, Known] = {}
        self.model = told.model
        """The one model that every engine here serves; None until the first engine has said it."""
        self.listener: Listener | None = None
        self._told = told
        self._session = session
        self._profiles = profiles
        self._clock = clock
        self._others: Mapping[EngineId, Backlog] = {}
        self._published: dict[EngineId, dispatcher.EngineState] = {}
        self._watches: dict[EngineId, asyncio.Task[None]] = {}
        self._static = [_static(engine, self._cost(engine.profile, engine.cost)) for engine in told.engines]
        self._services = [(service, self._cost(service.profile, service.cost)) for service in told.services]

    @property
    def models(self) -> list[str]:
        """Every model that some engine lists (adapters included)."""
        return sorted({model for known in self.known.values() for model in known.models})

    def costs(self) -> list[cost.CostModel]:
        """Of the engines that can take calls, else of all."""
        live = [known.cost for known in self.known.values() if known.reason is None]
        return live or [known.cost for known in self.known.values()]

    def url(self, engine: EngineId) -> str:
        known = self.known.get(engine)
        return known.address.url if known is not None else f"http://{engine}"

    def on_others(self, others: Mapping[EngineId, Backlog]) -> None:
        """What other gateways have out at the engines."""
        self._others = others
        for known in self.known.values():
            self._publish(known)

    def on_attempt(self, engine: EngineId, ok: bool) -> None:
        """An engine did its part in a call, or did not."""
        known, now = self.known.get(engine), self._clock()
        if known is None:
            return
        after = known.record.after(now, ok=ok, limits=self._told.health)
        if after.ejected(now) and not known.record.ejected(now):
            if not self._others_serve(engine, now):
                return  # the last one that serves is never ejected: a bad engine is better than none
            logger.warning("engine %s ejected for %.3g s: its calls fail", engine, after.until_s - now)
        known.record = after
        self._publish(known)

    def on_observation(self, engine: EngineId, seen: calibrate.Observation) -> None:
        """An engine finished a call."""
        known = self.known.get(engine)
        if known is not None and known.address.cost is None:
            known.calibration = known.calibration.after(seen)
            self._publish(known)

    async def run(self) -> None:
        """Discovers and watches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._static:
                self._appeared(group, address)
            for service, model in self._services:
                group.create_task(self._resolve(group, service, model))

    def _cost(self, profile: str | None, inline: Mapping[str, float] | None) -> cost.CostModel | None:
        try:
            mapping = inline if inline is not None else None if profile is None else self._profiles(profile)
            return None if mapping is None else cost.from_mapping(mapping)
        except (LookupError, ValueError) as error:
            raise decode.BadSettings(f"the cost profile {profile or 'given inline'} cannot be used: {error}") from error

    async def _resolve(
        self, group: asyncio.TaskGroup, service: settings.EngineService, model: cost.CostModel | None
    ) -> None:
        """Follows the addresses of a name; while it cannot be resolved, the last answer stands."""
        mine: set[EngineId] = set()
        while True:
            with contextlib.suppress(socket.gaierror, TimeoutError):
                found = {address.id: address for address in await _addresses(service, model)}
                for address in found.values():
                    if address.id not in self.known:
                        self._appeared(group, address)
                for gone in mine & self.known.keys() - found.keys():
                    self._disappeared(gone)
                mine = set(found)
            await asyncio.sleep(self._told.health.resolve_s)

    def _appeared(self, group: asyncio.TaskGroup, address: Address) -> None:
        logger.info("engine %s appeared at %s", address.id, address.url)
        known = self.known[address.id] = Known(address=address)
        self._publish(known)
        self._watches[address.id] = group.create_task(self._watch(known))

    def _disappeared(self, engine: EngineId) -> None:
        logger.info("engine %s is gone", engine)
        self._watches.pop(engine).cancel()
        del self.known[engine]
        self._published.pop(engine, None)
        if self.listener is not None:
            self.listener.on_engine_gone(engine)

    async def _watch(self, known: Known) -> None:
        async with _control(known.address.control) as control:
            while True:
                certain = False
                try:
                    async with asyncio.timeout(self._told.health.timeout_s):
                        problem = await self._look(known)
                except aiohttp.ClientConnectorError:
                    problem, certain = "cannot be reached", True
                except (aiohttp.ClientError, OSError) as error:
                    problem = f"does not answer ({type(error).__name__})"
                except Exception:
                    # Whatever an engine answers, the others are served.
                    if not known.misses:
                        logger.exception("engine %s: its answer cannot be read", known.address.id)
                    problem = "answers what cannot be read"
                self._looked(known, problem, certain=certain)
                if control is not None and known.reason is None:
                    await self._ask_control(known, control)
                await asyncio.sleep(self._told.health.interval_s)

    def _looked(self, known: Known, problem: str | None, *, certain: bool) -> None:
        known.looks += 1
        before = (known.reason, known.misses == 0)
        known.misses = 0 if problem is None else known.misses + 1
        doubtful = not certain and known.misses < self._told.health.unhealthy_after
        if problem is None or known.reason is not None or not doubtful:
            known.reason = problem
        if (known.reason is None) != (before[0] is None):
            logger.log(
                logging.WARNING if problem else logging.INFO, "engine %s %s", known.address.id, problem or "serves"
            )
        for touched in [known] if before == (known.reason, known.misses == 0) else self.known.values():
            self._publish(touched)
        lost = known.reason is not None and before[0] is None
        if lost and self.listener is not None:
            self.listener.on_engine_lost(known.address.id)

    async def _look(self, known: Known) -> str | None:
        """One look; what is wrong with the engine, or None."""
        url = known.address.url
        async with self._session.get(url + "/health", allow_redirects=False) as response:
            if response.status != 200:
                return f"says {response.status} on /health"
        async with self._session.get(url + "/metrics", allow_redirects=False) as response:
            before = known.load.generated
            known.load = scrape.read(await _page(response)) if response.status == 200 else scrape.Load()
        if None not in (before, known.load.generated) and before != known.load.generated and self.listener is not None:
            self.listener.on_engine_works(known.address.id)
        if not known.models or known.looks % MODELS_EVERY == 0:
            async with self._session.get(url + "/v1/models", allow_redirects=False) as response:
                known.models = _models(await _page(response))
        if not known.models:
            return "lists no models on /v1/models"
        if self.model is None:
            self.model = known.models[0]
        return None if self.model in known.models else f"serves {known.models[0]}, not {self.model}"

    async def _ask_control(self, known: Known, control: control_pb2_grpc.EngineControlStub) -> None:
        try:
            state = await control.GetState(control_pb2.GetStateRequest(), timeout=self._told.health.timeout_s)
        except grpc.aio.AioRpcError as error:
            logger.debug("engine %s: control port: %s", known.address.id, error.code())
            return
        if state is None:  # what grpc.aio makes of an answer that cannot be parsed
            logger.debug("engine %s: control port: not an EngineState", known.address.id)
        else:
            known.policy, known.fallback = state.policy or None, state.fallback_reason or None
            known.simulated = state.simulated_profile or None

    def _accepting(self, known: Known, now: float) -> bool:
        """A doubtful engine takes calls only if every other one is in doubt too."""
        if known.reason is not None or known.record.ejected(now):
            return False
        return not known.misses or not self._others_serve(known.address.id, now)

    def _others_serve(self, engine: EngineId, now: float) -> bool:
        return any(
            other.reason is None and not other.misses and not other.record.ejected(now)
            for other in self.known.values()
            if other.address.id != engine
        )

    def _publish(self, known: Known) -> None:
        state = dispatcher.EngineState(
            id=known.address.id,
            cost=known.cost,
            cap=cap(self._told.dispatch.cap, known.cost),
            accepting=self._accepting(known, self._clock()),
            others=self._others.get(known.address.id, NO_BACKLOG),
        )
        if self.listener is not None and self._published.get(state.id) != state:
            self._published[state.id] = state
            self.listener.on_engine(state)


async def _page(response: aiohttp.ClientResponse) -> bytes:
    page = bytearray()
    async for chunk in response.content.iter_any():
        page += chunk
        if len(page) > scrape.MOST_BYTES:
            raise aiohttp.ClientPayloadError("too large a page")
    return bytes(page)


def cap(setting: int | str | None, model: cost.CostModel) -> int | None:
    """Calls that may be out at one engine; auto = a full batch, and enough behind it that no place in it stays empty."""
    if isinstance(setting, str):
        return model.max_batch + max(2, model.max_batch // 8)
    return setting


def _static(engine: settings.StaticEngine, model: cost.CostModel | None) -> Address:
    url = engine.url.rstrip("/").removesuffix("/v1")
    name = engine.name or urllib.parse.urlsplit(url).netloc
    return Address(id=EngineId(name), url=url, control=engine.control, node_pool=engine.node_pool, cost=model)


async def _addresses(service: settings.EngineService, model: cost.CostModel | None) -> list[Address]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        found = await loop.getaddrinfo(service.name, service.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in found})
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    return [
        Address(
            id=EngineId(f"{host}:{service.port}"),
            url=f"http://{host}:{service.port}",
            control=None if service.control_port is None else f"{host}:{service.control_port}",
            node_pool=service.node_pool,
            cost=model,
        )
        for host in shown
    ]


@contextlib.asynccontextmanager
async def _control(address: str | None) -> AsyncIterator[control_pb2_grpc.EngineControlStub | None]:
    if address is None:
        yield None
        return
    async with grpc.aio.insecure_channel(address) as channel:
        yield control_pb2_grpc.EngineControlStub(channel)  # type: ignore[no-untyped-call]


def _models(page: bytes) -> tuple[str, ...]:
    try:
        rows = orjson.loads(page)["data"]
        return tuple(row["id"] for row in rows if isinstance(row["id"], str))
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ()
