"""The selectors by name, as `spec.policy.selector` of a ServingPool gives it."""

from collections.abc import Callable

from tidegate_policy.steer import proposal, rules

SELECTORS: dict[str, Callable[[], proposal.Selector]] = {"rules": rules.Rules}
