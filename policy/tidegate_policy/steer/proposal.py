"""What a selector answers, and what every selector implements. `selectors` lists the implementations."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate_policy.qos import Qos

Memory = dict[str, Any]
"""What a selector remembers between two decisions: values of JSON only. The loop stores it with its state, so an operator
may die between any two decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A policy, and the rule and the evidence for it; `emergency` asks the guards for a bypass."""

    policy: str
    reason: str
    emergency: bool = False
    alternatives: tuple[str, ...] = ()
    """The other policies that the selector compared, best first."""
    expected: str = ""
    """What the selector expects of the switch; empty when it predicts nothing."""


class Selector(Protocol):
    """Chooses the policy that a pool should have. A selector is a value: all that it learns is in its memory."""

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        """The policy that `qos`, the service of the last interval under `active`, asks for, out of `allow`; None when the
        active policy should stay. The selector may change `memory`; it is empty at first."""
