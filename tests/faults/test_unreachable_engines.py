"""Engines that cannot be reached cost their pool's operator little."""

import asyncio
import logging
import os
import pathlib

import pytest

from tidegate_control import control_connections

ENGINES = 600


def resident_mb() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


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
async def test_six_hundred_unreachable_engines_cost_little_log_and_memory(figure, caplog):
    caplog.set_level(logging.INFO)
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(2.5, 2.5))
    try:
        await connections.retarget([f"127.0.0.1:{20_000 + number}" for number in range(ENGINES)])
        sizes = []
        for _ in range(8):
            await asyncio.sleep(5)
            connections.take_reports()
            await connections.put_in_force("fcfs", "a test", {}, {})
            sizes.append(resident_mb())
    finally:
        await connections.close()
    growth = (sizes[-1] - sizes[1]) * 60 / 30
    lines = len(caplog.records)
    figure("operator: log lines of 600 unreachable engines in 40 s", str(lines), goal="0", met=not lines)
    figure("operator: growth with 600 unreachable engines", f"{growth:.1f} MB/min", goal="< 6 MB/min", met=growth < 6)
    assert not lines
    assert growth < 6
