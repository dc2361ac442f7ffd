"""The composition root: settings in, a running gateway out.

`run` opens the sockets, starts the loops, and returns when it got a signal to stop and has drained: /ready says no, new
calls are shed with a retryable 503, the calls under way finish, and the other gateways learn at once that this one is gone.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import pathlib
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tidegate_profiles
from tidegate_gateway import gateway_settings, http_client, open_files, running_gateway, settings_reload, tenant_budget
from tidegate_gateway.edge import (
    admin_api,
    ext_proc,
    grpc_api,
    http_api,
    http_listener,
    listening_port,
    port_encryption,
)
from tidegate_gateway.engines import discovery
from tidegate_gateway.lifecycle import placement_loop
from tidegate_gateway.observe import tracing_spans
from tidegate_gateway.store import prompt_stream, relquery_store, store_contract, valkey_store
from tidegate_gateway.workflows import call_ends

logger = logging.getLogger("tidegate.gateway")

FULL_COLLECTION = 100
"""Collections of the younger objects before all are looked at. By default it is ten: while a burst of calls makes a million
objects, each such pause is longer than the one before, up to a quarter of a second, and there are ten of them."""
SWITCH_S = 0.0005
"""How long a thread that decodes a large message holds up the event loop."""

ASK_AGAIN_S = 1.0
"""While a gateway announces that it leaves."""
CUT_S = 1.0
"""Time for clients to read the error of their cut calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where a started gateway listens (the real ports, where 0 was asked for)."""

    http: str
    grpc: str | None
    ext_proc: str | None
    picker_health: str | None
    admin: str | None
    metrics: str | None
    gateway: running_gateway.Gateway


async def run(settings: gateway_settings.Settings, *, file: pathlib.Path | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `file` is the settings file, whose changes are taken over. Raises
    `BadSettings`, and `OSError` for a port in use."""
    stopped = asyncio.Event()
    settings = open_files.fitted(settings)
    async with serving(settings, file=file) as bound:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        gc.collect()
        gc.freeze()  # what a start leaves stays; a full collection would pause all clients for tens of milliseconds
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
        sys.setswitchinterval(SWITCH_S)
        logger.info("gateway listens on %s (gRPC %s, admin %s)", bound.http, bound.grpc, bound.admin)
        await stopped.wait()
        logger.info("gateway drains %d calls", bound.gateway.placements.in_progress)


@contextlib.asynccontextmanager
async def serving(
    settings: gateway_settings.Settings,
    *,
    profiles: discovery.Profiles | None = None,
    file: pathlib.Path | None = None,
) -> AsyncIterator[Bound]:
    """A running gateway; leaving the context drains it. Raises `BadSettings`, and `OSError` for a port or a file in use."""
    encryption = port_encryption.PortEncryption(settings.tls)
    store = valkey_store.Valkey(settings.store, gateway=valkey_store.new_gateway_id()) if settings.store.url else None
    try:
        async with contextlib.AsyncExitStack() as stack:
            if store is not None:
                stack.push_async_callback(store.close)
            connections = http_client.Connections(connect_s=settings.timeouts.connect_s)
            stack.callback(connections.close)
            traces = tracing_spans.to_collector(settings.tracing, time.monotonic)
            if traces is not None:
                stack.callback(traces.close)
            relqueries = ends = prompts = None
            if store is not None:
                relqueries = relquery_store.RelQueryStore(store, settings.store, settings.relqueries)
                ends = _outbox(settings.store)
                stack.callback(ends.close)
                prompts = prompt_stream.PromptStream(store)
            gateway = running_gateway.Gateway(
                settings,
                connections,
                store,
                relqueries,
                ends,
                prompts,
                profiles=profiles or shipped,
                traces=traces,
            )
            gateway.metrics.certificate_expiry.set_function(lambda: encryption.expires_at_s)
            stack.push_async_callback(_leave, gateway)  # once no loop renews the lease
            loops = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(loops.create_task(gateway.run()).cancel)
            stack.callback(loops.create_task(encryption.run(gateway.loops)).cancel)
            if file is not None:
                stack.callback(loops.create_task(settings_reload.SettingsReload(file, gateway).run()).cancel)
            await gateway.discovery.first_look()
            bound = await _listen(stack, gateway, encryption)
            try:
                yield bound
            finally:
                await _drain(gateway)
    except BaseExceptionGroup as group:
        raise _only(group) from None


def _outbox(store: gateway_settings.Store) -> call_ends.CallEnds:
    """The outbox of a gateway with a store. Without a journal, one line of the log says what a killed gateway forgets."""
    if store.journal is None:
        logger.warning(
            "store.url is set and store.journal is not: if this gateway is killed while the store is down, it forgets the"
            " ends of calls that clients have seen. Set store.journal to a file that outlives the process"
        )
        return call_ends.CallEnds()
    return call_ends.CallEnds(pathlib.Path(store.journal))


def _only(error: BaseException) -> BaseException:
    """The one exception in a task group's exception group: callers want the `OSError`, not the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def shipped(name: str) -> Mapping[str, Any]:
    """The `cost` mapping of a profile that the project ships. Raises `ValueError`."""
    cost: Mapping[str, Any] = tidegate_profiles.load(name)["cost"]
    return cost


async def _listen(
    stack: contextlib.AsyncExitStack,
    gateway: running_gateway.Gateway,
    encryption: port_encryption.PortEncryption,
) -> Bound:
    where, handlers, admin = gateway.settings.listen, http_api.HttpApi(gateway), admin_api.AdminApi(gateway)
    with _setting("listen.extProcPort or picker.healthPort"):
        picker = await _ext_proc(stack, gateway, handlers, encryption)
    with _setting("listen.port"):
        http = await _site(
            stack,
            gateway,
            handlers.routes(),
            where.host,
            where.port,
            guard=handlers.port_guard,
            bodies=gateway.bodies,
            encryption=encryption.context(),
        )
    with _setting("listen.grpcPort"):
        grpc = await _grpc(stack, gateway, where, encryption)
    with _setting("listen.adminPort"):
        private = await _site(stack, gateway, admin.routes(), where.admin_host, where.admin_port, guard=admin.guard)
    with _setting("listen.metricsPort"):
        metrics = await _site(stack, gateway, handlers.probes(), where.metrics_host, where.metrics_port)
    return Bound(
        http=http or "",
        grpc=grpc,
        ext_proc=None if picker is None else picker.picker,
        picker_health=None if picker is None else picker.health,
        admin=private,
        metrics=metrics,
        gateway=gateway,
    )


@contextlib.contextmanager
def _setting(name: str) -> Iterator[None]:
    """A port in use is an `OSError` that names its setting."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(error.errno, f"{error.strerror}; choose another port by {name}") from None


async def _site(
    stack: contextlib.AsyncExitStack,
    gateway: running_gateway.Gateway,
    routes: http_listener.Routes,
    host: str,
    port: int | None,
    *,
    guard: http_listener.Guard | None = None,
    bodies: tenant_budget.TenantBudget | None = None,
    encryption: ssl.SSLContext | None = None,
) -> str | None:
    """Opens one listener; its address as host:port, None if it is not wanted. Raises `OSError` for a port in use."""
    if port is None:
        return None
    limits = gateway.settings.limits
    server = http_listener.Server(
        routes, limits, leaving=lambda: gateway.draining, guard=guard, bodies=bodies, encryption=encryption
    )
    opened = await listening_port.open_port(
        server,
        host,
        port,
        most_waiting=listening_port.most_waiting(limits.connections),
        answers_ended=encryption is None,
    )
    stack.push_async_callback(http_listener.close, opened, server)
    return opened.shown(host)


async def _grpc(
    stack: contextlib.AsyncExitStack,
    gateway: running_gateway.Gateway,
    where: gateway_settings.Listen,
    encryption: port_encryption.PortEncryption,
) -> str | None:
    if where.grpc_port is None:
        return None
    return await stack.enter_async_context(
        grpc_api.serving(gateway, where.host, where.grpc_port, encryption.context("h2"))
    )


async def _ext_proc(
    stack: contextlib.AsyncExitStack,
    gateway: running_gateway.Gateway,
    handlers: http_api.HttpApi,
    encryption: port_encryption.PortEncryption,
) -> ext_proc.Addresses | None:
    where = gateway.settings.listen
    if where.ext_proc_port is None:
        return None
    context = encryption.context("h2")
    return await stack.enter_async_context(
        ext_proc.serving(gateway, handlers, where.host, where.ext_proc_port, context)
    )


async def _drain(gateway: running_gateway.Gateway) -> None:
    """Lets the calls under way finish, and the store take their ends, as long as the settings allow."""
    timeouts = gateway.settings.timeouts
    gateway.draining = True
    await _announce(gateway, timeouts.announce_s)
    gateway.core.on_drain()
    try:
        async with asyncio.timeout(timeouts.drain_s):
            await placement_loop.drained(gateway.placements)
            await gateway.relquery_runner.drained()
            await gateway.workflows.recorded()
    except TimeoutError:
        if gateway.workflows.unrecorded:
            waiting = gateway.workflows.unrecorded
            logger.warning("%d ends of calls still wait for the store after %.3g s", waiting, timeouts.drain_s)
        if gateway.placements.in_progress:
            left = gateway.placements.in_progress
            logger.warning("%d calls did not finish within %.3g s and are cut", left, timeouts.drain_s)
        gateway.placements.cut_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await placement_loop.drained(gateway.placements)


async def _announce(gateway: running_gateway.Gateway, left_s: float) -> None:
    """Asks clients to connect elsewhere, and again those that come back, because their load balancer does not know yet."""
    while True:
        for ask in gateway.leaving:
            ask()
        if left_s <= 0:
            return
        await asyncio.sleep(min(left_s, ASK_AGAIN_S))
        left_s -= ASK_AGAIN_S


async def _leave(gateway: running_gateway.Gateway) -> None:
    """Records the ends that the store does not know yet, then tells the other gateways that this one is gone."""
    if gateway.link.store is not None:
        await gateway.tokens.flush()
        await gateway.workflows.flush()
        with contextlib.suppress(store_contract.StoreError):
            await gateway.relquery_runner.release()
        if gateway.workflows.unrecorded:
            logger.error("the ends of %d calls cannot be recorded", gateway.workflows.unrecorded)
        with contextlib.suppress(store_contract.StoreError):
            await gateway.link.store.leave()
