"""Changes of the engines under load, with the operator's process, real gateways and simulated engines: no call fails."""

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import pytest

import operator_doubles

from . import loopback_node

OLD, NEW = "engine:vllm-0.31", "engine:vllm-0.32"
CANARY = {
    "steps": [{"weight": 20, "duration": "2s"}, {"weight": 90, "duration": "2s"}],
    "minCalls": 40,
}
SLOW = dataclasses.replace(loopback_node.COST, prefill_s=3 * loopback_node.COST.prefill_s)
GOOD, FAILING = loopback_node.Behaviour(), loopback_node.Behaviour(error_every=20)


class Pool:
    """A pool under load."""

    def __init__(self, kubectl, node, load):
        self._kubectl, self.node, self.load = kubectl, node, load

    async def kubectl(self, *arguments):
        return await asyncio.to_thread(self._kubectl, *arguments)

    async def edit(self, image):
        patch = json.dumps({"spec": {"engine": {"image": image}}})
        await self.kubectl("patch", "spool/chat", "--type=merge", "-p", patch)

    async def body(self):
        return json.loads(await self.kubectl("get", "spool/chat", "-o", "json"))

    async def until(self, check, *, within_s=180):
        async with asyncio.timeout(within_s):
            while not check(await self.body()):
                await asyncio.sleep(0.5)

    async def more_calls(self, count=60):
        wanted = self.load.served + count
        while self.load.served < wanted:
            await asyncio.sleep(0.1)

    def images(self):
        """Of the engines that the name server names."""
        return sorted(self.node.engines[address].image for address in self.node._ready)


def condition(body, name):
    return next((item for item in body.get("status", {}).get("conditions", ()) if item["type"] == name), {})


def is_settled(body):
    return condition(body, "Ready").get("status") == "True" and "rollout" not in body["status"]


@pytest.fixture
def under_load(cluster, plane, namespace, kubectl, operator, monkeypatch):
    @contextlib.asynccontextmanager
    async def make(behaviours, *, replicas=3, **spec):
        plane.kubectl("create", "-f", "-", stdin=json.dumps(loopback_node.manifest()))
        node = loopback_node.LoopbackNode(cluster, namespace, behaviours)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", node.getaddrinfo)
        body = operator_doubles.pool(
            engine={"kind": "sim", "image": OLD, **loopback_node.PLACEMENT},
            nodePools=[{"name": "a", "replicas": replicas}],
            gateway={"replicas": 2, **loopback_node.PLACEMENT},
            **spec,
        )
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                load = loopback_node.Load(node, session)
                tasks = [asyncio.create_task(node.run())]
                try:
                    pool = Pool(kubectl, node, load)
                    await asyncio.to_thread(kubectl, "create", "-f", "-", body=body)
                    await pool.until(is_settled)
                    tasks.append(asyncio.create_task(load.run()))
                    await pool.more_calls()
                    yield pool
                    await pool.more_calls()
                    assert not load.failures
                finally:
                    await asyncio.to_thread(operator.stop)
                    for task in reversed(tasks):
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            plane.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", check=False)
            plane.kubectl("delete", "node", loopback_node.NAME, check=False)

    return make


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (FAILING, "calls failed at the new engines"),
        (loopback_node.Behaviour(model=SLOW), "times as long, at most 1.5 is allowed"),
    ],
)
async def test_a_canary_that_fails_or_is_slow_is_taken_back_and_no_call_fails(under_load, bad, sentence):
    async with under_load({OLD: GOOD, NEW: bad}, rollout={"canary": CANARY}) as pool:
        await pool.edit(NEW)
        await pool.until(lambda body: condition(body, "Degraded").get("reason") == "RolledBack")
        assert sentence in condition(await pool.body(), "Degraded")["message"]
        assert sentence in await pool.kubectl("events", "--for", "servingpool/chat")
        tried = [engine for engine in pool.node.engines.values() if engine.image == NEW]
        assert len(tried) == 1
        assert tried[0].calls > 0
        await pool.until(lambda body: "rollout" not in body["status"] and pool.images() == [OLD] * 3)
        assert not pool.load.failures


@pytest.mark.timeout(600)
async def test_a_good_canary_gets_its_share_and_is_promoted_and_no_call_fails(under_load):
    async with under_load({OLD: GOOD, NEW: GOOD}, rollout={"canary": CANARY}) as pool:
        weights = set()

        def is_done(body):
            weights.add(body["status"].get("rollout", {}).get("weight"))
            return is_settled(body) and pool.images() == [NEW] * 3

        await pool.edit(NEW)
        await pool.until(is_done)
        assert {20, 25} <= weights, "one of four engines gets at most a quarter of the calls"
        assert not pool.load.failures


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replicas", [1, 3])
async def test_an_upgrade_of_the_engine_image_under_load_fails_no_call(under_load, replicas, capsys):
    async with under_load({OLD: GOOD, NEW: GOOD}, replicas=replicas) as pool:
        await pool.edit(NEW)
        await pool.until(lambda body: is_settled(body) and pool.images() == [NEW] * replicas)
        await pool.more_calls()
        old = [engine for engine in pool.node.engines.values() if engine.image == OLD]
        assert len(old) == replicas
        assert not pool.load.failures
        with capsys.disabled():
            drained = sum(engine.drained for engine in old)
            print(f"\n{pool.load.served} calls, 0 failed; {drained} ended in the {replicas} engines that were replaced")
