"""Values of an object that are computed when they are first read, and then kept as attributes.

`functools.cached_property` takes a lock at each first read in Python 3.11, and it gives the object a dictionary of its own.
An object that lives for one step of an engine pays for both in each step.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class kept(Generic[T]):  # it is used like `property`
    """A property of an object of one thread that never changes after its first read."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value = self._find(instance)
        setattr(instance, self._name, value)
        return value
