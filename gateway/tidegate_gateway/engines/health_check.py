"""Can one engine take calls now? A health check each second: /health, /metrics, /v1/models, and the control port.

An engine is trusted once it has answered /health and lists the gateway's model. Its metrics are shown to people and count
only in its favour: while the engine is seen to generate, calls wait longer for it. The gateway core decides whether
calls go there.
"""

import asyncio
import collections
import contextlib
import functools
import itertools
import logging
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from tidegate_control import control_client
from tidegate_gateway import gateway_settings, http_client
from tidegate_gateway.engines import metrics_scrape
from tidegate_gateway.lifecycle import engine_directory, placement
from tidegate_gateway.observe import background_loop
from tidegate_gateway.openai import bounded_json
from tidegate_policy import cost
from tidegate_policy.dispatch import engine_table
from tidegate_policy.model import EngineId

logger = logging.getLogger("tidegate.gateway")

MOST_LANES = 20
"""Lanes of an engine's queue that are shown."""
OTHERS_FIRST = "waits for the other engines"
"""Why an engine cannot take calls before the model of the gateway is decided; it is no trouble."""
MODELS_EVERY = 30
"""Health checks between two readings of /v1/models."""
MOST_MODELS, LONGEST_MODEL = 256, 256
"""Models of one engine: the model itself, and its adapters. Further ones are ignored, and names of more characters."""
MOST_CONTEXT = 1 << 30
"""Tokens. No model has a longer context; an engine that tells one has told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an engine is, and what is known of it beforehand."""

    id: EngineId
    url: str
    control: str | None
    node_pool: str
    cost: cost.CostModel | None
    """None = the engine came without a profile and is calibrated from its own calls."""


@dataclass(slots=True, kw_only=True)
class EngineHealth:
    """What the last health checks of one engine showed."""

    address: Address
    reason: str | None = "not checked yet"
    """Why it cannot take calls; None = it can."""
    misses: int = 0
    """Health checks in a row that failed."""
    checks: int = 0
    trouble_told: bool = False
    """The log says why it cannot take calls."""
    listed: tuple[str, ...] = ()
    """The models that it listed, if it answered the last health check."""
    models: tuple[str, ...] = ()
    """The same, where the gateway's model is among them."""
    context_tokens: int | None = None
    """The length of its context, if it tells it."""
    load: metrics_scrape.Load = field(default_factory=metrics_scrape.Load)
    policy: str | None = None
    """The scheduling policy of the engine's own queue, if its control port tells it."""
    lanes: Mapping[str, int] = field(default_factory=dict)
    """Waiting calls by the lane of the engine's own queue, if its control port tells them."""
    fallback: str | None = None
    """Why our scheduler does not run in it, if it does not."""
    rejects_token: bool = False
    """Its control port does not accept the token of this gateway. It serves calls all the same."""
    simulated: str | None = None
    """The profile of a simulated engine."""

    def report(self) -> engine_directory.EngineReport:
        """What the rest of the gateway needs to know."""
        health = engine_table.Health.DOUBTFUL if self.misses else engine_table.Health.UP
        if self.reason is not None:
            health = engine_table.Health.DOWN
        return engine_directory.EngineReport(
            id=self.address.id,
            url=self.address.url,
            cost=self.address.cost,
            health=health,
            models=self.models,
            context_tokens=self.context_tokens,
        )

    def after(self, problem: str | None, *, certain: bool, unhealthy_after: int) -> bool:
        """Counts one health check; whether it is news for the log: the engine went up or down, or it has never been up and
        something else than `OTHERS_FIRST` keeps it from that."""
        served = self.reason is None
        self.misses = 0 if problem is None else self.misses + 1
        if problem is None or not served or certain or self.misses >= unhealthy_after:
            self.reason = problem
        if self.reason is None:
            self.trouble_told = False
            return not served
        is_news = not self.trouble_told and self.reason != OTHERS_FIRST
        self.trouble_told = self.trouble_told or is_news
        return is_news


class ServedModel:
    """Decides which model all engines of a gateway serve, where the settings name none.

    It is the model that most engines list, so one engine cannot name it alone beside several others. It is decided once
    each engine was checked, and again while no engine serves it, or when more than half of all engines list another one:
    engines that start late, or a pool whose engines are replaced one after the other.
    """

    def __init__(
        self, name: str | None, known: Mapping[EngineId, EngineHealth], directory: engine_directory.EngineDirectory
    ) -> None:
        self._known = known
        self._directory = directory
        self._is_set = name is not None
        self._changed = asyncio.Event()
        directory.served = name

    @property
    def name(self) -> str | None:
        return self._directory.served

    def decide(self) -> None:
        """Takes what the engines list now."""
        engines, present = self._known.values(), self.name
        if self._is_set or (present is None and not all(engine.checks for engine in engines)):
            return
        lists = collections.Counter(model for engine in engines for model in dict.fromkeys(engine.listed))
        first = collections.Counter(engine.listed[0] for engine in engines if engine.listed)
        if not lists:
            return
        found = max(lists, key=lambda model: (lists[model], first[model]))  # of equal ones the first by the settings
        serves = any(engine.reason is None and present in engine.models for engine in engines)
        if found == present or (serves and 2 * lists[found] <= len(engines)):
            return
        logger.log(logging.INFO if present is None else logging.WARNING, "the engines serve the model %s", found)
        self._directory.served = found
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed_within(self, seconds: float) -> None:
        """Returns when the model is another one, or after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


class HealthCheck:
    """Checks one engine until cancelled."""

    def __init__(
        self,
        health: EngineHealth,
        served: ServedModel,
        *,
        settings: gateway_settings.Settings,
        connections: http_client.Connections,
        directory: engine_directory.EngineDirectory,
        placements: placement.Placements,
    ) -> None:
        self._health = health
        self._served = served
        self._settings = settings.health
        self._is_open_enough = settings.picker.conformance_tests
        self._token = settings.auth.pool_token
        self._extension_s = settings.timeouts.first_token_s
        self._connections = connections
        self._directory = directory
        self._placements = placements

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        async with _control(self._health.address.control, self._token) as control, asyncio.TaskGroup() as tasks:
            if control is not None:
                tasks.create_task(self._follow_control(control, loops))
            while True:
                await loops.step("health-check", self._check, of=self._health.address.id)
                await self._served.changed_within(self._settings.interval_s)

    async def _follow_control(
        self, control: control_client.EngineClient, loops: background_loop.BackgroundLoops
    ) -> None:
        """Reads the control port beside the health checks, so that a silent one does not slow them down."""
        while True:
            if self._health.reason is None:
                step = functools.partial(self._ask_control, control)
                await loops.step("control-port", step, of=self._health.address.id)
            await asyncio.sleep(self._settings.interval_s)

    async def _check(self) -> None:
        health, certain, before = self._health, False, self._health.listed
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                problem = await self._problem()
        except (http_client.NotReachable, ConnectionRefusedError):
            problem, certain = "cannot be reached", True
        except TimeoutError:
            problem = f"does not answer within {self._settings.timeout_s:.3g} s"
        except OSError as error:
            problem = f"does not answer ({error})"
        except Exception:
            # Whatever an engine answers, the other engines are served.
            if not health.misses:
                logger.exception("engine %s: its answer cannot be read", health.address.id)
            problem = "gives answers that cannot be read"
        health.checks += 1
        if problem is not None:
            health.listed = ()
        if health.listed != before or health.reason is not None:  # else nothing has changed
            self._served.decide()
        if health.listed and self._served.name not in health.listed:
            health.models = ()  # calls for these models must not be admitted
            served = self._served.name
            problem = OTHERS_FIRST if served is None else f"serves {health.listed[0]}, not {served}"
            certain = True
        elif health.listed:
            health.models = health.listed
        if health.after(problem, certain=certain, unhealthy_after=self._settings.unhealthy_after):
            level = logging.WARNING if problem else logging.INFO
            where = f" at {health.address.url}" if problem else ""
            logger.log(level, "engine %s%s %s", health.address.id, where, problem or "serves")
        self._directory.on_report(health.report())

    async def _problem(self) -> str | None:
        """One health check; the problem of the engine, or None."""
        health, url = self._health, self._health.address.url
        if self._is_open_enough:
            await _connect(url)
            return None
        status, _ = await self._page("/health")
        if status != 200:
            return f"says {status} on /health"
        before = health.load.generated
        health.load = await self._load()
        if health.load.uses_prefix_cache is not None:
            self._placements.on_prefix_cache(health.address.id, exists=health.load.uses_prefix_cache)
        if before is not None and health.load.generated is not None and before != health.load.generated:
            if health.load.generated < before:
                self._placements.on_engine_restarted(health.address.id)
            self._placements.on_engine_works(health.address.id, self._extension_s)
        if not health.models or not health.listed or health.checks % MODELS_EVERY == 0:
            _, page = await self._page("/v1/models")
            health.listed, health.context_tokens = _models(page)
            if not health.listed:
                health.models = ()
        return None if health.listed else "lists no models on /v1/models"

    async def _load(self) -> metrics_scrape.Load:
        """What the metrics of the engine tell; nothing is known without them."""
        try:
            async with asyncio.timeout(self._settings.timeout_s / 2):
                _, page = await self._page("/metrics")
        except OSError as error:
            logger.debug("engine %s: /metrics: %s", self._health.address.id, error)
            return metrics_scrape.Load()
        return metrics_scrape.read(page)

    async def _page(self, path: str) -> tuple[int, bytes]:
        return await self._connections.page(self._health.address.url + path, most_bytes=metrics_scrape.MOST_BYTES)

    async def _ask_control(self, control: control_client.EngineClient) -> None:
        health = self._health
        try:
            state = await control.get_state(timeout_s=self._settings.timeout_s)
        except control_client.CallFailed as error:
            is_news = error.is_unauthenticated and not health.rejects_token
            level = logging.WARNING if is_news else logging.DEBUG
            logger.log(level, "engine %s: control port: %s", health.address.id, error)
            health.rejects_token = error.is_unauthenticated
            return
        health.rejects_token = False
        if state is None:
            logger.debug("engine %s: control port: %s", health.address.id, control_client.UNREADABLE)
        else:
            health.policy, health.fallback = state.policy or None, state.fallback_reason or None
            health.simulated = state.simulated_profile or None
            health.lanes = dict(itertools.islice(state.waiting_by_lane.items(), MOST_LANES))


@contextlib.asynccontextmanager
async def _control(address: str | None, token: str | None) -> AsyncIterator[control_client.EngineClient | None]:
    if address is None:
        yield None
        return
    client = control_client.EngineClient(address, token=token)
    try:
        yield client
    finally:
        await client.close()


async def _connect(url: str) -> None:
    """Raises `OSError` unless the port takes connections. Servers of the conformance suite have no more of an engine."""
    address = urllib.parse.urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.transport.abort()


def _models(page: bytes) -> tuple[tuple[str, ...], int | None]:
    """The models that a page lists, and the length of the first one's context."""
    try:
        rows = bounded_json.of_engine(page)["data"][:MOST_MODELS]
        models = tuple(row["id"] for row in rows if isinstance(row["id"], str) and len(row["id"]) <= LONGEST_MODEL)
        context = rows[0].get("max_model_len") if models else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return (), None
    return models, context if type(context) is int and 1 <= context <= MOST_CONTEXT else None
