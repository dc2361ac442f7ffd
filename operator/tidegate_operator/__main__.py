"""`python -m tidegate_operator`, and `tidegate operator`: the composition of the operator.

The program waits for the Lease, then runs the `watches` and the `controller`, until SIGTERM. When it loses the Lease, it
ends with status 1, so that Kubernetes restarts its pod, which then waits for the Lease.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Coroutine, Sequence
from typing import Any

from kubernetes.aio import client, config

import tidegate_profiles
from tidegate_control import bounded_http, log_lines
from tidegate_operator import (
    controller,
    gateway_admin,
    handlers,
    installation_check,
    liveness,
    objects,
    operator_metrics,
    pool_adviser,
    pool_canary,
    pool_scaling,
    pool_steering,
    reconcile,
    render,
    spec_problems,
    watches,
)
from tidegate_operator.cluster import api_server, lease, watch_cache
from tidegate_operator.render import scraping
from tidegate_policy import duration, policies
from tidegate_policy.dispatch import rules as dispatch_rules
from tidegate_policy.steer import selectors

log = logging.getLogger("tidegate_operator")

FULL_COLLECTION = 100
"""Collections of the younger objects before all are looked at; by default it is ten."""
SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    begin_log(options.log_level)
    warnings.filterwarnings("ignore", message="kube_config_path not provided")  # the error says what to do
    try:
        if options.check:
            return asyncio.run(check(options))
        asyncio.run(run(options))
    except lease.LostError as error:
        log.error("%s", error)
        return 1
    except config.ConfigException as error:
        why = str(error).rstrip(".")
        sys.stderr.write(f"tidegate operator: no cluster to work on: {why}. Set KUBECONFIG, or run it in a pod.\n")
        return 1
    return 0


def begin_log(level: str) -> None:
    """Writes the log to stderr, whether it is read or not. What engines, models and other people say stays in its line."""
    log_lines.configure(level.upper())
    if level != "debug":
        quieten_kopf()


def quieten_kopf() -> None:
    """Leaves out what kopf logs of its watches, because `watches` reports their end in one line. Exceptions in `handlers`
    are logged."""
    logging.getLogger("kopf").setLevel(logging.CRITICAL)
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)


def parser() -> argparse.ArgumentParser:
    """The command line of the operator."""
    made = argparse.ArgumentParser(
        prog="tidegate operator", description="Turns ServingPools into running pools, and steers them."
    )
    add = made.add_argument
    add("--namespace", action="append", default=[], help="serve this namespace only (repeatable); default: its own")
    add("--all-namespaces", action="store_true", help="serve every namespace")
    add(
        "--operator-namespace",
        default=_own_namespace(),
        help="namespace of its Lease and of its own pod (default: %(default)s)",
    )
    add("--lease", default="tidegate-operator", help="name of its Lease (default: %(default)s)")
    add("--identity", default=f"{socket.gethostname()}-{os.getpid()}", help="its name in the Lease and in events")
    add("--image", default="tidegate:latest", help="image of gateways, simulated engines and embedded stores")
    add("--engine-image", default="tidegate-engine:latest", help="image of vLLM engines")
    add("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    add("--image-pull-secret", action="append", default=[], help="Secret of each pool's namespace (repeatable)")
    add("--health-port", type=int, default=8080, help="port of /healthz and /readyz (default: %(default)s)")
    add("--metrics-port", type=int, default=8081, help="port of /metrics (default: %(default)s)")
    add("--scrape-annotations", action="store_true", help="annotate Services with prometheus.io/scrape")
    add("--prometheus-namespace", help="namespace of Prometheus, which may read engines; default: no access")
    add(
        "--prometheus-pod-label",
        type=_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="label of the pods of Prometheus (repeatable); default: all pods of its namespace",
    )
    add(
        "--resync",
        type=_duration,
        default=60.0,
        metavar="TIME",
        help="check each pool this often without an event, if something that no event tells of can change it (1m)",
    )
    add(
        "--gateway-api",
        action="store_true",
        help="write HTTPRoutes, InferencePools and InferenceObjectives for pools with gateway.api",
    )
    add("--ipv6", action="store_true", help="ports listen on addresses of IPv6 too, for clusters whose pods have them")
    add("--check", action="store_true", help="only check that an operator acts and may list the pools, and end")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return made


def _duration(text: str) -> float:
    try:
        return duration.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no label; write KEY=VALUE")
    return key, value


def _own_namespace() -> str:
    try:
        with open(SERVICE_ACCOUNT_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return "default"


async def check(options: argparse.Namespace) -> int:
    """Prints what hinders the operator that is installed; 0 if nothing does."""
    await config.load_config()
    async with _connected() as api:
        server = api_server.ApiServer(api, instance=options.identity)
        leases = server.lease(options.operator_namespace, options.lease)
        obstacles = [line async for line in installation_check.obstacles(server, leases, _namespaces(options))]
    for line in obstacles:
        sys.stderr.write(f"tidegate operator: {line}\n")
    if not obstacles:
        sys.stdout.write("An operator acts, and it may list the ServingPools of each namespace that it serves.\n")
    return 1 if obstacles else 0


def _connected() -> client.ApiClient:
    """A client of the API server. Like kopf's it reads no proxy and no netrc file from the environment: aiohttp would read
    them for each request, the file in a thread."""
    configuration = client.Configuration.get_default_copy()
    configuration.client_session_kwargs = {"trust_env": False}
    return client.ApiClient(configuration)


def _namespaces(options: argparse.Namespace) -> Sequence[str | None]:
    """The namespaces that are served; None for all."""
    return [None] if options.all_namespaces else options.namespace or [options.operator_namespace]


async def run(options: argparse.Namespace) -> None:
    """Runs until SIGTERM. Raises LostError when the Lease is lost."""
    await config.load_config()
    metrics, pulse = operator_metrics.OperatorMetrics(), liveness.Pulse(time.monotonic)
    async with (
        _connected() as api,
        _connected() as leasing,  # its requests wait for no others
        liveness.served(options.health_port, options.metrics_port, metrics, pulse, ipv6=options.ipv6),
    ):
        server = api_server.ApiServer(api, instance=options.identity, gateway_api=options.gateway_api)
        if options.gateway_api:
            handlers.watch(objects.GATEWAY_API_KINDS)
        holding = lease.hold(
            api_server.ApiServer(leasing, instance=options.identity).lease(options.operator_namespace, options.lease),
            identity=options.identity,
            work=lambda: _act(options, server, metrics),
            answered=pulse.answered,
        )
        keep_what_is_loaded()
        await until_signal(holding)


def keep_what_is_loaded() -> None:
    """Full collections leave out what the start has made, and are rarer: with eight pools of 650 KB each of them stopped
    the event loop, and with it the renewal of the Lease, for up to 0.3 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; SIGTERM and SIGINT cancel it. The kernel ignores signals without a handler for the first process of a
    container, which may wait for the Lease for days."""
    working = asyncio.create_task(work)
    _on_signal(working)
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _act(
    options: argparse.Namespace,
    server: api_server.ApiServer,
    metrics: operator_metrics.OperatorMetrics,
) -> None:
    metrics.active.set(1)
    rules = reconcile.Rules(
        images=render.Images(
            tidegate=options.image,
            engine=options.engine_image,
            pull_policy=options.image_pull_policy,
            pull_secrets=tuple(options.image_pull_secret),
        ),
        known=spec_problems.Known(
            policies=frozenset(policies.POLICIES),
            rules=frozenset(dispatch_rules.RULES),
            profiles=frozenset(tidegate_profiles.names()),
            selectors=frozenset(selectors.SELECTORS),
            gateway_api=options.gateway_api,
        ),
        operator_namespace=options.operator_namespace,
        operator=f"{options.operator_namespace}/{options.lease}",
        prometheus=scraping.Scraping(
            annotate=options.scrape_annotations,
            namespace=options.prometheus_namespace,
            pod_labels=dict(options.prometheus_pod_label),
        ),
        ipv6=options.ipv6,
    )
    cache, asking = watch_cache.WatchCache(), bounded_http.Client()

    def admin_of(namespace: str, token: str | None) -> gateway_admin.GatewayAdmin:
        return gateway_admin.GatewayAdmin(asking, namespace=namespace, token=token)

    steering = pool_steering.PoolSteering(
        server,
        rules,
        reads=cache,
        admin_of=admin_of,
        ask_of=lambda pool: pool_adviser.adviser(server, asking, pool),
        clock=controller.now,
        monotonic=time.monotonic,
        metrics=metrics,
    )
    scaling = pool_scaling.PoolScaling(
        server, rules, reads=cache, admin_of=admin_of, clock=controller.now, monotonic=time.monotonic
    )
    canaries = pool_canary.PoolCanary(
        server, rules, reads=cache, admin_of=admin_of, clock=controller.now, monotonic=time.monotonic
    )
    metrics.add_pools(
        lambda: (body for body in cache.pools() if reconcile.owner_of(body) == rules.operator), steering.silent
    )
    controlling = controller.Controller(
        server, cache, rules, steering, scaling, canaries, resync_s=options.resync, metrics=metrics
    )
    namespaces = _namespaces(options)
    async with asyncio.TaskGroup() as group:
        working = group.create_task(controlling.run())
        watching = [
            group.create_task(watches.keep(namespace, server, controlling, forget=controlling.forget))
            for namespace in dict.fromkeys(namespaces)
        ]
        watching += [group.create_task(controlling.find_deleted(namespace)) for namespace in dict.fromkeys(namespaces)]
        _on_signal(working, *watching)  # so the Lease is held until all of them have ended


def _on_signal(*tasks: "asyncio.Task[None]") -> None:
    """SIGTERM and SIGINT cancel these tasks from now on, and no others."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _cancel, *tasks)


def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
