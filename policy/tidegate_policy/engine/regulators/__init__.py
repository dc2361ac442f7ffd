"""The regulators, and the one registry of their names.

A regulator is one module and one line in `REGULATORS`. The engine setting `regulators` names those that run. They shape
the plan in the order of the registry: first those that limit the step, then the one that preempts for a call that may
start, and last the fence, which must know which calls yield. None runs by default.
"""

from collections.abc import Callable, Iterable

from tidegate_policy.engine.regulators.arranger import Arranger
from tidegate_policy.engine.regulators.fence import Fence
from tidegate_policy.engine.regulators.load_band import LoadBand
from tidegate_policy.engine.regulators.memory_limit import MemoryLimit
from tidegate_policy.engine.regulators.prefill_order import PrefillOrder
from tidegate_policy.engine.regulators.regulator import Regulator
from tidegate_policy.engine.regulators.slack_chunks import SlackChunks
from tidegate_policy.engine.regulators.slot_preemption import SlotPreemption
from tidegate_policy.engine.regulators.stage_awareness import StageAwareness, StrictStageAwareness

REGULATORS: dict[str, Callable[[], Regulator]] = {
    "arranger": Arranger,
    "stage-awareness": StageAwareness,
    "strict-stage-awareness": StrictStageAwareness,
    "prefill-order": PrefillOrder,
    "slack-chunks": SlackChunks,
    "load-band": LoadBand,
    "memory-limit": MemoryLimit,
    "slot-preemption": SlotPreemption,
    "fence": Fence,
}


class UnknownRegulator(ValueError):
    """The name is not in `REGULATORS`; the message lists the names that are."""


def create(names: Iterable[str]) -> list[Regulator]:
    """New regulators by name, each once, in the order of the registry. Raises `UnknownRegulator`."""
    chosen = set(names)
    if unknown := sorted(chosen - REGULATORS.keys()):
        raise UnknownRegulator(f"unknown regulator {unknown[0]!r}; known are {', '.join(sorted(REGULATORS))}")
    return [make() for name, make in REGULATORS.items() if name in chosen]


__all__ = ["REGULATORS", "Regulator", "UnknownRegulator", "create"]
