"""The control ports of all pretended engines, and the admin ports of all pretended gateways, in one process.

kwok gives pods addresses of 127.77.0.0/16, which are all of this machine, so one listener on 0.0.0.0 answers for each of
them: one idle simulated engine reports for all. The token of the pools is in TIDEGATE_POOL_TOKEN.
"""

import asyncio
import os
import sys

from aiohttp import web

import tidegate_profiles
from tidegate_control import control_server, pool_token
from tidegate_policy import cost
from tidegate_sim import loop_governor, realtime

STATE = {
    "policy": {"name": "urgency", "source": "steered", "reason": "", "left_s": None},
    "dispatch": {"alpha": 0.2},
    "targets": {},
}


async def serve() -> None:
    model = cost.from_mapping(tidegate_profiles.load("a100-70b-tp8")["cost"])
    engine = realtime.RealtimeEngine(model)
    governor = loop_governor.LoopGovernor(engine, "a100-70b-tp8", asyncio.get_running_loop())
    token = pool_token.from_environment(os.environ)
    stop = control_server.serve(governor, address="0.0.0.0:9001", engine_version="0.32.0", token=token)
    admin = web.Application()

    async def state(request: web.Request) -> web.Response:
        return web.json_response(STATE)

    admin.router.add_get("/admin/state", state)
    runner = web.AppRunner(admin, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", 8001).start()
        print("ready", flush=True)
        await engine.run()
    finally:
        await runner.cleanup()
        stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))
