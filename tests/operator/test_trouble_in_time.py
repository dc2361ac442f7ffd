"""How soon the condition `Degraded` has the sentence about a pod that does not run, by the operator's clock."""

import asyncio
import contextlib
import datetime
import re

import pytest

from tidegate_operator import cluster, controller, objects, pod_trouble, reconcile
from tidegate_operator.cluster import watch_cache

from . import conftest, test_controller, test_render

START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
GOAL_S = 30.0
MOUNTED_IN_S = pod_trouble.MOUNTING_S + 10.0
"""The same for a pod whose volumes are not ready, which is usual for a while."""
CALM_S = 1000.0
"""Time before the trouble."""
RULES = conftest.RULES


class InMemory:
    """An API server that keeps what is applied, and whose watches report nothing."""

    def __init__(self, body):
        self.body, self.kept, self.placed = body, {}, []
        self.degraded_at_s = None

    def __getattr__(self, name):
        async def nothing(*_, **__):
            return None

        return nothing

    async def pool(self, namespace, name):
        return self.body

    async def children(self, namespace, pool):
        return [*self.kept.values()]

    async def pods(self, namespace, pool):
        return self.placed

    async def claim(self, namespace, name, owner):
        return True

    async def apply(self, manifest):
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"))
        status = {"observedGeneration": 1} | {name: manifest.get("spec", {}).get("replicas", 1) for name in counts}
        made = {**manifest, "metadata": {**manifest["metadata"], "generation": 1}, "status": status}
        self.kept[objects.Reference.of(manifest)] = made
        return made

    async def apply_status(self, namespace, name, body, *, writer):
        found = {item["type"]: item for item in body["conditions"]}
        if found["Degraded"]["status"] == "True" and self.degraded_at_s is None:
            self.degraded_at_s = asyncio.get_running_loop().time()
            assert re.search("the sentence|its volumes or network are not ready", found["Degraded"]["message"])
        self.body = {**self.body, "status": body}
        return self.body


class Unwritable(InMemory):
    """Such an API server that takes no status for a while."""

    def __init__(self, body):
        super().__init__(body)
        self.refused, self.told = 0, []

    async def apply_status(self, namespace, name, body, *, writer):
        if self.refused < 3:
            self.refused += 1
            raise cluster.ClusterError("no answer")
        return await super().apply_status(namespace, name, body, writer=writer)

    async def record(self, event):
        self.told.append(event.reason)


def test_a_status_that_cannot_be_written_leaves_no_event_of_each_attempt(in_virtual_time):
    body = test_render.body(replicas=4)
    body["metadata"]["annotations"] = {"tidegate.dev/operator": RULES.operator}
    api = Unwritable(body)

    async def run():
        for attempt in range(4):
            with contextlib.suppress(cluster.ClusterError):
                now = START + datetime.timedelta(seconds=attempt)
                await reconcile.reconcile(api, "prod", "chat", rules=RULES, now=now)
            assert bool(api.told) == (attempt == 3)

    in_virtual_time(run())
    assert api.refused == 3
    assert sorted(set(api.told)) == sorted(api.told)


def instant(second):
    return (START + datetime.timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%SZ")


def waiting(reason):
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": "the sentence"}}}]}


UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "the sentence",
    "lastTransitionTime": instant(CALM_S),
}  # fmt: skip
UNMOUNTED = {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": instant(CALM_S)}
NOT_MOUNTED = "its volumes are not ready"
TROUBLES = {
    "no node takes it": {"conditions": [UNSCHEDULABLE]},
    "its image cannot be pulled": waiting("ImagePullBackOff"),
    "it crashes": waiting("CrashLoopBackOff"),
    "it was evicted": {"phase": "Failed", "reason": "Evicted", "message": "the sentence"},
    NOT_MOUNTED: {**waiting("ContainerCreating"), "conditions": [UNMOUNTED]},
}


def pod(status):
    labels = {"tidegate.dev/pool": "chat", "app.kubernetes.io/component": "engine", "tidegate.dev/node-pool": "a100"}
    metadata = {"name": "p", "namespace": "prod", "uid": "p", "labels": labels, "creationTimestamp": instant(CALM_S)}
    return {"metadata": metadata, "spec": {}, "status": status}


@pytest.mark.parametrize("what", TROUBLES)
def test_the_trouble_of_a_pod_is_told_in_time(in_virtual_time, figure, what):
    goal_s = MOUNTED_IN_S if what == NOT_MOUNTED else GOAL_S
    body = test_render.body(replicas=4)
    body["metadata"]["annotations"] = {"tidegate.dev/operator": RULES.operator}
    api, cache = InMemory(body), watch_cache.WatchCache()

    async def run():
        loop = asyncio.get_running_loop()
        controlling = controller.Controller(
            api, cache, RULES, test_controller.SlowSteering(), test_controller.NoScaling(), test_controller.NoCanaries(),
            resync_s=3600, clock=lambda: START + datetime.timedelta(seconds=loop.time()),
        )  # fmt: skip
        controlling.on_pool("ADDED", body)

        def break_down():
            assert api.degraded_at_s is None
            api.placed = [pod(TROUBLES[what])]
            for reference, made in api.kept.items():
                if made["kind"] == "Deployment" and made["metadata"]["labels"].get("tidegate.dev/node-pool") == "a100":
                    fewer = {**made["status"], "readyReplicas": made["status"]["readyReplicas"] - 1}
                    api.kept[reference] = {**made, "status": fewer}
                    controlling.on_child("MODIFIED", api.kept[reference])
            controlling.on_pod("MODIFIED", api.placed[0])

        loop.call_later(CALM_S, break_down)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALM_S + 600):
                await controlling.run()

    in_virtual_time(run())
    assert api.degraded_at_s is not None
    took_s = api.degraded_at_s - CALM_S
    name = f"a pod of which {what}: Degraded after, s of the operator's clock"
    figure(name, f"{took_s:.1f}", goal=f"{goal_s:g}", met=0 <= took_s <= goal_s)
    assert 0 <= took_s <= goal_s
