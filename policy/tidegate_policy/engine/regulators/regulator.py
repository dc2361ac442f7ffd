"""The contract of a regulator: it sees the facts of each step and shapes the plan of the next."""

from typing import Protocol

from tidegate_policy.engine.step import StepFacts, StepPlan


class Regulator(Protocol):
    """One control loop of an engine. An engine owns one object of each regulator that its settings name."""

    def shape(self, facts: StepFacts, plan: StepPlan) -> StepPlan:
        """The plan of the next step. `plan` holds the operator's bounds and the changes of the regulators before this
        one. `bounds` keeps the result safe, so a regulator may return any plan."""
