"""The regulators, and the one registry of their names.

A regulator is one module and one line in `REGULATORS`. The engine setting `regulators` names those that run, in the order
in which they shape the plan. None runs by default.
"""

from collections.abc import Callable, Iterable

from tidegate_policy.engine.regulators.arranger import Arranger
from tidegate_policy.engine.regulators.fence import Fence
from tidegate_policy.engine.regulators.load_band import LoadBand
from tidegate_policy.engine.regulators.memory_limit import MemoryLimit
from tidegate_policy.engine.regulators.regulator import Regulator
from tidegate_policy.engine.regulators.slack_chunks import SlackChunks
from tidegate_policy.engine.regulators.slot_preemption import SlotPreemption
from tidegate_policy.engine.regulators.stage_awareness import StageAwareness, StrictStageAwareness

REGULATORS: dict[str, Callable[[], Regulator]] = {
    "arranger": Arranger,
    "stage-awareness": StageAwareness,
    "strict-stage-awareness": StrictStageAwareness,
    "slack-chunks": SlackChunks,
    "slot-preemption": SlotPreemption,
    "fence": Fence,
    "load-band": LoadBand,
    "memory-limit": MemoryLimit,
}


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
