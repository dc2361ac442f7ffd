"""The time limits of the steps of one call."""

import asyncio

import pytest

from tidegate_gateway.lifecycle import watchdog
from tidegate_gateway.openai import error_table


async def after(seconds: float, value: str = "block") -> str:
    await asyncio.sleep(seconds)
    return value


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_a_step_in_time_gives_its_result() -> None:
    assert await watchdog.Watchdog().within(5, after(0), "slept") == "block"


async def test_a_step_that_takes_too_long_is_an_engine_timeout_and_the_task_goes_on() -> None:
    with pytest.raises(error_table.EngineTrouble) as caught:
        await watchdog.Watchdog().within(0.01, never(), "sent nothing more")
    assert caught.value.code == "engine_timeout"
    assert "sent nothing more within 0.01 s" in str(caught.value)
    assert cancelling() == 0


async def test_the_sentence_has_the_limit_and_not_what_was_left_of_it() -> None:
    with pytest.raises(error_table.EngineTrouble) as caught:
        await watchdog.Watchdog().within(-0.01, never(), "sent no token", of_s=30.0)
    assert "sent no token within 30 s" in str(caught.value)


async def test_the_limit_of_an_earlier_step_does_not_cut_a_later_step() -> None:
    watched = watchdog.Watchdog()
    await watched.within(0.02, after(0), "slept")
    assert await watched.within(5, after(0.05, "late"), "slept") == "late"


async def test_a_step_may_have_a_shorter_limit_than_the_step_before() -> None:
    watched = watchdog.Watchdog()
    await watched.within(60, after(0), "slept")
    with pytest.raises(error_table.EngineTrouble):
        await watched.within(0.01, never(), "slept")


async def test_an_interruption_ends_the_present_step_and_each_step_after_it() -> None:
    watched, error = watchdog.Watchdog(), error_table.GatewayError("workflow_ended", "the workflow was cancelled")
    asyncio.get_running_loop().call_soon(watched.interrupt, error)
    for _ in range(2):
        with pytest.raises(error_table.GatewayError) as caught:
            await watched.within(5, never(), "slept")
        assert caught.value is error
    assert cancelling() == 0
    watched.reset()
    assert await watched.within(5, after(0), "slept") == "block"


async def test_a_limit_is_extended_up_to_the_latest_instant() -> None:
    loop, watched = asyncio.get_running_loop(), watchdog.Watchdog()
    watched.latest_at_s = loop.time() + 0.1
    loop.call_soon(watched.extend_timeout, 60.0)
    assert await watched.within(0.02, after(0.05), "slept") == "block"
    loop.call_soon(watched.extend_timeout, 60.0)
    with pytest.raises(error_table.EngineTrouble):
        await watched.within(0.02, never(), "slept")


async def test_a_client_that_hangs_up_cancels_the_step() -> None:
    waiting = asyncio.create_task(watchdog.Watchdog().within(5, never(), "slept"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_client_that_hangs_up_at_the_limit_is_a_hang_up() -> None:
    watched = watchdog.Watchdog()
    waiting = asyncio.create_task(watched.within(5, never(), "slept"))
    await asyncio.sleep(0)
    watched.interrupt(error_table.GatewayError("workflow_ended", "the workflow was cancelled"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
