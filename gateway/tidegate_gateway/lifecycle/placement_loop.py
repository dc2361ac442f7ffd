"""What waits beside the placements of all calls: a loop that tells the core the time, and a gateway that leaves."""

import asyncio

from tidegate_gateway.lifecycle import placement
from tidegate_gateway.observe import background_loop

TICK_S = 0.1
LOOK_S = 0.02


async def run(placements: placement.Placements, loops: background_loop.BackgroundLoops) -> None:
    """Tells the core that time passes, until cancelled."""

    async def tick() -> None:
        while placements.on_tick():
            await asyncio.sleep(0)  # thousands of calls may expire at one instant

    while True:
        await asyncio.sleep(TICK_S)
        await loops.step("tick", tick)


async def drained(placements: placement.Placements) -> None:
    """Returns when no call is left."""
    while placements.in_progress:
        await asyncio.sleep(LOOK_S)
