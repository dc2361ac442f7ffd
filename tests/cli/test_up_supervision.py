"""`tidegate up` names the engines that do not serve by the policy in force."""

import argparse
import asyncio
import contextlib

import pytest

import control_double
from tidegate_cli import up_supervision


async def test_an_engine_that_rejects_the_policy_is_named_once_and_again_when_it_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = control_double.FakeEngine()
    engine.report, engine.rejects = control_double.calm(), True
    await engine.start()
    options = argparse.Namespace(policy="auto", admin_port=1)
    steering = asyncio.create_task(up_supervision._steer(options, {engine.address: "a100"}, ""))
    told = ""

    async def until(words: str) -> None:
        nonlocal told
        async with asyncio.timeout(30):
            while words not in told:
                await asyncio.sleep(0.1)
                told += capsys.readouterr().err

    try:
        await until("engine a100 does not serve by urgency: UNAVAILABLE: not now\n")
        await asyncio.sleep(1.5 * up_supervision.OBSERVATION_S)
        engine.rejects = False
        await until("engine a100 follows again\n")
    finally:
        steering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await steering
        await engine.stop()
    assert told.count("does not serve by") == 1
