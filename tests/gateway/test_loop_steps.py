"""Long pieces of work take turns, and other work runs between their steps."""

import asyncio

from tidegate_gateway import loop_steps


async def test_one_step_runs_in_a_turn_of_the_event_loop_however_many_lists_are_converted() -> None:
    steps, turn, in_turn = loop_steps.LoopSteps(), 0, dict[int, int]()

    def convert(item: int) -> int:
        in_turn[turn] = in_turn.get(turn, 0) + 1
        return 2 * item

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    items = range(5 * loop_steps.AT_ONCE + 1)
    found = await asyncio.gather(*(steps.convert(items, convert) for _ in range(20)))
    counting.cancel()
    assert found == [[2 * item for item in items]] * 20
    assert max(in_turn.values()) <= 2 * loop_steps.AT_ONCE, "a turn of the counter may see parts of two"


async def test_a_conversion_that_is_cancelled_gives_its_turn_to_the_next() -> None:
    steps = loop_steps.LoopSteps()
    cancelled = asyncio.create_task(steps.convert(range(1000), str))
    other = asyncio.create_task(steps.convert(range(1000), str))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert len(await other) == 1000
