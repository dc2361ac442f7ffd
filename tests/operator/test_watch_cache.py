"""What the cache answers after events, and when a decision may rest on it."""

import asyncio
import json

import pytest

import operator_doubles
from tidegate_operator.cluster import object_parts, watch_cache

KEY = ("prod", "chat")
SETTLE_S, QUIET_S = 2.0, 5.0
ABSENT = {"tidegate.dev/pool": "absent"}


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


def large(name, size, *, kind="ConfigMap"):
    return body(name, kind=kind) | {"data": {"text": "x" * size}}


async def test_of_objects_that_the_pool_does_not_own_the_names_are_kept():
    cache, foreign = watch_cache.WatchCache(), large("foreign", 10_000)
    foreign["metadata"]["ownerReferences"] = []
    foreign["metadata"]["annotations"] = {"note": "x" * 10_000}
    await cache.refresh(KEY, Listed())
    cache.on_child("ADDED", foreign)
    cache.on_child("ADDED", large("early", 10_000) | {"metadata": large("early", 1)["metadata"] | {"labels": ABSENT}})
    cache.on_pod("ADDED", large("pod", 10_000) | {"metadata": large("pod", 1)["metadata"] | {"labels": ABSENT}})
    assert cache.bytes_in("prod") < 10_000


async def test_a_pool_that_appears_after_its_objects_is_incomplete_until_it_is_refreshed():
    cache = watch_cache.WatchCache()
    await cache.refresh(KEY, Listed())
    cache.on_pool("MODIFIED", body("chat", uid="of a later pool", kind="ServingPool"))
    assert not cache.is_complete(KEY)
    assert not cache.is_confirmed(KEY)


async def test_the_objects_of_a_namespace_are_bounded_and_those_of_others_are_not_affected(monkeypatch, caplog):
    monkeypatch.setattr(object_parts, "MOST_BYTES", 50_000)
    cache, elsewhere = watch_cache.WatchCache(), large("theirs", 10_000)
    elsewhere["metadata"]["namespace"] = "other"
    await cache.refresh(KEY, Listed())
    for number in range(10):
        cache.on_child("ADDED", large(f"large-{number}", 10_000))
        cache.on_pod("ADDED", large(f"pod-{number}", 10_000, kind="Pod"))
    assert cache.bytes_in("prod") <= 50_000
    assert len(await cache.children(*KEY)) + len(await cache.pods(*KEY)) < 8
    assert not cache.is_confirmed(KEY), "objects are missing"
    assert not cache.is_complete(KEY)
    assert caplog.messages == ["pool prod/chat is not steered: its namespace has too many objects of pools"]
    cache.on_pool("ADDED", body("chat", kind="ServingPool") | {"metadata": elsewhere["metadata"] | {"name": "chat"}})
    cache.on_child("ADDED", elsewhere)
    assert names(await cache.children("other", "chat")) == ["theirs"]
    for number in range(10):
        cache.on_child("DELETED", large(f"large-{number}", 10_000))
        cache.on_pod("DELETED", large(f"pod-{number}", 10_000, kind="Pod"))
    assert cache.is_confirmed(KEY)
    assert cache.is_complete(KEY)
    cache.forget("prod")
    assert cache.bytes_in("prod") == 0


async def test_of_a_pod_what_its_containers_run_with_is_not_kept():
    cache = watch_cache.WatchCache()
    await cache.refresh(KEY, Listed())
    pod = body("large", kind="Pod") | {"status": {"phase": "Running"}}
    container = {"name": "engine", "env": [{"name": "A", "value": "x" * 10_000}], "args": ["x" * 10_000]}
    container |= {"resources": {"requests": {"cpu": "1"}}}
    pod["spec"] = {"nodeName": "a", "containers": [container], "initContainers": [container]}
    pod["metadata"]["annotations"] = {"note": "x" * 10_000, "tidegate.dev/revision": "1"}
    cache.on_pod("ADDED", pod)
    kept = (await cache.pods(*KEY))[-1]
    small = {"name": "engine", "resources": {"requests": {"cpu": "1"}}}
    assert kept["spec"] == {"nodeName": "a", "containers": [small], "initContainers": [small]}
    assert kept["metadata"]["annotations"] == {"tidegate.dev/revision": "1"}
    assert kept["status"] == {"phase": "Running"}


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
