"""A canary on the real API server: decisions reach the Deployments and the gateways, and the status and events say why."""

import asyncio
import contextlib
import datetime
import json
import math

import pytest

import operator_doubles
from tidegate_operator import pool_canary, reconcile
from tidegate_policy.rollout.side_by_side import Service, Times

CANARY = {"steps": [{"weight": 5, "duration": "1m"}, {"weight": 20, "duration": "1m"}], "minCalls": 50}


def service(calls, *, errors=0, ttft_s=0.2):
    return Service(calls=calls, errors=errors, ttft=Times(count=calls, log_sum=calls * math.log(ttft_s)))


class Pool:
    """A pool, its gateways, and the operator's two parts that matter here."""

    def __init__(self, cluster, kubectl, namespace, rules):
        self.cluster, self.kubectl, self.namespace, self.rules = cluster, kubectl, namespace, rules
        self.now = datetime.datetime.now(datetime.UTC)
        self.gateways = operator_doubles.FakeAdmin()
        self.restart()

    def restart(self):
        """Another process of the operator takes over."""
        self.writing = operator_doubles.MortalCluster(self.cluster, after=1000)
        self.canaries = pool_canary.PoolCanary(
            self.writing, self.rules, reads=self.cluster, admin_of=lambda *_: self.gateways, clock=lambda: self.now
        )

    async def observe(self, *, seconds=1):
        self.now += datetime.timedelta(seconds=seconds)
        period = await self.canaries.test((self.namespace, "chat"))
        await reconcile.reconcile(self.cluster, self.namespace, "chat", rules=self.rules, now=self.now)
        return period

    async def edit(self, **spec):
        self.kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        await self.reconcile()

    async def reconcile(self, times=1):
        for _ in range(times):
            await reconcile.reconcile(self.cluster, self.namespace, "chat", rules=self.rules, now=self.now)

    def serve(self, calls=100, **new):
        """The gateways have sent calls to all engines, and the new ones served as `new` says."""
        for name, is_new in self.engines().items():
            more = service(calls, **(new if is_new else {}))
            self.gateways.engines[name] = self.gateways.engines.get(name, Service()) + more

    def pods(self):
        found = json.loads(self.kubectl("get", "pods", "-l", "app.kubernetes.io/component=engine", "-o", "json"))
        return [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]

    def engines(self, image="v2"):
        """Whether each ready engine has the image."""
        return {
            f"{pod['status']['podIP']}:8000": pod["spec"]["containers"][0]["image"] == image
            for pod in self.pods()
            if pod["status"].get("podIP")
        }

    async def has_new_engine(self):
        """Waits for the first engine of the new revision. The controllers may not have told all of the old ones yet when
        the edit comes, so it is looked at again, as the operator does after their events."""
        async with asyncio.timeout(120):
            while len(self.new()) != 1:
                await asyncio.sleep(0.1)
                await self.reconcile()

    def new(self):
        return {name for name, is_new in self.engines().items() if is_new}

    @property
    def status(self):
        return json.loads(self.kubectl("get", "spool/chat", "-o", "json"))["status"]

    def condition(self, name):
        (found,) = [item for item in self.status["conditions"] if item["type"] == name]
        return found


@pytest.fixture
def started(cluster, kubectl, namespace, rules):
    @contextlib.asynccontextmanager
    async def make(replicas=3, **rollout):
        body = operator_doubles.pool(
            engine={"kind": "sim", "image": "v1"},
            nodePools=[{"name": "a", "replicas": replicas}],
            gateway={"replicas": 1},
            rollout={"canary": CANARY, **rollout},
        )
        kubectl("create", "-f", "-", body=body)
        pool = Pool(cluster, kubectl, namespace, rules)
        await pool.reconcile()
        kubectl("wait", "deployments", "--all", "--for=condition=Available", "--timeout=120s")
        await pool.reconcile(2)
        yield pool

    return make


@pytest.fixture
def canary_of(started):
    @contextlib.asynccontextmanager
    async def make(**more):
        async with started(**more) as pool:
            await pool.edit(engine={"image": "v2"})
            await pool.has_new_engine()
            await pool.observe()  # the base of the counts, and the first step
            await pool.observe()
            yield pool

    return make


async def test_a_good_revision_goes_from_step_to_step_and_reaches_all_engines(canary_of, eventually):
    async with canary_of() as pool:
        assert pool.gateways.divided == (pool.new(), 5)
        stated = pool.status["rollout"]
        assert {key: stated[key] for key in ("nodePool", "phase", "step", "weight")} == {
            "nodePool": "a", "phase": "Testing", "step": 1, "weight": 5,
        }  # fmt: skip
        assert "step 1 of 2: at most 5% of the calls" in pool.condition("Progressing")["message"]
        assert pool.condition("Ready")["status"] == "False"
        pool.serve(49)
        await pool.observe(seconds=300)
        assert pool.status["rollout"]["step"] == 1, "too few calls"
        pool.serve(2)
        await pool.observe()
        assert (pool.status["rollout"]["step"], pool.gateways.divided) == (2, (pool.new(), 20))
        assert len(pool.new()) == 1
        pool.serve()
        await pool.observe(seconds=61)
        assert pool.status["rollout"]["phase"] == "Promoted"
        assert pool.gateways.divided[1] is None
        eventually(lambda: list(pool.engines().values()) == [True] * 3)
        pool.kubectl("rollout", "status", "deployment/chat-engine-a", "--timeout=120s")
        await pool.reconcile(2)
        assert await pool.observe() is None
        assert "rollout" not in pool.status
        assert pool.condition("Ready")["status"] == "True"
        told = pool.kubectl("events", "--for", "servingpool/chat")
        for reason in ("CanaryStep", "CanaryPromoted"):
            assert reason in told


@pytest.mark.parametrize(
    ("new", "sentence"),
    [({"errors": 5}, "5 of 100 calls failed at the new engines"), ({"ttft_s": 0.6}, "3.00 times as long")],
)
async def test_a_bad_revision_is_taken_back_and_the_condition_and_the_event_say_why(
    canary_of, eventually, new, sentence
):
    async with canary_of() as pool:
        pool.serve(100, **new)
        engine = pool.new()
        await pool.observe()
        assert pool.status["rollout"]["phase"] == "Failed"
        assert pool.gateways.divided == (engine, 0)
        eventually(lambda: list(pool.engines().values()) == [False] * 3)
        await pool.reconcile(2)
        degraded = pool.condition("Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "RolledBack")
        assert degraded["message"].startswith("chat-engine-a failed the test of the new spec")
        assert sentence in degraded["message"]
        assert sentence in pool.kubectl("events", "--for", "servingpool/chat")
        assert await pool.observe() is None
        assert "rollout" not in pool.status
        await pool.edit(engine={"image": "v1"})
        await pool.reconcile()
        assert pool.condition("Degraded")["status"] == "False"
        await pool.edit(engine={"image": "v2"})  # the same revision is tested anew
        eventually(lambda: len(pool.new()) == 1)
        await pool.observe()
        assert pool.status["rollout"]["phase"] == "Testing"


async def test_a_canary_that_crashes_is_taken_back(canary_of, eventually):
    async with canary_of() as pool:
        (name,) = [pod["metadata"]["name"] for pod in pool.pods() if pod["spec"]["containers"][0]["image"] == "v2"]
        ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
        status = {"name": "engine", "restartCount": 1, "image": "v2", "imageID": "", "ready": True, "lastState": ended}
        pool.kubectl("patch", f"pod/{name}", "--subresource=status", "--type=merge", "-p", json.dumps(
            {"status": {"containerStatuses": [status]}}
        ))  # fmt: skip
        await pool.observe()
        assert pool.status["rollout"]["phase"] == "Failed"
        eventually(lambda: list(pool.engines().values()) == [False] * 3)
        await pool.reconcile()
        assert (
            f"{name}: the engine ended after it had served (OOMKilled, exit code 137)"
            in (pool.condition("Degraded")["message"])
        )


async def test_a_new_operator_goes_on_with_the_step_of_its_predecessor(canary_of):
    async with canary_of() as pool:
        pool.serve()
        await pool.observe(seconds=61)
        before = pool.status["rollout"]
        assert before["step"] == 2
        pool.restart()
        await pool.observe()
        assert pool.status["rollout"] == before
        pool.serve()
        await pool.observe(seconds=61)
        assert pool.status["rollout"]["phase"] == "Promoted"


async def test_while_nothing_is_decided_nothing_is_written(canary_of):
    async with canary_of() as pool:
        writes = pool.writing.writes
        for _ in range(4):
            pool.serve(10)
            await pool.observe()
        assert pool.writing.writes == writes


async def test_a_pause_stops_the_steps_and_an_undone_edit_ends_the_canary(canary_of, eventually):
    async with canary_of() as pool:
        await pool.edit(rollout={"paused": True})
        pool.serve()
        await pool.observe(seconds=600)
        assert pool.status["rollout"]["step"] == 1
        assert "paused" in pool.condition("Progressing")["message"]
        await pool.edit(engine={"image": "v1"})
        eventually(lambda: list(pool.engines().values()) == [False] * 3)
        assert await pool.observe() is None
        assert pool.gateways.divided[1] is None
        assert "rollout" not in pool.status


async def test_the_only_engine_of_a_pool_is_replaced_after_its_test(canary_of, eventually):
    async with canary_of(replicas=1) as pool:
        assert len(pool.engines()) == 2
        pool.serve()
        await pool.observe(seconds=61)
        pool.serve()
        await pool.observe(seconds=61)
        eventually(lambda: list(pool.engines().values()) == [True])


def test_steps_with_falling_weights_are_refused_by_the_api_server(kubectl):
    for canary, sentence in (
        ({"steps": [{"weight": 20, "duration": "1m"}, {"weight": 5, "duration": "1m"}]}, "order of their weights"),
        ({"steps": [{"weight": 100, "duration": "1m"}]}, "less than or equal to 99"),
        ({"steps": []}, "at least 1 items"),
        ({"steps": [{"weight": 5, "duration": "soon"}]}, "write a duration"),
    ):
        body = operator_doubles.pool(rollout={"canary": canary})
        assert sentence in kubectl("create", "-f", "-", body=body, check=False)
