"""Calls of an honest client that come at a steady rate, and what their times say."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def made(call: Callable[[], Awaitable[T]], *, count: int, within_s: float) -> list[T]:
    """The results of so many calls, which begin at equal distances within the time."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(call()))
        await asyncio.sleep(within_s / count)
    return list(await asyncio.gather(*tasks))


def percentile(times: Iterable[float], share: float) -> float:
    known = sorted(times)
    return known[int(share * (len(known) - 1))]
