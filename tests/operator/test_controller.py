"""The controller's queues, without a cluster."""

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import itertools

import operator_doubles
from tidegate_operator import cluster, controller, reconcile
from tidegate_operator.cluster import watch_cache
from tidegate_operator.render import child_metadata

from . import conftest, test_render

POOLS = 40
SILENCE_S = 3.0
"""Time after which a request to a gateway that does not answer fails."""
PERIOD_S = 10.0


class SlowSteering:
    """Steers pools whose gateways do not answer, and one pool whose gateways do."""

    def __init__(self) -> None:
        self.steered_at_s: list[float] = []

    async def steer(self, key: watch_cache.Key) -> float | None:
        if key[1] == "lively":
            self.steered_at_s.append(asyncio.get_running_loop().time())
        else:
            await asyncio.sleep(SILENCE_S)
        return PERIOD_S

    def is_silent(self, key: watch_cache.Key) -> bool:
        return False

    async def close(self) -> None:
        return None


class NoScaling:
    """Pools without an autoscaler."""

    async def scale(self, key):
        return PERIOD_S

    def is_silent(self, key):
        return False


class NoCanaries:
    """Pools without a canary."""

    async def test(self, key):
        return None


class NoApi:
    """An API server that does not answer."""

    async def pool(self, namespace, name):
        raise cluster.ClusterError("no answer")


def test_forty_pools_with_silent_gateways_do_not_stretch_the_period_of_another(in_virtual_time):
    steering = SlowSteering()

    async def run():
        cache = watch_cache.WatchCache()
        controlling = controller.Controller(
            NoApi(), cache, conftest.RULES, steering, NoScaling(), NoCanaries(), resync_s=3600
        )
        for name in [*(f"silent-{number}" for number in range(POOLS)), "lively"]:
            controlling.on_pool("ADDED", pool(name))
            await cache.refresh(("prod", name), cache)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(300):
                await controlling.run()

    in_virtual_time(run())
    periods = [after - before for before, after in itertools.pairwise(steering.steered_at_s)]
    longest = max(periods)
    assert longest <= PERIOD_S + 0.1


def pool(name, namespace="prod"):
    body = operator_doubles.pool(name)
    return {**body, "metadata": {"namespace": namespace, "name": name, "uid": name, "generation": 1}}


class Laborious:
    """An API server that takes long for the pools of one namespace."""

    def __init__(self):
        self.asked_at_s = collections.defaultdict(list)

    async def pool(self, namespace, name):
        self.asked_at_s[namespace].append(asyncio.get_running_loop().time())
        if namespace == "slow":
            await asyncio.sleep(20)
        raise cluster.ClusterError("no answer")


def test_slow_pools_of_one_namespace_do_not_delay_a_pool_of_another(in_virtual_time):
    """Forty namespaces that are slow at the same time would; one must not, however many pools it has."""
    api = Laborious()

    async def run():
        controlling = controller.Controller(
            api, watch_cache.WatchCache(), conftest.RULES, SlowSteering(), NoScaling(), NoCanaries(), resync_s=3600
        )
        for number in range(POOLS):
            controlling.on_pool("ADDED", pool(f"large-{number}", namespace="slow"))
        asyncio.get_running_loop().call_later(5, controlling.on_pool, "ADDED", pool("chat"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await controlling.run()

    in_virtual_time(run())
    assert api.asked_at_s["slow"] == [0] * controller.RECONCILED_OF_ONE
    assert api.asked_at_s["prod"][0] == 5


class Leaving:
    """Drivers of a pool that is being deleted; each counts the looks at it."""

    def __init__(self):
        self.looks = 0

    async def look(self, key):
        self.looks += 1

    steer = scale = test = look

    def is_silent(self, key):
        return False

    async def close(self):
        return None


def test_a_pool_that_waits_for_its_deletion_costs_nothing(in_virtual_time):
    """A foreground deletion keeps the pool until its engines have drained."""
    leaving = pool("leaving")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:00Z"
    drivers = Leaving()

    async def run():
        cache = watch_cache.WatchCache()
        controlling = controller.Controller(NoApi(), cache, conftest.RULES, drivers, drivers, drivers, resync_s=3600)
        controlling.on_pool("ADDED", leaving)
        await cache.refresh(("prod", "leaving"), cache)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(300):
                await controlling.run()

    in_virtual_time(run())
    assert drivers.looks <= 3


class Emptied:
    """An API server on which all pools were deleted while no watch ran."""

    def __init__(self):
        self.lists = 0

    async def pool_keys(self, namespace):
        self.lists += 1
        return set()

    async def pool(self, namespace, name):
        return None

    async def children(self, namespace, pool):
        return []

    async def pods(self, namespace, pool):
        return []

    async def record(self, event):
        return None


def test_a_pool_of_any_owner_that_was_deleted_while_its_watch_was_down_is_forgotten(in_virtual_time):
    api, cache, steering = Emptied(), watch_cache.WatchCache(), SlowSteering()

    async def run():
        controlling = controller.Controller(
            api, cache, conftest.RULES, steering, NoScaling(), NoCanaries(), resync_s=3600
        )
        foreign = pool("foreign")
        foreign["metadata"]["annotations"] = {"tidegate.dev/operator": "another/operator"}
        for body in (foreign, pool("lively")):
            controlling.on_pool("ADDED", body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(controller.COMPARED_S * 2.5), asyncio.TaskGroup() as group:
                group.create_task(controlling.run())
                group.create_task(controlling.find_deleted("prod"))

    in_virtual_time(run())
    assert cache.keys(None) == set()
    assert api.lists == 2


class Troubled(Emptied):
    """Such an API server, whose first lists fail."""

    async def pool_keys(self, namespace):
        await super().pool_keys(namespace)
        if self.lists < 3:
            raise [KeyError("items"), cluster.ClusterError("no answer")][self.lists - 1]
        return set()


def test_a_list_of_pools_that_fails_in_any_way_is_told_and_tried_again(in_virtual_time, caplog):
    api, cache = Troubled(), watch_cache.WatchCache()

    async def run():
        controlling = controller.Controller(
            api, cache, conftest.RULES, SlowSteering(), NoScaling(), NoCanaries(), resync_s=3600
        )
        cache.on_pool("ADDED", pool("chat"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(controller.COMPARED_S * 3.5):
                await controlling.find_deleted("prod")

    in_virtual_time(run())
    assert cache.keys(None) == set()
    assert [(each.levelname, each.exc_info is not None) for each in caplog.records if "list of the pools" in each.msg] == [
        ("ERROR", True), ("WARNING", False),
    ]  # fmt: skip


class Listing:
    """An API server that has one pool with one pod, and takes a while to list them. It rejects all writes."""

    LISTED_S = 5.0

    async def pool(self, namespace, name):
        return pool(name)

    async def children(self, namespace, pool):
        await asyncio.sleep(self.LISTED_S)
        return []

    async def pods(self, namespace, pool):
        labels = {"tidegate.dev/pool": pool}
        return [{"metadata": {"namespace": namespace, "name": "engine", "uid": "engine", "labels": labels}}]

    async def claim(self, namespace, name, owner):
        raise cluster.ClusterError("no write")


class Looking:
    """Steers, scales and tests pools, and records when, and whether the pod was known."""

    def __init__(self, cache):
        self._cache, self.seen = cache, []

    async def look(self, key):
        self.seen.append((asyncio.get_running_loop().time(), len(await self._cache.pods(*key))))
        return PERIOD_S

    steer = scale = test = look

    def is_silent(self, key):
        return False

    async def close(self):
        return None


def test_a_pool_is_steered_scaled_and_tested_only_when_all_its_objects_are_known(in_virtual_time):
    """A restarted operator gets the pools before it gets their pods."""
    cache, looks = watch_cache.WatchCache(), []

    async def run():
        looks.extend(Looking(cache) for _ in range(3))
        controlling = controller.Controller(Listing(), cache, conftest.RULES, *looks, resync_s=3600)
        controlling.on_pool(None, pool("chat"))

        async def list_again():
            await asyncio.sleep(100)
            while True:
                controlling.on_pool(None, pool("chat"))  # so no answer of the API server confirms the cache
                await asyncio.sleep(1)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(200), asyncio.TaskGroup() as group:
                group.create_task(controlling.run())
                group.create_task(list_again())

    in_virtual_time(run())
    for each in looks:
        assert {pods for _, pods in each.seen} == {1}
        assert Listing.LISTED_S <= each.seen[0][0] <= Listing.LISTED_S + 2 * controller.INCOMPLETE_S
        times = [at for at, _ in each.seen]
        assert max(after - before for before, after in itertools.pairwise(times)) < PERIOD_S + 0.1, (
            "a list stops nothing"
        )
    assert not cache.is_confirmed(("prod", "chat"))


class Counting:
    """Counts the requests of each method to the API server."""

    def __init__(self, real):
        self._real, self.asked = real, collections.Counter()

    def __getattr__(self, name):
        method = getattr(self._real, name)

        async def counted(*arguments, **named):
            self.asked[name] += 1
            return await method(*arguments, **named)

        return counted


async def test_a_change_that_concerns_the_status_alone_is_one_write_and_no_read(cluster, kubectl, namespace, rules):
    """The events are told here, in place of watches."""
    await until_ready(cluster, kubectl, namespace, rules)
    api, cache, key = Counting(cluster), watch_cache.WatchCache(), (namespace, "chat")
    controlling = controller.Controller(api, cache, rules, SlowSteering(), NoScaling(), NoCanaries(), resync_s=3600)
    controlling.on_pool("ADDED", await cluster.pool(namespace, "chat"))
    assert await controlling._reconcile(key) is not None
    assert api.asked["children"] == 1, "what the cache does not know is read"
    api.asked.clear()
    names = {(child["kind"], child["metadata"]["name"]): child for child in await cache.children(*key)}
    engine = names["Deployment", "chat-engine-a"]
    controlling.on_child("MODIFIED", {**engine, "status": {**engine["status"], "readyReplicas": 0}})
    await controlling._reconcile(key)
    assert api.asked == {"apply_status": 1}
    assert not is_ready(await cluster.pool(namespace, "chat"))
    assert not is_ready(await cache.pool(*key)), "the next decision sees the status that was written"
    await controlling._reconcile(key)
    assert api.asked == {"apply_status": 1}


class CountingCache(watch_cache.WatchCache):
    """Counts how often the objects of a pool are looked at."""

    looked = 0

    async def children(self, namespace, pool):
        self.looked += 1
        return await super().children(namespace, pool)


async def test_a_settled_pool_is_looked_at_again_only_after_an_event(cluster, kubectl, namespace, rules):
    """The events are told here, in place of watches."""
    await until_ready(cluster, kubectl, namespace, rules)
    cache, key = CountingCache(), (namespace, "chat")
    controlling = controller.Controller(cluster, cache, rules, SlowSteering(), NoScaling(), NoCanaries(), resync_s=60)
    controlling.on_pool("ADDED", await cluster.pool(namespace, "chat"))
    await controlling._reconcile(key)
    await controlling._reconcile(key)
    assert cache.looked == 1
    assert await controlling._reconcile(key) == 60
    assert cache.looked == 1
    controlling.on_pool("MODIFIED", await cluster.pool(namespace, "chat"))
    await controlling._reconcile(key)
    assert cache.looked == 2


async def test_a_new_pool_costs_a_read_and_a_write_for_each_object(cluster, kubectl, namespace, rules):
    """And one event: its gateways serve callers without authentication."""
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    api = Counting(cluster)
    await reconcile.reconcile(api, namespace, "chat", rules=rules, now=controller.now())
    once = ("pool", "children", "pods", "claim", "state_replicas", "secret", "create_secret", "apply_status", "record")
    each = dict.fromkeys(("get", "apply"), len(await cluster.children(namespace, "chat")))
    assert api.asked == {**dict.fromkeys(once, 1), **each}


async def until_ready(cluster, kubectl, namespace, rules):
    """Creates a pool, and reconciles it until it is ready."""
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "a"}]))
    async with asyncio.timeout(120):
        while not is_ready(await cluster.pool(namespace, "chat")):
            await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=controller.now())
            await asyncio.sleep(0.2)


def is_ready(body):
    conditions = body.get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


class Empty:
    """An API server without objects that counts the requests for one object each."""

    def __init__(self):
        self.asked = self.active = self.most = 0

    async def get(self, reference):
        self.asked += 1
        self.active += 1
        self.most = max(self.most, self.active)
        await asyncio.sleep(1)
        self.active -= 1


def test_one_pool_with_many_objects_asks_for_a_few_of_them_at_a_time(in_virtual_time):
    api = Empty()
    services = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "prod", "name": f"s{n}"}} for n in range(100)
    ]
    assert in_virtual_time(reconcile._same_names(api, services, [])) == []
    assert api.asked == 100
    assert api.most == reconcile.NAMES_AT_ONCE


def test_the_look_at_a_pool_lets_others_on_between_its_steps(in_virtual_time):
    """A very large pool takes a tenth of a second, and the Lease is renewed by the same event loop."""
    given = test_render.body(replicas=7)  # by a scaler
    mine = {**given["metadata"], "annotations": {child_metadata.OWNER: conftest.RULES.operator}}
    rules = dataclasses.replace(conftest.RULES, known=test_render.KNOWN)
    turns = []

    async def story():
        looking = asyncio.create_task(
            reconcile.pending_report(
                {**given, "metadata": mine}, [], [], rules=rules, now=datetime.datetime.now(datetime.UTC)
            )
        )
        while not looking.done():
            turns.append(None)
            await asyncio.sleep(0)
        return looking.result()

    assert in_virtual_time(story()) is None, "there are objects to write"
    assert len(turns) > 3
