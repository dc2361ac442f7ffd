"""A line in which names take turns, so that one who brings many keeps nobody else waiting."""

import collections
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnLine(Generic[T]):
    """Those that wait, each under a name, such as its tenant or its address. The names take turns, and those of one name
    keep their order. Each operation but `shorten` takes constant time."""

    def __init__(self) -> None:
        self._lines: collections.OrderedDict[str, collections.OrderedDict[T, None]] = collections.OrderedDict()
        """By name; the name whose turn is next comes first."""
        self._name_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._name_of)

    def __iter__(self) -> Iterator[T]:
        """Those that wait, the one that has waited longest first."""
        return iter(self._name_of)

    def add(self, name: str, item: T) -> None:
        """The item waits from now on, behind those of its name."""
        self._name_of[item] = name
        self._lines.setdefault(name, collections.OrderedDict())[item] = None

    def remove(self, item: T) -> None:
        """The item waits no longer. One that does not wait is ignored."""
        name = self._name_of.pop(item, None)
        if name is not None:
            line = self._lines[name]
            del line[item]
            if not line:
                del self._lines[name]

    def pop(self) -> T:
        """The item whose turn it is, which waits no longer. Raises `KeyError` if none waits."""
        name, line = self._lines.popitem(last=False)
        item, _ = line.popitem(last=False)
        del self._name_of[item]
        if line:
            self._lines[name] = line  # behind the other names
        return item

    def shorten(self, name: str) -> T:
        """The newest item of this name, or of the name with the longest line if this one's is shorter than the mean. It
        waits no longer. The second case takes time for each name. Raises `KeyError` if none waits under this name."""
        line = self._lines[name]
        if len(line) * len(self._lines) < len(self._name_of):
            line = max(self._lines.values(), key=len)
        item = next(reversed(line))
        self.remove(item)
        return item
