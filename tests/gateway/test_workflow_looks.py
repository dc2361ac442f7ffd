"""Looks at workflows that are watched: shared, and paced for each tenant."""

import asyncio
import functools
import gc
from collections import Counter

import pytest

from tidegate_gateway.workflows import workflow_looks


async def test_watchers_of_the_same_workflow_share_a_look_that_has_not_begun() -> None:
    looks: workflow_looks.WorkflowLooks[int] = workflow_looks.WorkflowLooks()
    begun = 0

    async def look() -> int:
        nonlocal begun
        begun += 1
        return begun

    assert await asyncio.gather(*(looks.look("w", "t", look) for _ in range(500))) == [1] * 500
    assert await looks.look("w", "t", look) == 2


async def test_a_tenant_with_many_watches_delays_its_own_looks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_looks, "LOOKS_PER_S", 2.0)
    looks: workflow_looks.WorkflowLooks[str] = workflow_looks.WorkflowLooks()
    seen: Counter[str] = Counter()

    async def look(tenant: str) -> str:
        seen[tenant] += 1
        return tenant

    many = [asyncio.create_task(looks.look(("flood", i), "flood", lambda: look("flood"))) for i in range(1000)]
    await asyncio.sleep(0)
    assert await looks.look("w", "honest", lambda: look("honest")) == "honest"
    assert seen["flood"] <= 2
    for one in many:
        one.cancel()


async def test_an_error_reaches_every_watcher_and_the_next_look_is_a_new_one() -> None:
    looks: workflow_looks.WorkflowLooks[int] = workflow_looks.WorkflowLooks()

    async def fails() -> int:
        raise LookupError("a test")

    found = await asyncio.gather(*(looks.look("w", None, fails) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [LookupError] * 3

    async def well() -> int:
        return 1

    assert await looks.look("w", None, well) == 1


async def test_a_look_that_fails_as_its_watcher_goes_is_no_line_of_the_log() -> None:
    looks: workflow_looks.WorkflowLooks[int] = workflow_looks.WorkflowLooks()
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    watchers = list[asyncio.Task[int]]()

    async def look() -> int:
        watchers[0].cancel()
        raise ValueError("no such workflow")

    watchers.append(asyncio.create_task(looks.look("w", "t", look)))
    with pytest.raises(asyncio.CancelledError):
        await watchers[0]
    watchers.clear()  # asyncio tells of an error that nobody took when its task is forgotten
    gc.collect()
    assert logged == []


async def test_a_look_that_nobody_waits_for_any_more_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_looks, "LOOKS_PER_S", 2.0)
    looks: workflow_looks.WorkflowLooks[int] = workflow_looks.WorkflowLooks()
    made = list[int]()

    async def look(number: int) -> int:
        made.append(number)
        return number

    before = asyncio.all_tasks()
    for number in range(1000):
        watcher = asyncio.create_task(looks.look(number, "t", functools.partial(look, number)))
        if number % 2:
            await asyncio.sleep(0)  # else it leaves before its task has run
        watcher.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert len(made) <= 1
    assert await asyncio.wait_for(looks.look("w", "t", functools.partial(look, -1)), timeout=30) == -1


async def test_a_look_goes_on_while_one_of_its_watchers_waits() -> None:
    looks: workflow_looks.WorkflowLooks[int] = workflow_looks.WorkflowLooks()

    async def look() -> int:
        return 1

    first, second = (asyncio.create_task(looks.look("w", "t", look)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
