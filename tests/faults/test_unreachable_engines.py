"""Engines that cannot be reached, or that send frames without end, cost their pool's operator little."""

import asyncio
import json
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import test_parsing_floods

from tidegate_control import control_connections

ENGINES, FLOODING = 600, 80
LONGEST_S = 120.0

# Its argument: the addresses of the engines. The program has a process of its own: its memory is that of the connections.
WATCH = """
import asyncio, json, logging, os, pathlib, sys, time
from tidegate_control import control_connections

def resident_mb():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

async def watch(engines):
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(2.5, 2.5))
    sizes_mb, began_s = [resident_mb()], time.process_time()
    try:
        await connections.retarget(engines)
        for _ in range(8):
            await asyncio.sleep(5)
            reports = connections.take_reports()
            assert len(reports) == len(engines) and not any(reports.values()), "each engine is watched, and none reports"
            await connections.put_in_force("fcfs", "a test", {}, {})
            sizes_mb.append(resident_mb())
    finally:
        await connections.close()
    print(json.dumps({"sizes_mb": sizes_mb, "cpu_s": time.process_time() - began_s}))

logging.basicConfig(level=logging.INFO)
asyncio.run(watch(sys.argv[1].split(",")))
"""
# Its argument: how many engines it is. It takes connections at one port of so many addresses, which it prints. On each it
# sends settings and pings as fast as they are read, and reads what they cause.
FLOOD = """
import socket, sys, threading
frames = (bytes((0, 0, 0, 4)) + bytes(5) + bytes((0, 0, 8, 6)) + bytes(13)) * 1000

def drop(client):
    while client.recv(65536):
        pass

def serve(client):
    threading.Thread(target=drop, args=(client,), daemon=True).start()
    while True:
        client.sendall(frames)

threading.excepthook = lambda hook: None  # a client has gone
listener = socket.create_server(("0.0.0.0", 0), backlog=512)
port = listener.getsockname()[1]
print(",".join(f"127.1.0.{number + 1}:{port}" for number in range(int(sys.argv[1]))), flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


async def watched(engines: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """What a process that watches these engines says of its memory and time, and the lines of its log."""
    addresses = ",".join(engines)
    async with test_parsing_floods.attack(WATCH, addresses, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        answer, log = await asyncio.wait_for(child.communicate(), LONGEST_S)
    assert not child.returncode, log.decode()
    return json.loads(answer), log.decode().splitlines()


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
    found, lines = await watched(f"127.0.0.1:{20_000 + number}" for number in range(ENGINES))
    growth = (found["sizes_mb"][-1] - found["sizes_mb"][2]) * 60 / 30
    figure("operator: log lines of 600 unreachable engines in 40 s", str(len(lines)), goal="0", met=not lines)
    figure("operator: growth with 600 unreachable engines", f"{growth:.1f} MB/min", goal="< 6 MB/min", met=growth < 6)
    assert not lines
    assert growth < 6


@pytest.mark.faults
async def test_engines_that_send_frames_without_end_cost_little_memory_and_time(figure):
    async with test_parsing_floods.attack(FLOOD, FLOODING, stdout=subprocess.PIPE) as engines:
        assert engines.stdout is not None
        addresses = (await engines.stdout.readline()).decode().split(",")
        found, _ = await watched(addresses)
    growth_mb, cpu_s = max(found["sizes_mb"]) - found["sizes_mb"][0], found["cpu_s"]
    figure("operator: growth with 80 engines that flood", f"{growth_mb:.0f} MiB", goal="< 64 MiB", met=growth_mb < 64)
    figure("operator: CPU time of 40 s with 80 such engines", f"{cpu_s:.1f} s", goal="< 12 s", met=cpu_s < 12)
    assert growth_mb < 64
    assert cpu_s < 12
