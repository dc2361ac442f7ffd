"""The regulators, and the one registry of their names.

A regulator is one module and one line in `REGULATORS`. The engine setting `regulators` names those that run, in the order
in which they shape the plan. No regulator is shipped yet.
"""

from collections.abc import Callable, Iterable

from tidegate_policy.engine.regulators.regulator import Regulator

REGULATORS: dict[str, Callable[[], Regulator]] = {}


class UnknownRegulator(ValueError):
    """The name is not in `REGULATORS`; the message lists the names that are."""


def create(names: Iterable[str]) -> list[Regulator]:
    """New regulators by name. Raises `UnknownRegulator`."""
    made = []
    for name in names:
        if name not in REGULATORS:
            known = ", ".join(sorted(REGULATORS)) or "none"
            raise UnknownRegulator(f"unknown regulator {name!r}; known are {known}")
        made.append(REGULATORS[name]())
    return made


__all__ = ["REGULATORS", "Regulator", "UnknownRegulator", "create"]
