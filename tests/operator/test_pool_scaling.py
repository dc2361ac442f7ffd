"""The pool's own autoscaler on the real API server: its decisions reach the Deployments, and the status says why."""

import contextlib
import datetime
import json

import pytest

import operator_doubles
from tidegate_operator import pool_scaling, reconcile
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import call_load

START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
PROFILE = "a100-70b-tp8"
ONE = call_load.of_calls([Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=200)])
OWN = {"scaledBy": "autoscaler", "replicas": 0, "maxReplicas": 6, "profile": PROFILE}
CPU = {"type": "Utilization", "averageUtilization": 80}
QUICK = {"stabilizationWindow": "60s", "idleAfter": "120s"}


class Scaled:
    """A pool, its gateways, and the operator's two parts that matter here."""

    def __init__(self, cluster, kubectl, namespace, rules):
        self.cluster, self.kubectl, self.namespace, self.rules = cluster, kubectl, namespace, rules
        self.now = datetime.datetime.now(datetime.UTC)
        self.gateways = operator_doubles.FakeAdmin()
        self.offered = call_load.NOTHING
        self.restart()

    def restart(self):
        """Another process of the operator takes over."""
        self.writing = operator_doubles.MortalCluster(self.cluster, after=1000)
        self.scaling = pool_scaling.PoolScaling(
            self.writing, self.rules, reads=self.cluster, admin_of=lambda *_: self.gateways, clock=lambda: self.now
        )

    async def observe(self, calls_a_second=0.0, *, waiting=0.0, times=1, met=0, ended=0):
        for _ in range(times):
            self.now += datetime.timedelta(seconds=pool_scaling.PERIOD_S)
            self.offered += ONE.times(calls_a_second * pool_scaling.PERIOD_S)
            self.gateways.take_calls(self.offered, ONE.times(waiting), met=met, ended=ended)
            assert await self.scaling.scale((self.namespace, "chat")) == pool_scaling.PERIOD_S
        await reconcile.reconcile(self.cluster, self.namespace, "chat", rules=self.rules, now=self.now)

    def replicas(self, node_pool="fast"):
        return int(self.kubectl("get", f"deployment/chat-engine-{node_pool}", "-o", "jsonpath={.spec.replicas}"))

    def unscheduled(self, node_pool):
        """Of each pod of the node pool, whether the scheduler has found no node for it."""
        pods = json.loads(self.kubectl("get", "pods", "-l", f"tidegate.dev/node-pool={node_pool}", "-o", "json"))
        conditions = [item.get("status", {}).get("conditions", ()) for item in pods["items"]]
        return [("PodScheduled", "False") in {(one["type"], one["status"]) for one in each} for each in conditions]

    @property
    def status(self):
        return json.loads(self.kubectl("get", "spool/chat", "-o", "json"))["status"]

    @property
    def condition(self):
        (found,) = [item for item in self.status["conditions"] if item["type"] == "Autoscaling"]
        return found


@pytest.fixture
def scaled(cluster, kubectl, namespace, rules):
    @contextlib.asynccontextmanager
    async def make(*node_pools, **spec):
        spec = {"autoscaling": QUICK, "gateway": {"replicas": 1}, **spec}
        body = operator_doubles.pool(nodePools=list(node_pools), **spec)
        kubectl("create", "-f", "-", body=body)
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        kubectl("wait", "deployment/chat-gateway", "--for=condition=Available", "--timeout=120s")
        yield Scaled(cluster, kubectl, namespace, rules)

    return make


async def test_a_pool_at_zero_starts_engines_for_waiting_calls_and_goes_back(scaled):
    async with scaled({"name": "fast", **OWN}) as pool:
        await pool.observe()
        assert pool.replicas() == 0
        await pool.observe(waiting=1)
        assert pool.replicas() == 1
        found = pool.status
        assert [(item["name"], item["wanted"]) for item in found["nodePools"]] == [("fast", 1)]
        assert "1 call waits" in found["autoscaling"]["reason"]
        assert pool.condition["status"] == "True"
        assert pool.condition["message"] == found["autoscaling"]["reason"]
        assert "fast from 0 to 1" in pool.kubectl("events", "--for", "servingpool/chat")
        pool.kubectl("wait", "deployment/chat-engine-fast", "--for=condition=Available", "--timeout=120s")
        await pool.observe(20.0, times=3)
        assert pool.replicas() > 3
        await pool.observe(times=30)
        assert pool.replicas() == 0
        assert pool.condition["message"].startswith("no call for 1")


async def test_the_status_is_written_only_when_a_decision_changes_it(scaled):
    async with scaled({"name": "fast", **OWN, "minReplicas": 1, "replicas": 1}) as pool:
        await pool.observe(0.5, times=2)
        writes = pool.writing.writes
        for rate in (0.5, 0.6, 0.4, 0.7):
            await pool.observe(rate)
        assert pool.writing.writes == writes


async def test_a_new_operator_keeps_the_engines_and_counts_the_changes_of_its_predecessor(scaled):
    async with scaled({"name": "fast", **OWN}) as pool:
        await pool.observe(20.0, times=3)
        before, replicas = pool.status["autoscaling"], pool.replicas()
        assert replicas > 1
        pool.restart()
        await pool.observe(20.0, times=2)
        assert pool.replicas() == replicas
        assert pool.status["autoscaling"]["changes"] == before["changes"] != []


async def test_without_an_answer_of_a_gateway_nothing_changes(scaled):
    async with scaled({"name": "fast", **OWN, "replicas": 2}) as pool:
        for _ in range(pool_scaling.MISSED):
            await pool.scaling.scale((pool.namespace, "chat"))
        await reconcile.reconcile(pool.cluster, pool.namespace, "chat", rules=pool.rules, now=pool.now)
        assert pool.replicas() == 2
        assert (pool.condition["status"], pool.condition["reason"]) == ("False", "GatewaysSilent")


@pytest.mark.parametrize(
    "target", [("apps/v1", "Deployment", "chat-engine-fast"), ("tidegate.dev/v1alpha1", "ServingPool", "chat")]
)
async def test_a_node_pool_that_an_hpa_scales_too_is_left_alone_with_a_condition(scaled, target):
    async with scaled({"name": "fast", **OWN, "replicas": 2}) as pool:
        api_version, kind, name = target
        pool.kubectl("create", "-f", "-", body={
            "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "rival"},
            "spec": {
                "scaleTargetRef": {"apiVersion": api_version, "kind": kind, "name": name}, "maxReplicas": 2,
                "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": CPU}}],
            },
        })  # fmt: skip
        for _ in range(pool_scaling.MISSED):
            await pool.scaling.scale((pool.namespace, "chat"))
        assert pool.condition["reason"] == "ScaledByAnother", "also while no gateway answers"
        await pool.observe(30.0, times=3)
        assert pool.replicas() == 2
        assert (pool.condition["status"], pool.condition["reason"]) == ("False", "ScaledByAnother")
        assert "HorizontalPodAutoscaler rival" in pool.condition["message"]
        assert "set scaledBy: external" in pool.condition["message"]
        assert "wanted" not in pool.status["nodePools"][0]
        pool.kubectl("delete", "hpa/rival")
        await pool.observe(30.0, times=6)
        assert pool.replicas() > 2
        assert pool.condition["reason"] == "Scaling"


async def test_a_node_pool_that_no_node_takes_is_named_and_another_one_takes_over(scaled, eventually):
    nowhere = {"name": "nowhere", **OWN, "accelerator": "NVIDIA-NOPE", "gpus": 1, "costWeight": "0.1"}
    async with scaled(nowhere, {"name": "fast", **OWN, "costWeight": 2}) as pool:
        await pool.observe(5.0, times=2)
        assert pool.replicas("nowhere") > 0
        assert pool.replicas("fast") == 0
        pool.kubectl(
            "wait",
            "pod",
            "-l",
            "tidegate.dev/node-pool=nowhere",
            "--for=condition=PodScheduled=false",
            "--timeout=120s",
        )
        await pool.observe(5.0)
        eventually(lambda: pool.unscheduled("nowhere") == [True] * pool.replicas("nowhere"))
        await pool.observe(5.0)
        pool.now += datetime.timedelta(seconds=301)
        await pool.observe(5.0)
        assert pool.replicas("nowhere") == 0
        assert pool.replicas("fast") > 0
        assert (pool.condition["status"], pool.condition["reason"]) == ("False", "Unschedulable")
        assert "nowhere" in pool.condition["message"]
        assert "Add nodes, raise the quota" in pool.condition["message"]


async def test_engines_that_a_quota_rejects_are_not_asked_for_again(scaled):
    async with scaled({"name": "fast", **OWN}) as pool:
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "full"},
            "spec": {"hard": {"pods": "0"}},
        }
        pool.kubectl("create", "-f", "-", body=quota)
        pool.kubectl("wait", "resourcequota/full", "--for=jsonpath={.status.hard.pods}=0", "--timeout=120s")
        await pool.observe(5.0, times=2)
        assert pool.replicas() > 0
        pool.kubectl("wait", "deployment/chat-engine-fast", "--for=condition=ReplicaFailure", "--timeout=120s")
        await pool.observe(5.0)
        pool.now += datetime.timedelta(seconds=301)
        await pool.observe(5.0)
        assert pool.replicas() == 1, "one is asked for again, because the pool would have none"
        assert (pool.condition["status"], pool.condition["reason"]) == ("False", "Unschedulable")
        assert "exceeded quota" in pool.condition["message"]


async def test_a_node_pool_that_is_no_longer_autoscaled_loses_the_decision(scaled, kubectl):
    async with scaled({"name": "fast", **OWN}) as pool:
        await pool.observe(20.0, times=3)
        assert pool.replicas() > 1
        kubectl(
            "replace",
            "-f",
            "-",
            body=operator_doubles.pool(nodePools=[{"name": "fast", "replicas": 1, "profile": PROFILE}]),
        )
        assert await pool.scaling.scale((pool.namespace, "chat")) == pool_scaling.WAIT_S
        for _ in range(2):  # the first one states the new total in spec.replicas
            await reconcile.reconcile(pool.cluster, pool.namespace, "chat", rules=pool.rules, now=pool.now)
        assert pool.replicas() == 1
        assert "autoscaling" not in pool.status
        assert "wanted" not in pool.status["nodePools"][0]
