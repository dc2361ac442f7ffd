"""Long pieces of work take turns, and other work runs between their steps."""

import asyncio
import functools

import event_loop_turns

from tidegate_gateway import loop_steps


async def test_one_step_runs_in_a_turn_of_the_event_loop_however_many_lists_are_converted() -> None:
    steps, turns = loop_steps.LoopSteps(), event_loop_turns.Turns()

    def convert(item: int) -> int:
        turns.add()
        return 2 * item

    items = range(5 * loop_steps.AT_ONCE + 1)
    async with event_loop_turns.running(turns):
        found = await asyncio.gather(*(steps.convert(items, convert) for _ in range(20)))
    assert found == [[2 * item for item in items]] * 20
    assert max(turns.counts.values()) <= 2 * loop_steps.AT_ONCE, "a turn of the counter may see parts of two"


async def test_the_long_work_of_one_tenant_does_not_wait_for_all_work_of_another_one() -> None:
    steps, done = loop_steps.LoopSteps(), list[str]()

    async def work(tenant: str, count: int) -> None:
        for _ in range(count):
            await steps.of(tenant).next()
            done.append(tenant)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(150):
            tasks.create_task(work("many", 10))
        tasks.create_task(work("one", 10))
    assert done.index("one") <= 150
    assert [each for each in done if each == "one"] == ["one"] * 10
    last = len(done) - 1 - done[::-1].index("one")
    assert last - done.index("one") <= 40, "at least every fourth step is of the tenant with one piece of work"


async def test_a_conversion_that_is_cancelled_gives_its_turn_to_the_next() -> None:
    steps = loop_steps.LoopSteps()
    cancelled = asyncio.create_task(steps.convert(range(1000), str))
    other = asyncio.create_task(steps.convert(range(1000), str))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert len(await other) == 1000


async def test_the_tenants_that_wait_for_a_turn_take_turns() -> None:
    turns, done = loop_steps.TenantTurns(), list[str]()

    async def one(tenant: str) -> None:
        await turns.take(tenant)
        done.append(tenant)
        await asyncio.sleep(0)
        turns.give_back()

    await turns.take("first")
    tasks = [asyncio.create_task(one(tenant)) for tenant in "aaaaaabc"]
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*tasks)
    assert "".join(done) == "abcaaaaa"


async def test_a_turn_that_is_cancelled_goes_to_the_next_one() -> None:
    turns, done = loop_steps.TenantTurns(), list[int]()

    async def one(number: int) -> None:
        await turns.take("a")
        done.append(number)
        turns.give_back()

    await turns.take("a")
    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # before its turn
    await asyncio.sleep(0)
    turns.give_back()
    tasks[1].cancel()  # as its turn comes
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [2, 3]
    async with asyncio.timeout(1):
        await turns.take("a")  # it is free again


async def test_other_work_runs_between_two_turns() -> None:
    turns, counts = loop_steps.TenantTurns(), [0, 0]

    async def other() -> None:
        while counts[0] < 100:
            counts[1] += 1
            await asyncio.sleep(0)

    async def one() -> None:
        await turns.next("a")
        counts[0] += 1

    await asyncio.gather(other(), *(one() for _ in range(100)))
    assert counts[1] >= 100


async def test_few_calls_end_in_one_turn_of_the_event_loop() -> None:
    endings, turns, ended = loop_steps.Endings(), event_loop_turns.Turns(), list[int]()
    count = 20 * loop_steps.ENDS_AT_ONCE

    def end(number: int) -> None:
        turns.add()
        ended.append(number)

    async with event_loop_turns.running(turns):
        for number in range(count):
            endings.end(functools.partial(end, number))
        assert len(ended) == loop_steps.ENDS_AT_ONCE, "the first ones end at once"
        while len(ended) < count:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        endings.end(functools.partial(end, count))
    assert ended == list(range(count + 1))
    assert max(turns.counts.values()) <= 2 * loop_steps.ENDS_AT_ONCE, "a turn of the counter may see parts of two"


async def test_the_line_of_ends_has_a_bound_while_clients_hang_up_at_a_steady_rate() -> None:
    endings, ended = loop_steps.Endings(), list[int]()
    per_turn = 64  # as many connections as a port accepts in one turn of the event loop
    for turn in range(1000):
        for _ in range(per_turn):
            endings.end(functools.partial(ended.append, turn))
        await asyncio.sleep(0)
    waiting = 1000 * per_turn - len(ended)
    assert waiting <= 1.2 * per_turn * loop_steps.ENDS_PART, "eight in each turn would leave 56,000"
    while len(ended) < 1000 * per_turn:
        await asyncio.sleep(0)
    assert ended == sorted(ended)
