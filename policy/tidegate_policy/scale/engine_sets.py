"""The cheapest set of engines that carries a load, over kinds of engines with different prices and speeds.

Each engine of a kind carries a share of the load, and a set carries the sum of its shares. So the cheapest set is the
solution of a covering knapsack problem, which is found by branch and bound. Engines that run already are preferred to
engines that must be started, by the price of a start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_NODES = 4000
"""Nodes of the search. After these, the best set so far counts; the first one is that of a greedy choice."""
UNFIT = 100.0
"""An engine that cannot meet the targets costs so many times its price, so it is the last choice."""
SLIGHT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The engines of one node pool."""

    name: str
    price: float
    """Of one engine, for an hour. Prices are relative."""
    share: float
    """Of the load, that one engine carries; not negative."""
    low: int
    high: int
    """The set has from `low` to `high` engines of this kind."""
    present: int = 0
    """Engines that need no start."""
    start_price: float = 0.0
    """What a start costs."""
    fit: bool = True
    """Whether the engines can meet the targets of the load."""


class _Item(NamedTuple):
    name: str
    price: float
    share: float
    most: int


def cheapest(kinds: Sequence[Kind], load: float = 1.0) -> dict[str, int]:
    """Engines of each kind, by name: the cheapest set whose shares add up to `load`; all engines if none does."""
    counts = {kind.name: kind.low for kind in kinds}
    left = load - sum(kind.low * kind.share for kind in kinds)
    items = sorted(
        (item for kind in kinds for item in _items(kind) if item.most > 0 and item.share > 0.0),
        key=lambda item: (item.price / item.share, item.name),
    )
    for name, added in _search(items, left).items():
        counts[name] += added
    return counts


def carried(kinds: Sequence[Kind], counts: Mapping[str, int]) -> float:
    """The share of the load that the engines carry."""
    return sum(kind.share * counts.get(kind.name, 0) for kind in kinds)


def price(kinds: Sequence[Kind], counts: Mapping[str, int]) -> float:
    """Of the engines, for an hour, without starts."""
    return sum(kind.price * counts.get(kind.name, 0) for kind in kinds)


def _items(kind: Kind) -> tuple[_Item, _Item]:
    """The engines above `low`: those that are present, and those that must be started."""
    high = max(kind.high, kind.low)
    running = min(max(kind.present, kind.low), high)
    each = kind.price * (1.0 if kind.fit else UNFIT)
    return (
        _Item(kind.name, each, kind.share, running - kind.low),
        _Item(kind.name, each + kind.start_price, kind.share, high - running),
    )


class _Search:
    """The state of one search."""

    def __init__(self, items: Sequence[_Item]) -> None:
        self.items = items
        self.best: list[int] | None = None
        self.best_price = math.inf
        self.nodes = 0
        reach = 0.0
        self.reach = [0.0] * (len(items) + 1)
        """What the items from each index on can carry together."""
        for index in range(len(items) - 1, -1, -1):
            reach += items[index].share * items[index].most
            self.reach[index] = reach

    def run(self, index: int, left: float, price: float, counts: list[int]) -> None:
        """Tries all numbers of the items from `index` on, the greatest first, unless no cheaper set can follow. Items are
        in the order of their price for each share, so the first set is the greedy one."""
        self.nodes += 1
        if left <= SLIGHT:
            if price < self.best_price - SLIGHT:
                self.best, self.best_price = [*counts, *([0] * (len(self.items) - index))], price
            return
        if index == len(self.items) or self.reach[index] < left - SLIGHT:
            return
        item = self.items[index]
        most = min(item.most, math.ceil(left / item.share - SLIGHT))
        for count in range(most, -1, -1):
            if self.nodes > MOST_NODES and self.best is not None:
                return
            rest = left - count * item.share
            so_far = price + count * item.price
            if so_far + self._least_price(index + 1, rest) >= self.best_price - SLIGHT:
                continue
            counts.append(count)
            self.run(index + 1, rest, so_far, counts)
            counts.pop()

    def _least_price(self, index: int, left: float) -> float:
        """No set of the items from `index` on that carries `left` is cheaper."""
        if left <= SLIGHT:
            return 0.0
        if index == len(self.items):
            return math.inf
        return left * self.items[index].price / self.items[index].share


def _search(items: Sequence[_Item], left: float) -> dict[str, int]:
    added: dict[str, int] = {}
    search = _Search(items)
    search.run(0, left, 0.0, [])
    found = search.best if search.best is not None else [item.most for item in items]
    for item, count in zip(items, found, strict=True):
        added[item.name] = added.get(item.name, 0) + count
    return added
