"""The contract of a regulator: it sees each step that ended, and shapes the plan of each step that begins."""

from typing import ClassVar, Protocol

from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan


class Regulator(Protocol):
    """One decision about steps. An engine owns one object of each regulator that its settings name."""

    SAFETY: ClassVar[bool]
    """Whether it protects the engine's memory. Only these regulators act while the engine is in bypass."""

    def observe(self, facts: StepFacts) -> None:
        """A step ended."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        """The plan of the step that begins now. `plan` holds the operator's bounds and the changes of the regulators
        before this one. `bounds` keeps the result safe, so a regulator may return any plan."""


class Memoryless:
    """The base of regulators that learn nothing from past steps. The engine does not tell them of any."""

    SAFETY: ClassVar[bool] = False

    def observe(self, facts: StepFacts) -> None:
        return None
