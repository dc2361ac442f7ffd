"""The entries of a heap in ascending order, without a change or a copy of the heap."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

Entry = TypeVar("Entry", bound=tuple[Any, ...])


def ascending(heap: Sequence[Entry]) -> Iterator[Entry]:
    """The first k entries cost O(k log k). The heap must not change meanwhile."""
    push, pop = heapq.heappush, heapq.heappop
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        entry, index = pop(frontier)
        yield entry
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                push(frontier, (heap[child], child))
