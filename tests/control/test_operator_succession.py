"""An operator dies between two calls of `SetPolicy`: one engine has the new policy, and the other one has the old policy.

The engines are real EngineControl servers on loopback. Time is handed in; only reports take real time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

import control_double
from tidegate_control import steering_driver
from tidegate_policy.steer import guards, steer_memory, steering_loop

SETTINGS = steering_loop.Settings(
    allow=("two-lane", "edf", "urgency", "fcfs"), interval_s=0.2, guards=guards.GuardSettings()
)
START_S = 1_000_000.0
Engines = Sequence[control_double.FakeEngine]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def driver(
    engines: Engines, state: guards.SteerState | None, now: float
) -> AsyncIterator[steering_driver.SteeringDriver]:
    made = steering_driver.SteeringDriver(state, SETTINGS, now=now)
    await made.retarget([engine.address for engine in engines])
    try:
        yield made
    finally:
        await made.close()


async def observe(made: steering_driver.SteeringDriver, engines: Engines, now: float) -> steering_loop.Outcome:
    made.engines.take_reports()
    await until(lambda: made.engines.reported() >= {engine.address for engine in engines})
    return made.observe(now, None)


@contextlib.asynccontextmanager
async def died_between_two_calls() -> AsyncIterator[tuple[Engines, guards.SteerState, guards.SteerState]]:
    """The engines after the death, and the state before the last decision and after it, as the status would have them."""
    engines = [control_double.FakeEngine() for _ in range(2)]
    for engine in engines:
        engine.report = control_double.calm()
        await engine.start()
    try:
        async with driver(engines, None, START_S) as first:
            before = (await observe(first, engines, START_S + 1)).state
            await first.enforce()
            for engine in engines:
                engine.report = control_double.blocked()
            await asyncio.sleep(0.15)  # a calm report may be on its way
            decided = await observe(first, engines, START_S + 100)
            assert decided.verdict.policy == "two-lane"
            engines[1].stalls = True
            enforcing = asyncio.create_task(first.enforce())
            await until(lambda: engines[0].policy == "two-lane")
            enforcing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await enforcing
        assert [engine.policy for engine in engines] == ["two-lane", "urgency"]
        engines[1].stalls = False
        yield engines, before, steer_memory.read(steer_memory.written(decided.state))
    finally:
        for engine in engines:
            await engine.stop()


async def test_the_successor_finishes_a_switch_that_the_status_has() -> None:
    async with died_between_two_calls() as (engines, _, written), driver(engines, written, START_S + 103) as successor:
        outcome = await observe(successor, engines, START_S + 104)
        assert outcome.verdict.kind is guards.Kind.KEEP
        assert await successor.enforce() == {}
        assert [engine.policy for engine in engines] == ["two-lane", "two-lane"]
        assert engines[0].set_to == ["urgency", "two-lane"], "the engine that follows is not set again"
        assert successor.not_following() == {}


@pytest.mark.parametrize("memory", ["of the decision before", "lost"])
async def test_the_successor_reverts_a_switch_that_the_status_does_not_have(memory: str) -> None:
    async with died_between_two_calls() as (engines, before, _):
        state = before if memory == "of the decision before" else None
        for engine in engines:
            engine.report = control_double.calm()
        await asyncio.sleep(0.15)  # a report of the other kind may be on its way
        async with driver(engines, state, START_S + 103) as successor:
            outcome = await observe(successor, engines, START_S + 104)
            assert outcome.state.active == "urgency"
            assert await successor.enforce() == {}
            assert [engine.policy for engine in engines] == ["urgency", "urgency"]
            assert engines[1].set_to == ["urgency"], "the engine that has it is not set again"


async def test_the_engine_that_lags_behind_is_named_until_it_follows() -> None:
    async with died_between_two_calls() as (engines, _, written), driver(engines, written, START_S + 103) as successor:
        engines[1].rejects = True
        await observe(successor, engines, START_S + 104)
        await successor.enforce()
        assert successor.not_following() == {engines[1].address: "UNAVAILABLE: not now"}
        assert [engine.policy for engine in engines] == ["two-lane", "urgency"]
        engines[1].rejects = False
        await observe(successor, engines, START_S + 105)
        await successor.enforce()
        assert engines[1].policy == "two-lane"
        assert successor.not_following() == {}
