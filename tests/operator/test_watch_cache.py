"""What the cache answers after events, and when a decision may rest on it."""

import asyncio
import json

import pytest

import operator_doubles
from tidegate_operator.cluster import watch_cache

KEY = ("prod", "chat")
SETTLE_S, QUIET_S = 2.0, 5.0


def body(name, *, uid="u", kind="ConfigMap", **more):
    metadata = {"namespace": "prod", "name": name, "uid": uid, "labels": {"tidegate.dev/pool": "chat"}}
    return {"kind": kind, "metadata": metadata | {"ownerReferences": [{"uid": "u", "controller": True}]}, **more}


class Listed:
    """An API server that holds a pool and one child; `meanwhile` is called between its answers."""

    def __init__(self, *, meanwhile=lambda: None):
        self._meanwhile = meanwhile

    async def pool(self, namespace, name):
        return body("chat", kind="ServingPool")

    async def children(self, namespace, pool):
        self._meanwhile()
        return [body("listed")]

    async def pods(self, namespace, pool):
        return [body("pod", kind="Pod")]


def names(bodies):
    return [item["metadata"]["name"] for item in bodies]


async def test_events_of_a_listing_leave_the_cache_unconfirmed_until_it_is_refreshed():
    cache = watch_cache.WatchCache()
    assert cache.on_pool(None, body("chat", kind="ServingPool")) == KEY
    assert cache.on_child(None, body("deleted-while-no-watch-ran")) == KEY
    assert not cache.is_confirmed(KEY)
    await cache.refresh(KEY, Listed())
    assert cache.is_confirmed(KEY)
    assert names(await cache.children(*KEY)) == ["listed"]
    assert names(await cache.pods(*KEY)) == ["pod"]


async def test_an_event_during_a_refresh_is_newer_than_the_answer():
    cache = watch_cache.WatchCache()
    cache.on_child(None, body("listed"))
    await cache.refresh(KEY, Listed(meanwhile=lambda: cache.on_child("DELETED", body("listed"))))
    assert not cache.is_confirmed(KEY)
    assert await cache.children(*KEY) == []


class Gone(Listed):
    """An API server whose answer is older than the creation of the pool."""

    async def pool(self, namespace, name):
        return None

    async def children(self, namespace, pool):
        self._meanwhile()
        return []


async def test_a_pool_that_appears_during_a_refresh_stays():
    cache = watch_cache.WatchCache()
    cache.on_child(None, body("listed"))
    await cache.refresh(KEY, Gone(meanwhile=lambda: cache.on_pool("ADDED", body("chat", kind="ServingPool"))))
    assert cache.knows(KEY)
    await cache.refresh(KEY, Gone())
    assert not cache.knows(KEY)


async def test_objects_of_other_owners_with_the_label_of_a_pool_are_none_of_its_children():
    cache = watch_cache.WatchCache()
    copied, foreign = body("copied"), body("foreign", kind="Deployment")
    copied["metadata"]["ownerReferences"] = []
    foreign["metadata"]["ownerReferences"] = [{"uid": "of another pool", "controller": True}]

    class Copied(Listed):
        async def children(self, namespace, pool):
            return [body("listed"), copied]

    _, children, _ = await cache.refresh(KEY, Copied())
    assert names(children) == ["listed"]
    cache.on_child("ADDED", foreign)
    assert names(await cache.children(*KEY)) == ["listed"]
    cache.on_pool("MODIFIED", body("chat", uid="of another pool", kind="ServingPool"))
    assert names(await cache.children(*KEY)) == ["foreign"], "a pool that was created again"


async def test_a_later_event_updates_a_confirmed_cache():
    cache = watch_cache.WatchCache()
    await cache.refresh(KEY, Listed())
    cache.on_child("ADDED", body("new"))
    cache.on_child("DELETED", body("listed"))
    assert cache.is_confirmed(KEY)
    assert names(await cache.children(*KEY)) == ["new"]


@pytest.mark.parametrize("event", ["on_pool", "on_child", "on_pod"])
async def test_the_late_deletion_of_an_earlier_namesake_removes_nothing(event):
    cache = watch_cache.WatchCache()
    getattr(cache, event)("ADDED", body("chat", uid="new"))
    getattr(cache, event)("DELETED", body("chat", uid="old"))
    known = [await cache.pool(*KEY), *await cache.children(*KEY), *await cache.pods(*KEY)]
    assert [item["metadata"]["uid"] for item in known if item] == ["new"]


async def test_an_idle_pool_causes_no_request_but_those_for_the_lease(plane, kubectl, installed, namespace):
    """Pools are checked every second here, so five seconds hold as many checks as five minutes do by default."""
    installed.start("first", namespace, arguments=["--resync", "1s"])
    policy = {"interval": "1s", "dwell": "1s", "rollback": {"window": "2s"}}
    kubectl("apply", "-f", "-", body=operator_doubles.pool(policy=policy))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("wait", "spool/chat", "--for=condition=PolicyStable", "--timeout=120s")  # the last write of the status

    def requests():
        records = [json.loads(line) for line in plane.audit_log.read_text().splitlines()]
        ours = [item for item in records if item["user"]["username"] == installed.user and "objectRef" in item]
        return [
            (item["verb"], item["objectRef"]["resource"])
            for item in ours
            if item["objectRef"]["resource"] != "leases" and item["verb"] != "watch"
        ]

    await asyncio.sleep(SETTLE_S)
    assert ("list", "pods") in requests()
    for _ in range(3):  # on a machine that stalls, engines may be silent for a while, which the status tells
        before = requests()
        await asyncio.sleep(QUIET_S)
        more = requests()[len(before) :]
        if not more:
            break
    assert more == []


async def test_a_change_that_the_operator_did_not_make_is_undone(kubectl, installed, namespace, eventually):
    installed.start("first", namespace, arguments=["--resync", "1h"])
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("delete", "configmap/chat-gateway", "networkpolicy/chat-gateway")
    eventually(lambda: "chat-gateway" in kubectl("get", "configmap", "-o", "name"))
    eventually(lambda: "chat-gateway" in kubectl("get", "networkpolicy", "-o", "name"))
    kubectl("patch", "service/chat-gateway", "--type=merge", "-p", '{"spec": {"type": "NodePort"}}')
    eventually(lambda: kubectl("get", "service/chat-gateway", "-o", "jsonpath={.spec.type}") == "ClusterIP")


async def test_a_pool_as_it_was_written_takes_the_place_of_no_newer_event():
    cache = watch_cache.WatchCache()
    cache.on_pool("ADDED", body("chat", kind="ServingPool", spec=1))
    since = cache.events(KEY)
    cache.on_pool("MODIFIED", body("chat", kind="ServingPool", spec=2))
    cache.on_written(body("chat", kind="ServingPool", spec=1, status="new"), since=since)
    assert (await cache.pool(*KEY))["spec"] == 2
    cache.on_written(body("chat", kind="ServingPool", spec=2, status="new"), since=cache.events(KEY))
    assert (await cache.pool(*KEY))["status"] == "new"
    since = cache.events(KEY)
    cache.on_pool("DELETED", body("chat", kind="ServingPool"))
    cache.on_written(body("chat", kind="ServingPool", spec=2), since=since)
    assert await cache.pool(*KEY) is None
