"""A Prometheus that reads a running Tidegate: for the test of the dashboards and for their pictures.

The pool is `tidegate up` with simulated engines, under load. Simulated engines have no metrics of vLLM's scheduler, and
`tidegate up` has no operator, so this process serves the metrics of one real engine and one operator, filled by their own
code. Prometheus gives the series the labels that the chart's PodMonitors give.
"""

import asyncio
import contextlib
import itertools
import pathlib
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import demo_load
import prometheus_client
import yaml
from aiohttp import web

from tidegate_cli import processes
from tidegate_engine import meters
from tidegate_operator import operator_metrics, workqueue
from tidegate_policy.steer import guards

PROGRAM = shutil.which("prometheus")
RULES = pathlib.Path(__file__).resolve().parents[2] / "helm" / "tidegate" / "files" / "rules.yaml"
NAMESPACE, POOL = "serving", "chat"
KEY = (NAMESPACE, POOL)
START_S = 60.0


class Prometheus:
    """The HTTP API of a Prometheus."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def series(self, expr: str, *, until_at_s: float, last_s: float, step_s: float) -> list[dict[str, Any]]:
        """The answer of a range query: series with `metric` and `values`. NaN is no value."""
        asked = {"query": expr, "start": until_at_s - last_s, "end": until_at_s, "step": step_s}
        async with self._session.post(f"{self._url}/api/v1/query_range", data=asked) as answer:
            found = await answer.json()
        if found["status"] != "success":
            raise ValueError(f"{expr}: {found['error']}")
        series = [
            {**each, "values": [(at, float(value)) for at, value in each["values"] if value != "NaN"]}
            for each in found["data"]["result"]
        ]
        return [each for each in series if each["values"]]


def grounded(expr: str, *, rate_s: int) -> str:
    """A dashboard's expression with values for its variables."""
    return expr.replace("$namespace", NAMESPACE).replace("$pool", POOL).replace("$__rate_interval", f"{rate_s}s")


@contextlib.asynccontextmanager
async def running(folder: pathlib.Path, *, load_s: float, scrape_s: int, seed: int = 7) -> AsyncIterator[Prometheus]:
    """The whole demonstration; `load_s` is the time for which clients send calls."""
    ports = [processes.free_port() for _ in range(4)]
    url, admin, found = (f"http://127.0.0.1:{port}" for port in (ports[0], ports[1], ports[3]))
    names = ("--port", "--admin-port", "--grpc-port")
    words = ["up", "--engines", "sim:a100,a6000", "--sim-speed", "3", "--state", str(folder / "up")]
    words += [f"{name}={port}" for name, port in zip(names, ports, strict=False)]
    (folder / "pool.yaml").write_text(demo_load.SETTINGS + "dispatch: {cap: 16}\n")
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await _start(stack, processes.ourselves(*words, "--config", str(folder / "pool.yaml")), folder / "up.log")
        await _answers(session, f"{url}/ready")
        async with session.get(f"{admin}/admin/state") as answer:
            engines = {each["name"]: each["url"] for each in (await answer.json())["engines"]}
        others = await stack.enter_async_context(_served())
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(_configuration(url, engines, others, scrape_s)))
        words = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        words += [f"--web.listen-address=127.0.0.1:{ports[3]}", "--query.lookback-delta=30s"]
        assert PROGRAM is not None
        await _start(stack, [PROGRAM, *words], folder / "prometheus.log")
        await _answers(session, f"{found}/-/ready")
        tasks = [
            asyncio.create_task(demo_load.Load(session, url, seed=seed).run(load_s)),
            asyncio.create_task(_switches(session, url, admin, load_s / 10)),
        ]
        try:
            yield Prometheus(session, found)
        finally:
            for task in tasks:
                task.cancel()


async def _start(stack: contextlib.AsyncExitStack, command: list[str], log: pathlib.Path) -> None:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=subprocess.STDOUT)

    async def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()

    stack.push_async_callback(stop)


async def _answers(session: aiohttp.ClientSession, url: str) -> None:
    """Returns once the address answers 200."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


def _configuration(gateway: str, engines: dict[str, str], others: str, scrape_s: int) -> dict[str, Any]:
    """Of Prometheus, with the labels that the chart's PodMonitors give."""
    pool = {"namespace": NAMESPACE, "pool": POOL}

    def job(name: str, url: str, labels: dict[str, str], path: str = "/metrics", **more: Any) -> dict[str, Any]:
        targets = {"targets": [url.removeprefix("http://")], "labels": labels}
        return {"job_name": name, "metrics_path": path, "static_configs": [targets], **more}

    return {
        "global": {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            job("gateway", gateway, pool),
            *(job(f"engine-{name}", url, {**pool, "node_pool": name}) for name, url in engines.items()),
            job("engine-real", others, {**pool, "node_pool": "real"}, "/engine"),
            job("operator", others, {"namespace": "tidegate-system"}, "/operator", honor_labels=True),
        ],
    }


@contextlib.asynccontextmanager
async def _served() -> AsyncIterator[str]:
    """Serves the metrics of a real engine and of an operator; yields the address."""
    meter, operator, chance = meters.prometheus(), operator_metrics.OperatorMetrics(), random.Random(7)
    attempted = {
        queue: operator.add_queue(queue, lambda: workqueue.Reading(depth=int(chance.random() < 0.1), age_s=0.01))
        for queue in ("reconcile", "steer")
    }
    operator.active.set(1)
    operator.add_pools(_pools, lambda: {KEY: 0})
    kinds, policies = guards.Kind, itertools.cycle(("sjf", "urgency", "two-lane", "urgency"))
    active = "urgency"

    async def engine(_: web.Request) -> web.Response:
        for tokens in ((1, 1), (512,), (1, 512)):
            meter.scheduled(0.0002, int(chance.random() < 0.1))
            meter.stepped(chance.uniform(0.01, 0.06), tokens)
        return web.Response(body=prometheus_client.generate_latest())

    async def of_operator(_: web.Request) -> web.Response:
        nonlocal active
        attempted["reconcile"](chance.expovariate(20), chance.random() < 0.05)
        attempted["steer"](chance.expovariate(50), False)
        switches = chance.random() < 0.1
        chosen = next(policies) if switches else active
        verdict = guards.Verdict(
            kind=kinds.SWITCH if switches else kinds.KEEP, policy=chosen, reason="overload: 3 s wait"
        )
        operator.decided(KEY, active, verdict)
        active = chosen
        return web.Response(body=operator.exposition()[0])

    app = web.Application()
    app.add_routes([web.get("/engine", engine), web.get("/operator", of_operator)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def _pools() -> list[dict[str, Any]]:
    conditions = {"Available": True, "Ready": True, "Progressing": False, "Degraded": False, "PolicyStable": True}
    status = {
        "nodePools": [{"name": "a100", "desired": 2, "ready": 2}, {"name": "a6000", "desired": 1, "ready": 1}],
        "conditions": [{"type": name, "status": str(holds)} for name, holds in conditions.items()],
    }
    return [{"metadata": {"namespace": NAMESPACE, "name": POOL}, "status": status}]


async def _switches(session: aiohttp.ClientSession, url: str, admin: str, pause_s: float) -> None:
    """Switches the policy each `pause_s`, and sends calls whose deadline cannot be kept."""
    call = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}
    for policy in itertools.cycle(("sjf", "two-lane", "urgency", "edf")):
        for _ in range(10):
            headers = {"x-tidegate-class": "chat", "x-tidegate-deadline-ms": "1"}
            async with session.post(f"{url}/v1/chat/completions", json=call, headers=headers) as answer:
                await answer.read()
            await asyncio.sleep(pause_s / 10)
        async with session.put(f"{admin}/admin/policy", json={"policy": policy, "reason": "a demonstration"}) as answer:
            await answer.read()
