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
            notes, spec = manifest["spec"]["template"]["metadata"]["annotations"], manifest["spec"]["template"]["spec"]
            lacks = {**test_trouble_in_time.UNSCHEDULABLE, "message": "the sentence: 3 Insufficient nvidia.com/gpu."}
            pod = test_trouble_in_time.pod({"conditions": [lacks]})
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            self.placed = [pod | {"metadata": pod["metadata"] | {"labels": labels, "annotations": notes}, "spec": spec}]
            if self.pending_at_s is None:
                self.pending_at_s = asyncio.get_running_loop().time()
                self.watches.on_child("MODIFIED", made)
                self.watches.on_pod("ADDED", self.placed[0])
            if manifest["spec"]["strategy"]["rollingUpdate"] == engine_place.IN_PLACE:
                self.stops_at_s = self.stops_at_s or asyncio.get_running_loop().time()
        return made


def test_the_operator_looks_again_when_the_lack_of_room_has_lasted(in_virtual_time):
    body = test_render.body(replicas=4)
    body["metadata"]["annotations"] = {"tidegate.dev/operator": conftest.RULES.operator}
    api, cache = Full(body), watch_cache.WatchCache()

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
    assert engine_room.PATIENCE_S <= took_s <= engine_room.PATIENCE_S + 2 * controller.TROUBLED_S
