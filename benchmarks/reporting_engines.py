"""The control ports of all pretended engines, and the admin ports of all pretended gateways, in one process.

kwok gives pods addresses of 127.77.0.0/16, which are all of this machine, so one listener on 0.0.0.0 answers for each of
them. The reports are those of an idle simulated engine. Each engine answers any number of callers, because all engines are
one here.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
from aiohttp import web

import tidegate_profiles
from tidegate_control import translation
from tidegate_policy import cost
from tidegate_proto.v1 import control_pb2, control_pb2_grpc
from tidegate_sim import loop_governor, realtime

PROFILE = "a100-70b-tp8"
STATE = {
    "policy": {"name": "urgency", "source": "steered", "reason": "", "left_s": None},
    "dispatch": {"alpha": 0.2},
    "targets": {},
}


class Engine(control_pb2_grpc.EngineControlServicer):
    """Sends one report again and again."""

    def __init__(self, report: control_pb2.QosReport) -> None:
        self._report = report

    async def WatchQos(  # type: ignore[override]
        self, request: control_pb2.WatchQosRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.QosReport]:
        while True:
            await asyncio.sleep(max(request.period_s, request.idle_period_s))  # nothing happens here
            yield self._report

    async def SetPolicy(  # type: ignore[override]
        self, request: control_pb2.SetPolicyRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.SetPolicyResponse:
        self._report.policy = request.policy
        return control_pb2.SetPolicyResponse(policy=request.policy, previous=request.policy, reordered=0)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    engine = realtime.RealtimeEngine(cost.from_mapping(tidegate_profiles.load(PROFILE)["cost"]))
    governor = loop_governor.LoopGovernor(engine, PROFILE, loop)
    report = await loop.run_in_executor(None, lambda: translation.to_report(governor.watch().cut()))
    server = grpc.aio.server()
    control_pb2_grpc.add_EngineControlServicer_to_server(Engine(report), server)
    server.add_insecure_port("0.0.0.0:9001")
    await server.start()
    admin = web.Application()

    async def state(request: web.Request) -> web.Response:
        return web.json_response(STATE)

    admin.router.add_get("/admin/state", state)
    runner = web.AppRunner(admin, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 8001).start()
    print("engines and gateways report", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))
