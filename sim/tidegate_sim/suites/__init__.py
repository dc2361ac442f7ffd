"""The benchmark suites: one file for each, named like the suite, which assigns its `contract.Suite` to `SUITE`.

The file names are the registry, so that `tidegate bench --help` lists the suites without importing vLLM.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate_sim.suite import Suite

NAMES: tuple[str, ...] = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> "Suite":
    """The suite `name`, one of `NAMES`."""
    suite: Suite = importlib.import_module(f"{__name__}.{name}").SUITE
    return suite
