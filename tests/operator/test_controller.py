"""The controller's queues, without a cluster."""

import asyncio
import contextlib
import itertools

from tidegate_operator import cluster, controller, operator_doubles
from tidegate_operator.cluster import watch_cache

from . import conftest

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

    async def close(self) -> None:
        return None


class NoScaling:
    """Pools without an autoscaler."""

    async def scale(self, key):
        return PERIOD_S


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
        controlling = controller.Controller(
            NoApi(), watch_cache.WatchCache(), conftest.RULES, steering, NoScaling(), NoCanaries(), resync_s=3600
        )
        for number in range(POOLS):
            controlling.on_pool("ADDED", pool(f"silent-{number}"))
        controlling.on_pool("ADDED", pool("lively"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(300):
                await controlling.run()

    in_virtual_time(run())
    periods = [after - before for before, after in itertools.pairwise(steering.steered_at_s)]
    longest = max(periods)
    assert longest <= PERIOD_S + 0.1


def pool(name):
    body = operator_doubles.pool(name)
    return {**body, "metadata": {"namespace": "prod", "name": name, "uid": name, "generation": 1}}


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
