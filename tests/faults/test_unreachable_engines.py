"""Engines that cannot be reached cost their pool's operator little."""

import asyncio
import json
import subprocess

import pytest
import test_parsing_floods

from tidegate_control import control_connections

ENGINES = 600


# Its argument: the number of engines. The program has a process of its own: its memory is that of the connections.
WATCH = """
import asyncio, json, logging, os, pathlib, sys
from tidegate_control import control_connections

def resident_mb():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

async def watch(engines):
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(2.5, 2.5))
    sizes_mb = []
    try:
        await connections.retarget([f"127.0.0.1:{20_000 + number}" for number in range(engines)])
        for _ in range(8):
            await asyncio.sleep(5)
            reports = connections.take_reports()
            assert len(reports) == engines and not any(reports.values()), "each engine is watched, and none reports"
            await connections.put_in_force("fcfs", "a test", {}, {})
            sizes_mb.append(resident_mb())
    finally:
        await connections.close()
    print(json.dumps(sizes_mb))

logging.basicConfig(level=logging.INFO)
asyncio.run(watch(int(sys.argv[1])))
"""


async def test_an_engine_that_cannot_be_reached_gets_one_call_and_not_one_for_each_observation():
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(2.5, 2.5))
    await connections.retarget(["127.0.0.1:1"])
    try:
        first = await connections.put_in_force("fcfs", "a test", {}, {})
        assert "UNAVAILABLE" in first["127.0.0.1:1"]
        async with asyncio.timeout(10):
            while await connections.put_in_force("fcfs", "a test", {}, {}):
                await asyncio.sleep(0.05)  # the first attempt to open the stream of reports is under way
        assert connections.take_reports() == {"127.0.0.1:1": []}
    finally:
        await connections.close()


@pytest.mark.faults
async def test_six_hundred_unreachable_engines_cost_little_log_and_memory(figure):
    async with test_parsing_floods.attack(WATCH, ENGINES, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        answer, log = await asyncio.wait_for(child.communicate(), 120)
    assert not child.returncode, log.decode()
    lines, sizes_mb = log.decode().splitlines(), json.loads(answer)
    growth = (sizes_mb[-1] - sizes_mb[1]) * 60 / 30
    figure("operator: log lines of 600 unreachable engines in 40 s", str(len(lines)), goal="0", met=not lines)
    figure("operator: growth with 600 unreachable engines", f"{growth:.1f} MB/min", goal="< 6 MB/min", met=growth < 6)
    assert not lines
    assert growth < 6
