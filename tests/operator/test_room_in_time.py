"""An old engine stops for a new one without room once that has lasted, though the cluster reports nothing meanwhile."""

import asyncio
import contextlib
import datetime

from tidegate_operator import controller, engine_place, engine_room, rollout
from tidegate_operator.cluster import watch_cache

from . import conftest, test_controller, test_render, test_trouble_in_time

EDIT_S = 1000.0
START = test_trouble_in_time.START
ENGINES = "chat-engine-a100"


LEFT_S = 30.0
"""Time after the edit at which the engine on a lost node should have gone."""
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}


class Full(test_trouble_in_time.InMemory):
    """A cluster without room for a further engine of the node pool a100."""

    def __init__(self, body):
        super().__init__(body)
        self.pending_at_s = self.stops_at_s = self.watches = None

    async def apply(self, manifest):
        made = await super().apply(manifest)
        engines = manifest["metadata"]["name"] == ENGINES and manifest["kind"] == "Deployment"
        if engines and asyncio.get_running_loop().time() >= EDIT_S:
            made["status"] |= {"replicas": made["status"]["replicas"] + 1, "updatedReplicas": 1}
            self.place(manifest["spec"]["template"], made["status"])
            if self.pending_at_s is None:
                self.pending_at_s = asyncio.get_running_loop().time()
                self.watches.on_child("MODIFIED", made)
                self.watches.on_pod("ADDED", self.placed[0])
            if manifest["spec"]["strategy"]["rollingUpdate"] == engine_place.IN_PLACE:
                self.stops_at_s = self.stops_at_s or asyncio.get_running_loop().time()
        return made

    def place(self, template, status):
        """The new engine waits for a node."""
        lacks = {**test_trouble_in_time.UNSCHEDULABLE, "message": "the sentence: 3 Insufficient nvidia.com/gpu."}
        pod = test_trouble_in_time.pod({"conditions": [lacks]})
        tags = {"labels": template["metadata"]["labels"], "annotations": template["metadata"]["annotations"]}
        self.placed = [pod | {"metadata": pod["metadata"] | tags, "spec": template["spec"]}]


class OverQuota(Full):
    """A cluster whose quota has no room for one, because an old engine is leaving a node that is lost."""

    def place(self, template, status):
        status |= {"replicas": status["replicas"] - 1, "updatedReplicas": 0, "conditions": [QUOTA]}
        pod = test_trouble_in_time.pod({})
        tags = {
            "labels": template["metadata"]["labels"],
            "deletionTimestamp": test_trouble_in_time.instant(EDIT_S + LEFT_S),
        }
        spec = {**template["spec"], "nodeName": "lost"}
        self.placed = [pod | {"metadata": pod["metadata"] | tags, "spec": spec}]


def test_the_operator_looks_again_when_the_lack_of_room_has_lasted(in_virtual_time):
    assert_stops_after(in_virtual_time, Full, engine_room.PATIENCE_S)


def test_the_operator_looks_again_when_the_time_of_an_engine_that_leaves_is_over(in_virtual_time):
    assert_stops_after(in_virtual_time, OverQuota, LEFT_S + engine_room.PATIENCE_S)


def assert_stops_after(in_virtual_time, kind, least_s):
    """An old engine stops for a new one in a cluster of this kind, `least_s` after the edit or soon afterwards."""
    body = test_render.body(replicas=4)
    body["metadata"]["annotations"] = {"tidegate.dev/operator": conftest.RULES.operator}
    api, cache = kind(body), watch_cache.WatchCache()

    async def run():
        loop = asyncio.get_running_loop()
        controlling = controller.Controller(
            api, cache, conftest.RULES, test_controller.SlowSteering(), test_controller.NoScaling(),
            test_controller.NoCanaries(), resync_s=3600,
            clock=lambda: START + datetime.timedelta(seconds=loop.time()),
        )  # fmt: skip
        api.watches = controlling
        controlling.on_pool("ADDED", body)

        def serve():
            for made in list(api.kept.values()):
                controlling.on_child("MODIFIED", made)

        def edit():
            served = [made["metadata"]["annotations"].get(rollout.SERVED) for made in api.kept.values()]
            assert any(served)
            api.body = {**api.body, "spec": {**body["spec"], "engine": {**body["spec"]["engine"], "image": "x:2"}}}
            api.body["metadata"] = {**api.body["metadata"], "generation": 4}
            controlling.on_pool("MODIFIED", api.body)

        loop.call_later(EDIT_S / 2, serve)
        loop.call_later(EDIT_S, edit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EDIT_S + 300):
                await controlling.run()

    in_virtual_time(run())
    assert api.pending_at_s is not None
    assert api.stops_at_s is not None
    took_s = api.stops_at_s - api.pending_at_s
    assert least_s - 1 <= took_s <= least_s + 2 * controller.TROUBLED_S
