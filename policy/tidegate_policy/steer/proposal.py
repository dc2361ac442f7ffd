"""What a selector answers, and what every selector implements. `selectors` lists the implementations."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tidegate_policy.qos import Qos


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A policy, and the rule and the evidence for it; `emergency` asks the guards for a bypass."""

    policy: str
    reason: str
    emergency: bool = False


class Selector(Protocol):
    """Chooses the policy that a pool should have. A selector keeps no state between proposals."""

    def propose(self, qos: Qos, active: str, allow: Collection[str]) -> Proposal | None:
        """The policy that `qos` asks for, out of `allow`; None when the `active` policy should stay."""
