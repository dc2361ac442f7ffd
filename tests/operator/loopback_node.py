"""A node whose pods are servers on loopback addresses: the kubelet's part of a pool of simulated engines.

Real: the pods' life in the API server (an engine is ready once it serves; a pod that is deleted leaves the names, serves
for the time of its preStop hook, finishes its calls, and only then is gone), the gateways, and the calls. The engines are
those of `tidegate sim-engine`. Not real: containers and the name server, which the event loop's `getaddrinfo` replaces.
"""

import asyncio
import contextlib
import datetime
import itertools
import os
import socket
from collections import Counter
from dataclasses import dataclass, field

import yaml
from aiohttp import web

from tidegate_gateway import app, gateway_settings
from tidegate_policy import cost
from tidegate_sim import openai_double, realtime

NAME = "loopback"
LABEL = "kubernetes.io/hostname"
TAINT = "tidegate.dev/loopback"
PLACEMENT = {"nodeSelector": {LABEL: NAME}, "tolerations": [{"key": TAINT, "operator": "Exists"}]}
"""Of the pods that run here."""
LEAVE_S = 5.0
"""As the preStop hook of engines and gateways."""
DRAIN_S = 120.0
HEARTBEAT_S = 10.0
LOOK_S = 0.1
SHORT, LONG = 20, 1500
"""Tokens of the calls."""
MERGE = "application/merge-patch+json"
COST = cost.CostModel(step_s=0.01, prefill_s=1e-3, max_batch=256)

_numbers = itertools.count(1)
_NETWORK = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
"""Of this process: other tests that run on the machine have other addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the engines of an image serve."""

    error_every: int = 0
    """Each so many-th call fails with 500; 0 = none does."""
    model: cost.CostModel = COST


@dataclass(slots=True)
class Engine:
    """One engine."""

    image: str
    calls: int = 0
    failed: int = 0
    running: int = 0
    drained: int = 0
    """Calls that ran when its pod was deleted."""


@dataclass(slots=True)
class LoopbackNode:
    """The pods of one namespace on this node."""

    cluster: object
    namespace: str
    behaviours: dict[str, Behaviour]
    """By image."""
    engines: dict[str, Engine] = field(default_factory=dict)
    """By address, those that are gone included."""
    gateways: dict[str, app.Bound] = field(default_factory=dict)
    """By address, those that accept calls."""
    _ready: dict[str, str] = field(default_factory=dict)
    """Address to node pool of the engines that the name server names."""
    _leaving: dict[str, asyncio.Event] = field(default_factory=dict)

    async def getaddrinfo(self, host, port, **options):
        """The name server: a Service of a node pool has the addresses of its ready engines."""
        pool = host.split(".")[0].removeprefix("chat-engine-")
        if pool == host.split(".")[0]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        found = [address for address, node_pool in self._ready.items() if node_pool == pool]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    async def run(self):
        """Until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heartbeat())
            while True:
                for pod in await self.cluster.pods(self.namespace, "chat"):
                    metadata = pod["metadata"]
                    if pod["spec"].get("nodeName") != NAME:
                        continue
                    if metadata["uid"] not in running:
                        self._leaving[metadata["uid"]] = asyncio.Event()
                        running[metadata["uid"]] = group.create_task(self._pod(pod))
                    elif "deletionTimestamp" in metadata:
                        self._leaving[metadata["uid"]].set()
                await asyncio.sleep(LOOK_S)

    async def _heartbeat(self):
        while True:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            condition = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
            body = {"status": {"conditions": [condition | {"lastTransitionTime": now}]}}
            await self.cluster.ask("PATCH", f"/api/v1/nodes/{NAME}/status", body, content_type=MERGE)
            await asyncio.sleep(HEARTBEAT_S)

    async def _pod(self, pod):
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        address = f"{_NETWORK}.{next(_numbers) % 250 + 1}"
        await self._report(pod, address, ready=False)
        component = labels["app.kubernetes.io/component"]
        serving = self._engine if component == "engine" else self._gateway
        async with serving(pod, address):
            await self._report(pod, address, ready=True)
            await self._leaving[metadata["uid"]].wait()
            self._ready.pop(address, None)
            await asyncio.sleep(LEAVE_S)
            self.gateways.pop(address, None)
            if component == "engine":
                self.engines[address].drained = self.engines[address].running
        path = f"/api/v1/namespaces/{self.namespace}/pods/{metadata['name']}"
        await self.cluster.ask("DELETE", path, {"gracePeriodSeconds": 0})

    @contextlib.asynccontextmanager
    async def _engine(self, pod, address):
        """Serves until the context is left, then finishes the calls under way."""
        image = pod["spec"]["containers"][0]["image"]
        behaviour, seen = self.behaviours[image], Engine(image)
        self.engines[address] = seen
        engine = realtime.RealtimeEngine(behaviour.model)
        served = openai_double.SimulatedEngine(engine, openai_double.Identity(model="demo", profile="test"))

        @web.middleware
        async def count(request, handler):
            if request.method != "POST":
                return await handler(request)
            seen.calls += 1
            if behaviour.error_every and seen.calls % behaviour.error_every == 0:
                seen.failed += 1
                return web.json_response({"error": {"message": "out of luck"}}, status=500)
            seen.running += 1
            try:
                return await handler(request)
            finally:
                seen.running -= 1

        served.app.middlewares.append(count)
        runner = web.AppRunner(served.app, access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_S)
        stepping = asyncio.get_running_loop().create_task(engine.run())
        await runner.setup()
        try:
            await web.TCPSite(runner, address, 8000).start()
            self._ready[address] = pod["metadata"]["labels"]["tidegate.dev/node-pool"]
            yield
        finally:
            await runner.cleanup()
            stepping.cancel()

    @contextlib.asynccontextmanager
    async def _gateway(self, pod, address):
        body = await self.cluster.ask("GET", f"/api/v1/namespaces/{self.namespace}/configmaps/chat-gateway")
        rendered = yaml.safe_load(body["data"]["gateway.yaml"])
        own = dict.fromkeys(("host", "adminHost", "metricsHost"), address)
        listen = {**rendered["listen"], **own, "grpcPort": None}
        async with app.serving(gateway_settings.from_mapping({**rendered, "listen": listen, "store": {}})) as bound:
            while not bound.gateway.directory.serves:
                await asyncio.sleep(LOOK_S)
            self.gateways[address] = bound
            yield

    async def _report(self, pod, address, *, ready):
        """The status of the pod as a kubelet writes it."""
        state = {"running": {}} if ready else {"waiting": {"reason": "ContainerCreating"}}
        conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {
            "phase": "Running" if ready else "Pending",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": name, "status": str(value), "lastTransitionTime": now} for name, value in conditions.items()
            ],
            "containerStatuses": [
                {"name": item["name"], "image": item["image"], "imageID": "", "ready": ready, "restartCount": 0}
                | {"state": state}
                for item in pod["spec"]["containers"]
            ],
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        await self.cluster.ask("PATCH", path, {"status": status}, content_type=MERGE)


class Load:
    """Clients whose calls are counted if they do not get a whole answer. Some have long streams, which outlast the preStop
    hook of an engine."""

    def __init__(self, node, session):
        self._node = node
        self._session = session
        self.served = 0
        self.failures = Counter()
        self._numbers = itertools.count()
        """Of the prompts, so that no two begin alike and each is computed."""

    async def run(self, *, clients=9, pause_s=0.3):
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(number, pause_s))

    async def _client(self, number, pause_s):
        for turn in itertools.count():
            gateways = sorted(self._node.gateways)
            if gateways:
                await self._call(
                    gateways[(number + turn) % len(gateways)],
                    stream=turn % 4 != 3,
                    tokens=LONG if number % 3 == 0 else SHORT,
                )
            await asyncio.sleep(pause_s)

    async def _call(self, address, *, stream, tokens):
        prompt = f"{next(self._numbers)} " + "tide " * 100
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "stream": stream}
        try:
            async with self._session.post(f"http://{address}:8000/v1/completions", json=body) as answer:
                text = await answer.text()
                whole = text.endswith("data: [DONE]\n\n") and '"error"' not in text if stream else "choices" in text
                if answer.status == 200 and whole:
                    self.served += 1
                else:
                    self.failures[f"{answer.status} {text[-200:]}"] += 1
        except OSError as error:
            self.failures[repr(error)] += 1


def manifest():
    """The Node, which takes only pods that tolerate it."""
    capacity = {"cpu": "64", "memory": "64Gi", "pods": "100"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NAME, "labels": {LABEL: NAME}},
        "spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]},
        "status": {"allocatable": capacity, "capacity": capacity},
    }
