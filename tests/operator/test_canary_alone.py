"""A canary without an API server: what its gateways are told. Time is virtual; no gateway is reached."""

import asyncio
import datetime
import json

import pytest

import operator_doubles
from tidegate_operator import canary_hold, pool_canary, spec
from tidegate_operator.cluster import watch_cache
from tidegate_policy.rollout import canary
from tidegate_policy.rollout.side_by_side import Service

from . import conftest, test_steering_alone
from .test_steering_alone import KEY, SPEC

(NODE_POOL, *_) = (item["name"] for item in SPEC["nodePools"])
OLD, NEW = "10.0.1.1", "10.0.1.2"
CANARY = {"steps": [{"weight": 5, "duration": "1m"}]}


class Division(operator_doubles.FakeAdmin):
    """Counts how often the calls were divided."""

    def __init__(self):
        super().__init__()
        self.times = 0

    async def divide(self, addresses, engines, weight):
        await super().divide(addresses, engines, weight)
        self.times += 1


def pool(**policy):
    """A pool with a canary."""
    body = test_steering_alone.pool()
    body["spec"] = {**body["spec"], "rollout": {"canary": CANARY}, "policy": {**body["spec"]["policy"], **policy}}
    return body


def deployment(*, replicas=1, served="old"):
    """The Deployment of the engines, which have the revision `new`. All of them last served with `served`."""
    labels = {"tidegate.dev/pool": "chat", "tidegate.dev/node-pool": NODE_POOL}
    notes = {canary_hold.REVISION: "new", canary_hold.SERVED: json.dumps({"revision": served})}
    metadata = {"namespace": "prod", "name": "chat-engine", "uid": "d", "labels": labels, "annotations": notes}
    metadata["ownerReferences"] = [{"uid": "chat", "controller": True}]
    return {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}}


def engine(revision, address):
    body = test_steering_alone.pod("chat", "engine", address, **{"tidegate.dev/node-pool": NODE_POOL})
    body["metadata"] |= {"name": revision, "uid": revision, "annotations": {canary_hold.REVISION: revision}}
    return body


def loading():
    """An engine of the new revision that is not ready yet."""
    body = engine("new", NEW)
    body["status"] = {"podIP": NEW}
    return body


def watched():
    cache = watch_cache.WatchCache()
    cache.on_pool("ADDED", pool())
    cache.on_child("ADDED", deployment())
    for pod in (test_steering_alone.pod("chat", "gateway", "10.0.0.1"), engine("old", OLD), engine("new", NEW)):
        cache.on_pod("ADDED", pod)
    return cache


def canaries_of(cache, admin, *, clock=test_steering_alone.clock, monotonic=lambda: None):
    api = test_steering_alone.Api(cache)
    return pool_canary.PoolCanary(
        api, conftest.RULES, reads=cache, admin_of=lambda *_: admin, clock=clock, monotonic=monotonic
    )


def test_the_division_of_the_calls_is_renewed_while_the_spec_cannot_be_built(in_virtual_time):
    """Gateways forget it after five minutes, and the new engine would get a full share without having been tested."""

    async def run():
        cache, admin = watched(), Division()
        canaries = canaries_of(cache, admin)
        await canaries.test(KEY)
        divided = admin.divided
        assert divided == ({f"{NEW}:8000"}, 5)
        stated = (await cache.pool(*KEY))["status"]
        cache.on_pool("MODIFIED", {**pool(allow=["unknown"]), "status": stated})
        admin.times = 0
        assert await canaries.test(KEY) == pool_canary.PERIOD_S
        assert (admin.times, admin.divided) == (1, divided)
        assert (await cache.pool(*KEY))["status"] == stated

    in_virtual_time(run())


def test_a_spec_is_parsed_once_while_it_stays_and_forgotten_with_its_pool(in_virtual_time, monkeypatch):
    parse, parsed = spec.parse, []
    monkeypatch.setattr(spec, "parse", lambda body, *rest: parsed.append(body) or parse(body, *rest))

    async def run():
        cache = watched()
        canaries = canaries_of(cache, Division())
        for _ in range(5):
            assert await canaries.test(KEY) == pool_canary.PERIOD_S
        assert len(parsed) == 2, "the first observation writes the status, and so makes another body"
        cache.on_pool("DELETED", await cache.pool(*KEY))
        assert await canaries.test(KEY) is None
        assert not canaries._parsed

    in_virtual_time(run())


def test_a_wall_clock_that_steps_neither_fails_an_engine_that_loads_nor_ends_a_step(in_virtual_time):
    async def run():
        wall_s = passed_s = 0.0
        cache = watched()
        cache.on_pod("MODIFIED", loading())
        canaries = canaries_of(
            cache,
            Division(),
            clock=lambda: test_steering_alone.START + datetime.timedelta(seconds=wall_s),
            monotonic=lambda: passed_s,
        )

        async def observe(times=1):
            nonlocal wall_s, passed_s
            for _ in range(times):
                wall_s, passed_s = wall_s + 2.0, passed_s + 2.0
                assert await canaries.test(KEY) == pool_canary.PERIOD_S
            return (await cache.pool(*KEY))["status"]["rollout"]

        for step_s in (7200.0, -7200.0):
            await observe(3)
            wall_s += step_s
            assert (await observe(3))["phase"] == "Starting"
        wall_s += 7200.0
        assert (await observe(2000))["phase"] == "Failed", "it has not served within its time"

    in_virtual_time(run())


@pytest.mark.parametrize("is_new", [False, True], ids=["the same operator", "a new operator each time"])
def test_an_engine_that_is_ready_and_unready_by_turns_fails_after_some_times(in_virtual_time, is_new):
    async def run():
        cache, admin = watched(), Division()
        canaries = canaries_of(cache, admin)
        for times in range(1, canary.MOST_STOPS + 1):
            cache.on_pod("MODIFIED", engine("new", NEW))
            await canaries.test(KEY)
            cache.on_pod("MODIFIED", loading())
            await canaries.test(KEY)
            found = (await cache.pool(*KEY))["status"]["rollout"]
            assert found["stops" if found["phase"] == "Starting" else "phase"] in (times, "Failed")
            if is_new:
                canaries = canaries_of(cache, admin)
        assert found["phase"] == "Failed"
        assert "stopped serving 5 times (step 1 of 1)" in found["reason"]

    in_virtual_time(run())


def test_an_engine_that_is_evicted_again_and_again_is_no_fault_of_its_revision(in_virtual_time):
    async def run():
        cache = watched()
        cache.on_pod("DELETED", engine("new", NEW))
        canaries = canaries_of(cache, Division())
        for times in range(2 * canary.MOST_STOPS):
            body = engine("new", NEW)
            body["metadata"] |= {"name": f"new-{times}", "uid": f"new-{times}"}
            cache.on_pod("ADDED", body)
            await canaries.test(KEY)
            assert (await cache.pool(*KEY))["status"]["rollout"]["phase"] == "Testing"
            cache.on_pod("DELETED", body)
            await canaries.test(KEY)
            found = (await cache.pool(*KEY))["status"]["rollout"]
            assert (found["phase"], found.get("stops", 0)) == ("Starting", 0)

    in_virtual_time(run())


def test_a_step_goes_on_with_the_calls_that_it_has_had_when_its_engine_serves_again(in_virtual_time):
    async def run():
        cache, admin = watched(), Division()
        canaries = canaries_of(cache, admin)
        served = {f"{OLD}:8000": Service(calls=0), f"{NEW}:8000": Service(calls=0)}
        admin.engines = served
        await canaries.test(KEY)
        await canaries.test(KEY)
        admin.engines = dict.fromkeys(served, Service(calls=60))
        await canaries.test(KEY)
        cache.on_pod("MODIFIED", loading())
        await canaries.test(KEY)
        cache.on_pod("MODIFIED", engine("new", NEW))
        await canaries.test(KEY)
        admin.engines = dict.fromkeys(served, Service(calls=110))
        await asyncio.sleep(61)
        await canaries.test(KEY)
        assert (await cache.pool(*KEY))["status"]["rollout"]["phase"] == "Promoted", "100 calls in all"

    in_virtual_time(run())


def test_a_promoted_revision_is_not_tested_again_when_its_node_pool_comes_back_from_zero(in_virtual_time):
    async def run():
        cache, admin = watched(), Division()
        canaries = canaries_of(cache, admin)
        admin.engines = {f"{OLD}:8000": Service(), f"{NEW}:8000": Service()}
        await canaries.test(KEY)
        await canaries.test(KEY)
        admin.engines = dict.fromkeys(admin.engines, Service(calls=110))
        await asyncio.sleep(61)
        for replicas in (1, 0, 1):
            cache.on_child("MODIFIED", deployment(replicas=replicas))
            assert (await canaries.test(KEY) is None) == (replicas == 0)
            assert (await cache.pool(*KEY))["status"]["rollout"]["phase"] == "Promoted"
            assert admin.divided[1] is None
        cache.on_child("MODIFIED", deployment(served="new"))
        assert await canaries.test(KEY) is None
        assert "rollout" not in (await cache.pool(*KEY))["status"]

    in_virtual_time(run())
