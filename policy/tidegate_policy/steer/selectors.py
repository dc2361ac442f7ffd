"""The selectors by name, as `spec.policy.selector` of a ServingPool gives it."""

from collections.abc import Callable

from tidegate_policy.steer import bandit, changepoint, classifier, fixed_choice, llm_choice, proposal, rules

SELECTORS: dict[str, Callable[[], proposal.Selector]] = {
    "rules": rules.Rules,
    "classifier": classifier.Classifier,
    "bandit": bandit.Bandit,
    "changepoint": changepoint.Changepoint,
    "llm": llm_choice.LlmChoice,
    "fixed": fixed_choice.FixedChoice,
}
