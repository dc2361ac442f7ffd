"""The pool's own autoscaler without an API server: what its gateways, pods and clocks tell it. Time is virtual."""

import datetime

import pytest

import operator_doubles
from tidegate_operator import canary_hold, pool_scaling
from tidegate_operator.cluster import watch_cache
from tidegate_operator.render import child_metadata
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import call_load

from . import conftest, test_steering_alone
from .test_steering_alone import KEY, SPEC, START

NODE_POOL = {**SPEC["nodePools"][0], "scaledBy": "autoscaler", "replicas": 3, "maxReplicas": 8}
ONE = call_load.of_calls([Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=200)])
GATEWAYS = ("10.0.0.1", "10.0.0.2")
AUTOSCALING = {"stabilizationWindow": "60s", "idleAfter": "120s", "schedulingTimeout": "5m"}


class Api(test_steering_alone.Api):
    async def autoscalers(self, namespace):
        return []


class Scaled:
    """A pool in the watch cache, its gateways, and its autoscaler."""

    def __init__(self, engines=3, **node_pool):
        self.cache, self.gateways = watch_cache.WatchCache(), operator_doubles.FakeAdmin()
        self.api = Api(self.cache)
        self.wall_s = self.passed_s = 0.0
        self.offered = call_load.NOTHING
        body = test_steering_alone.pool()
        body["spec"] |= {"nodePools": [{**NODE_POOL, **node_pool}], "autoscaling": AUTOSCALING}
        self.cache.on_pool("ADDED", body)
        for address in GATEWAYS:
            gateway = test_steering_alone.pod("chat", "gateway", address)
            gateway["metadata"] |= {"name": address, "uid": address}
            self.cache.on_pod("ADDED", gateway)
        self.deployment(engines)
        for index in range(engines):
            self.engine(f"old-{index}")
        self.scaling = self.made()

    def made(self):
        return pool_scaling.PoolScaling(
            self.api,
            conftest.RULES,
            reads=self.cache,
            admin_of=lambda *_: self.gateways,
            clock=lambda: START + datetime.timedelta(seconds=self.wall_s),
            monotonic=lambda: self.passed_s,
        )

    async def edit(self, **fields):
        """The spec has these fields too."""
        body = await self.cache.pool(*KEY)
        self.cache.on_pool("MODIFIED", {**body, "spec": {**body["spec"], **fields}})

    def deployment(self, replicas):
        labels = {"tidegate.dev/pool": "chat", "tidegate.dev/node-pool": "a100"}
        metadata = {"namespace": "prod", "name": "chat-engine-a100", "uid": "d", "labels": labels}
        metadata["ownerReferences"] = [{"uid": "chat", "controller": True}]
        self.cache.on_child("MODIFIED", {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}})

    def engine(self, name, revision="old", *, stuck_since_s=None):
        """A pod of an engine, ready unless no node takes it since that instant."""
        body = test_steering_alone.pod("chat", "engine", "10.0.1.1", **{"tidegate.dev/node-pool": "a100"})
        body["metadata"] |= {"name": name, "uid": name, "annotations": {canary_hold.REVISION: revision}}
        body["metadata"]["creationTimestamp"] = START.isoformat()
        if stuck_since_s is not None:
            since = (START + datetime.timedelta(seconds=stuck_since_s)).isoformat()
            body["status"] = {"conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node",
                "lastTransitionTime": since,
            }]}  # fmt: skip
        self.cache.on_pod("MODIFIED", body)

    def gone(self, name):
        """The pod of an engine exists no more."""
        metadata = {"namespace": "prod", "name": name, "uid": name, "labels": {"tidegate.dev/pool": "chat"}}
        self.cache.on_pod("DELETED", {"metadata": metadata})

    async def observe(self, calls_a_second=0.0, *, waiting=0.0, times=1):
        for _ in range(times):
            self.wall_s += pool_scaling.PERIOD_S
            self.passed_s += pool_scaling.PERIOD_S
            self.offered += ONE.times(calls_a_second * pool_scaling.PERIOD_S)
            self.gateways.take_calls(self.offered, ONE.times(waiting))
            assert await self.scaling.scale(KEY) == pool_scaling.PERIOD_S

    async def status(self):
        return (await self.cache.pool(*KEY))["status"]

    async def wanted(self):
        (found,) = (await self.status())["nodePools"]
        return found["wanted"]

    async def condition(self):
        (found,) = [item for item in (await self.status())["conditions"] if item["type"] == "Autoscaling"]
        return found


@pytest.mark.parametrize("replaces", [False, True], ids=["beside", "in place of an old one"])
def test_pods_of_an_edit_that_no_node_can_hold_take_no_serving_engine_away(in_virtual_time, replaces):
    async def run():
        scaled = Scaled(minReplicas=3)
        scaled.engine("old-2" if replaces else "new", "new", stuck_since_s=0.0)
        await scaled.observe(0.1, times=40)
        assert await scaled.wanted() == 3
        assert (await scaled.condition())["reason"] == "Scaling"

    in_virtual_time(run())


def test_of_the_stuck_pods_of_a_serving_revision_the_surplus_of_a_canary_does_not_count(in_virtual_time):
    """Five engines are wanted, and a canary has a sixth pod: four nodes are enough for three old ones and the canary."""

    async def run():
        scaled = Scaled(minReplicas=5)
        scaled.engine("new", "new")
        scaled.deployment(5)
        for name in ("old-3", "old-4"):
            scaled.engine(name, stuck_since_s=0.0)
        await scaled.observe(0.1, times=31)
        assert await scaled.wanted() == 4

    in_virtual_time(run())


def test_an_answer_or_two_that_a_gateway_misses_neither_tell_of_silence_nor_begin_the_window_anew(in_virtual_time):
    async def run():
        scaled = Scaled()
        await scaled.observe(4.0, times=12)
        before = await scaled.wanted()
        for turn in range(60):
            scaled.gateways.silent = {f"{GATEWAYS[0]}:{child_metadata.ADMIN_PORT}"} if turn % 3 < 2 else set()
            await scaled.observe(0.0)
            assert (await scaled.condition())["reason"] == "Scaling"
        assert await scaled.wanted() < before

    in_virtual_time(run())


def test_a_stuck_engine_is_seen_while_an_edit_adds_a_pod(in_virtual_time):
    """The surplus of a Deployment that changes is the new pod, which does not count as stuck."""

    async def run():
        scaled = Scaled(minReplicas=3)
        scaled.engine("old-2", stuck_since_s=0.0)
        scaled.engine("new", "new", stuck_since_s=0.0)
        await scaled.observe(0.1, times=31)
        assert (await scaled.condition())["reason"] == "Unschedulable"

    in_virtual_time(run())


def test_while_one_of_two_gateways_is_silent_no_engine_goes_and_its_return_is_no_burst(in_virtual_time):
    async def run():
        scaled = Scaled()
        await scaled.observe(4.0, times=12)
        before = await scaled.wanted()
        scaled.gateways.silent = {f"{GATEWAYS[0]}:{child_metadata.ADMIN_PORT}"}
        await scaled.observe(0.0, times=30)
        assert await scaled.wanted() == before, "the silent one may have calls"
        stated = await scaled.condition()
        assert (stated["status"], stated["reason"]) == ("False", "GatewaysPartlySilent")
        assert "1 of 2 gateways report no load, for example 10.0.0.1:" in stated["message"]
        await scaled.observe(4.0, times=60)
        assert await scaled.wanted() == before
        scaled.gateways.silent = set()
        await scaled.observe(4.0, times=3)
        assert await scaled.wanted() == before
        assert (await scaled.condition())["reason"] == "Scaling"
        await scaled.observe(0.0, times=30)
        assert await scaled.wanted() == 0

    in_virtual_time(run())


@pytest.mark.parametrize("is_new", [False, True], ids=["the same operator", "a new operator"])
def test_while_the_spec_is_invalid_the_condition_is_unknown_and_the_decision_stays(in_virtual_time, is_new):
    async def run():
        scaled = Scaled()
        await scaled.observe(4.0, times=12)
        before = await scaled.status()
        valid = (await scaled.cache.pool(*KEY))["spec"]["policy"]
        await scaled.edit(policy={**valid, "allow": ["unknown"]})
        if is_new:
            scaled.scaling = scaled.made()
        assert await scaled.scaling.scale(KEY) == pool_scaling.WAIT_S
        stated, after = await scaled.condition(), await scaled.status()
        assert (stated["status"], stated["reason"]) == ("Unknown", "InvalidSpec")
        assert {key: after[key] for key in ("autoscaling", "nodePools")} == {
            key: before[key] for key in ("autoscaling", "nodePools")
        }
        writes = scaled.api.writes
        await scaled.scaling.scale(KEY)
        assert scaled.api.writes == writes
        await scaled.edit(policy=valid)
        await scaled.observe(4.0)
        assert (await scaled.condition())["reason"] == "Scaling"

    in_virtual_time(run())


def test_a_pool_that_was_never_scaled_gets_no_condition_for_its_invalid_spec(in_virtual_time):
    async def run():
        scaled = Scaled()
        await scaled.edit(policy={**SPEC["policy"], "allow": ["unknown"]})
        assert await scaled.scaling.scale(KEY) == pool_scaling.WAIT_S
        assert scaled.api.writes == 0

    in_virtual_time(run())


def test_the_first_engine_that_finds_no_node_stays_wanted_while_calls_wait_and_the_condition_says_why(in_virtual_time):
    async def run():
        scaled = Scaled(engines=0)
        await scaled.observe(waiting=1)
        assert await scaled.wanted() == 1
        scaled.deployment(1)
        scaled.engine("first", stuck_since_s=10.0)
        await scaled.observe(waiting=1, times=100)
        assert await scaled.wanted() == 1
        stated = await scaled.condition()
        assert (stated["status"], stated["reason"]) == ("False", "Unschedulable")
        assert "a100: first: Unschedulable: no node" in stated["message"]
        await scaled.observe(times=13)
        assert await scaled.wanted() == 0, "no call waits any more"
        scaled.deployment(0)
        scaled.gone("first")
        await scaled.observe(times=3)
        assert (await scaled.condition())["reason"] == "Unschedulable"
        await scaled.observe(times=120)
        assert (await scaled.condition())["reason"] == "Scaling"

    in_virtual_time(run())


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, -7200.0], ids=str)
def test_a_wall_clock_that_steps_changes_no_engine_and_moves_the_instants_of_the_status(in_virtual_time, step_s):
    async def run():
        scaled = Scaled(minReplicas=1)
        await scaled.observe(4.0, times=60)
        before, wanted = (await scaled.status())["autoscaling"], await scaled.wanted()
        assert 1 < wanted < 8
        assert before["changes"]
        scaled.wall_s += step_s
        await scaled.observe(4.0, times=60)
        assert await scaled.wanted() == wanted
        moved = datetime.timedelta(seconds=step_s)
        for one, other in zip(before["changes"], (await scaled.status())["autoscaling"]["changes"], strict=True):
            assert datetime.datetime.fromisoformat(other) - datetime.datetime.fromisoformat(one) == moved
        scaled.wall_s += step_s
        await scaled.observe(times=10)
        assert await scaled.wanted() == wanted, "no call for 100 s, and 120 s make the pool idle"
        await scaled.observe(times=5)
        assert await scaled.wanted() == 1

    in_virtual_time(run())


def test_a_wall_clock_that_is_wrong_makes_no_pending_pod_old(in_virtual_time):
    async def run():
        scaled = Scaled(engines=0)
        scaled.wall_s += 600.0
        await scaled.observe(waiting=1)
        scaled.deployment(1)
        scaled.engine("first", stuck_since_s=10.0)
        await scaled.observe(waiting=1, times=30)
        assert (await scaled.condition())["reason"] == "Scaling"
        scaled.wall_s += 600.0
        await scaled.observe(waiting=1)
        assert (await scaled.condition())["reason"] == "Unschedulable", "it has waited for 300 s"

    in_virtual_time(run())


def test_after_the_silence_of_all_gateways_the_window_begins_anew(in_virtual_time):
    async def run():
        scaled = Scaled()
        await scaled.observe(4.0, times=12)
        await scaled.observe(0.0, times=3)
        before = await scaled.wanted()
        scaled.gateways.silent = {f"{address}:{child_metadata.ADMIN_PORT}" for address in GATEWAYS}
        await scaled.observe(0.0, times=90)
        assert (await scaled.condition())["reason"] == "GatewaysSilent"
        scaled.gateways.silent = set()
        for _ in range(3):
            await scaled.observe(0.0)
            assert await scaled.wanted() == before, "the gateways have just begun to count"

    in_virtual_time(run())
