"""Steering of pools without an API server: what it states of a pool without engines, what gateways tell it of the store,
and pools whose gateways do not answer. Time is virtual; no engine is reached."""

import asyncio
import collections
import contextlib
import copy
import datetime
import itertools
import json
import pathlib

import pytest
import yaml

import operator_doubles
from tidegate_control import bounded_http
from tidegate_operator import controller, gateway_admin, pool_steering
from tidegate_operator.cluster import watch_cache

from . import conftest, test_controller

START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
SPEC = yaml.safe_load((pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text())["spec"]
PERIOD_S = 10.0
KEY = ("prod", "chat")
NOBODY = "127.0.0.1:9"
"""Nothing listens there."""


class Api:
    """Keeps what is written to the status of pools, for all writers, as server-side apply does for one writer."""

    def __init__(self, cache):
        self._cache, self.writes = cache, 0

    async def secret(self, namespace, name):
        return None

    async def record(self, event):
        return None

    async def apply_status(self, namespace, name, body, *, writer):
        self.writes += 1
        pool = await self._cache.pool(namespace, name)
        self._cache.on_pool("MODIFIED", {**pool, "status": copy.deepcopy(body)})
        return body


def pool(name="chat"):
    notes = {"tidegate.dev/operator": conftest.RULES.operator}
    metadata = {"namespace": "prod", "name": name, "uid": name, "generation": 3, "annotations": notes}
    policy = {**SPEC["policy"], "interval": f"{PERIOD_S:g}s", "rollback": {"window": "20s", "rho": "1.2"}}
    return {"metadata": metadata, "spec": {**SPEC, "policy": policy}}


def pod(of, component, address, **labels):
    name = f"{of}-{component}"
    labels = {"tidegate.dev/pool": of, "app.kubernetes.io/component": component, **labels}
    metadata = {"namespace": "prod", "name": name, "uid": name, "labels": labels}
    return {"metadata": metadata, "status": {"podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}}


def add(cache, name="chat", gateway="10.0.0.1"):
    """A pool with one ready engine and one ready gateway."""
    cache.on_pool("ADDED", pool(name))
    cache.on_pod("ADDED", pod(name, "gateway", gateway))
    engine = pod(name, "engine", "10.0.1.1", **{"tidegate.dev/node-pool": SPEC["nodePools"][0]["name"]})
    cache.on_pod("ADDED", engine)
    return engine


def clock():
    """The wall clock of virtual time."""
    return START + datetime.timedelta(seconds=asyncio.get_running_loop().time())


def steering_of(cache, api, admin_of):
    return pool_steering.PoolSteering(
        api,
        conftest.RULES,
        reads=cache,
        admin_of=admin_of,
        clock=clock,
        locate=lambda each: NOBODY if pool_steering.ready_address(each) else None,
    )


async def status(cache):
    return (await cache.pool(*KEY)).get("status", {})


async def condition(cache, kind):
    found = {item["type"]: item for item in (await status(cache))["conditions"]}
    return found[kind]["status"], found[kind]["reason"], found[kind]["message"]


def test_a_pool_whose_engines_are_gone_claims_neither_a_policy_nor_measurements(in_virtual_time):
    async def run():
        cache = watch_cache.WatchCache()
        api = Api(cache)
        engine = add(cache)
        steering = steering_of(cache, api, lambda *_: operator_doubles.FakeAdmin())
        await steering.steer(KEY)
        measured = {"sloAttainment": "0.9", "classes": [{"name": "chat", "objective": "95", "sloAttainment": "0.9"}]}
        served = await status(cache)
        served |= {**measured, "nodePools": [{"name": SPEC["nodePools"][0]["name"], "sloAttainment": "0.9"}]}
        assert served["alpha"] == "0.2"
        cache.on_pool("MODIFIED", {**await cache.pool(*KEY), "status": served})
        cache.on_pod("DELETED", engine)
        assert await steering.steer(KEY) == pool_steering.WAIT_S
        assert await condition(cache, "PolicyStable") == (
            "False",
            "NoEngines",
            "No engine is ready, so no policy is in force. The next engine gets urgency, or what is decided then.",
        )
        assert (await condition(cache, "ReportsCredible"))[:2] == ("Unknown", "NoEngines")
        assert await condition(cache, "StoreReachable") == (
            "Unknown",
            "NotReported",
            "No engine is ready, so the operator does not ask the gateways for the store.",
        )
        found = await status(cache)
        assert {name: found[name] for name in ("activePolicy", "steering")} == {
            name: served[name] for name in ("activePolicy", "steering")
        }
        assert found.keys() == {"activePolicy", "steering", "conditions", "nodePools", "classes"}
        assert (found["nodePools"], found["classes"]) == ([], [])
        written = api.writes
        await steering.steer(KEY)
        assert api.writes == written, "an unchanged status is not written again"
        cache.on_pod("ADDED", engine)
        await steering.steer(KEY)
        assert (await condition(cache, "PolicyStable"))[1] != "NoEngines"
        assert (await condition(cache, "ReportsCredible"))[:2] == ("True", "Believed")
        await steering.close()

    in_virtual_time(run())


@pytest.mark.parametrize("owner", [None, "another/operator"])
def test_nothing_is_stated_of_a_pool_without_engines_that_is_not_ours(in_virtual_time, owner):
    async def run():
        cache, body = watch_cache.WatchCache(), pool()
        body["metadata"]["annotations"] = {"tidegate.dev/operator": owner} if owner else {}
        cache.on_pool("ADDED", body)
        api = Api(cache)
        assert await steering_of(cache, api, lambda *_: operator_doubles.FakeAdmin()).steer(KEY) == pool_steering.WAIT_S
        assert api.writes == 0

    in_virtual_time(run())


def test_while_the_spec_is_invalid_nothing_is_claimed_of_the_policy_the_reports_and_the_store(in_virtual_time):
    async def run():
        cache = watch_cache.WatchCache()
        api, admin = Api(cache), operator_doubles.FakeAdmin()
        admin.stores = {"10.0.0.1:8001": False}
        add(cache)
        steering = steering_of(cache, api, lambda *_: admin)
        for _ in range(5):
            await steering.steer(KEY)
            await asyncio.sleep(PERIOD_S)
        served = await status(cache)
        assert (await condition(cache, "StoreReachable"))[:2] == ("False", "Unreachable")
        body = await cache.pool(*KEY)
        policy = {**body["spec"]["policy"], "allow": ["unknown"]}
        cache.on_pool("MODIFIED", {**body, "spec": {**body["spec"], "policy": policy}})
        assert await steering.steer(KEY) == pool_steering.WAIT_S
        for kind in ("PolicyStable", "ReportsCredible", "StoreReachable"):
            assert (await condition(cache, kind))[:2] == ("Unknown", "InvalidSpec")
        found = await status(cache)
        assert [found[name] for name in ("activePolicy", "steering")] == [
            served[name] for name in ("activePolicy", "steering")
        ]
        writes = api.writes
        await steering.steer(KEY)
        assert api.writes == writes
        cache.on_pool("MODIFIED", {**body, "status": found})
        await steering.steer(KEY)
        assert (await condition(cache, "ReportsCredible"))[:2] == ("True", "Believed")
        await steering.close()

    in_virtual_time(run())


def test_what_gateways_tell_of_the_store_is_stated_at_each_decision_and_kept_between(in_virtual_time):
    async def run():
        cache = watch_cache.WatchCache()
        api, admin = Api(cache), operator_doubles.FakeAdmin()
        add(cache)
        steering = steering_of(cache, api, lambda *_: admin)
        await steering.steer(KEY)
        assert (await condition(cache, "StoreReachable"))[:2] == ("Unknown", "NotReported")
        for seen, found in (
            ({"10.0.0.1:8001": True}, ("True", "Reachable")),
            ({"10.0.0.1:8001": False}, ("False", "Unreachable")),
            ({}, ("Unknown", "NotReported")),
        ):
            admin.stores = seen
            await asyncio.sleep(PERIOD_S)
            await steering.steer(KEY)
            assert (await condition(cache, "StoreReachable"))[:2] == found
            await steering.steer(KEY)
            assert (await condition(cache, "StoreReachable"))[:2] == found
        await steering.close()

    in_virtual_time(run())


SILENT_POOLS = 100
LIVELY = "10.0.9.9"


STATE = {
    "policy": {"name": "urgency", "source": "settings", "reason": "", "left_s": None},
    "dispatch": {"alpha": None},
    "targets": {},
    "store": {"reachable": True},
}


class Client:
    """As `bounded_http.Client`, for gateways of which those of one pool answer and the others let each request wait until
    its time is over. Records when the pool that answers was asked, and how often the others were."""

    def __init__(self):
        self.asked_at_s, self.silent = [], collections.Counter()

    async def request(self, method, url, *, headers, body=None, most_bytes, timeout_s, owner):
        if method == "GET" and LIVELY in url:
            self.asked_at_s.append(asyncio.get_running_loop().time())
        elif method == "GET":
            self.silent[url] += 1
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        return bounded_http.Answer(200, json.dumps(STATE).encode())


def test_a_hundred_pools_with_silent_gateways_do_not_stretch_the_periods_of_another(in_virtual_time):
    """After their second silent observation, which all of them need at the start."""
    client = Client()

    async def run():
        cache = watch_cache.WatchCache()
        api = Api(cache)
        steering = steering_of(
            cache,
            api,
            lambda namespace, token: gateway_admin.GatewayAdmin(client, namespace=namespace, token=token),
        )
        controlling = controller.Controller(
            test_controller.NoApi(),
            cache,
            conftest.RULES,
            steering,
            test_controller.NoScaling(),
            test_controller.NoCanaries(),
            resync_s=3600,
        )
        for number in range(SILENT_POOLS):
            add(cache, f"silent-{number}", f"10.0.0.{number}")
            controlling.on_pool("ADDED", pool(f"silent-{number}"))
        add(cache, "lively", LIVELY)
        controlling.on_pool("ADDED", pool("lively"))
        for key in cache.keys(None):
            await cache.refresh(key, cache)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(300):
                await controlling.run()

    in_virtual_time(run())
    periods = [after - before for before, after in itertools.pairwise(client.asked_at_s) if before > 4 * PERIOD_S]
    assert len(periods) > 200 / PERIOD_S
    assert max(periods) <= PERIOD_S + 0.1
    rounds = [*client.silent.values()]
    assert len(rounds) == SILENT_POOLS
    assert min(rounds) > 300 / PERIOD_S / 3, "a silent pool is steered too"
