"""Which scheduling policy orders the waiting calls, with which parameters? The group `policy` of the settings."""

from dataclasses import dataclass

from tidegate_gateway import settings_decoder
from tidegate_policy import policies


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParameter:
    """A parameter of a scheduling policy."""

    policy: str
    """The scheduling policy that has the parameter."""
    name: str
    """Its name on the page of the policy in docs/policies."""
    value: float
    """In the unit that the page names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The scheduling policy of the queue."""

    name: str = policies.DEFAULT
    """The scheduling policy of the waiting calls, until steering or a person chooses another one."""
    parameters: tuple[PolicyParameter, ...] = ()
    """Parameters that count whenever their policy is in force; the others have their defaults (docs/policies)."""

    def parameters_of(self, policy: str) -> dict[str, float]:
        """The parameters of one policy that are set, by name."""
        return {item.name: item.value for item in self.parameters if item.policy == policy}


def problems(policy: Policy) -> list[str]:
    """What is wrong with this group."""
    found = []
    if policy.name not in policies.POLICIES:
        near = settings_decoder.suggestion(policy.name, policies.POLICIES)
        found.append(f"policy.name {policy.name!r} is not a policy; {near}")
    for i, item in enumerate(policy.parameters):
        try:
            policies.create(item.policy, {item.name: item.value})
        except ValueError as error:
            found.append(f"policy.parameters[{i}]: {error}")
    if len({(item.policy, item.name) for item in policy.parameters}) < len(policy.parameters):
        found.append("policy.parameters has the same parameter twice")
    return found
