"""The dispatch rules: one file for each, and this one list of names.

`least-delay` is the default. `score` is the rule of HexGen-Text2SQL. The others are baselines. A rule is an object, one for
each dispatcher, because a rule may learn: the dispatcher tells it which call went where and how each call ended.
"""

from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.rules.bounded_affinity import BoundedAffinity
from tidegate_policy.dispatch.rules.cache_aware import CacheAware
from tidegate_policy.dispatch.rules.contract import DispatchRule
from tidegate_policy.dispatch.rules.earliest_finish import EarliestFinish
from tidegate_policy.dispatch.rules.least_delay import LeastDelay
from tidegate_policy.dispatch.rules.least_requests import LeastRequests
from tidegate_policy.dispatch.rules.power_of_two import PowerOfTwo
from tidegate_policy.dispatch.rules.prefix_score import PrefixScore
from tidegate_policy.dispatch.rules.round_robin import RoundRobin
from tidegate_policy.dispatch.rules.score import Score
from tidegate_policy.dispatch.rules.weighted_least_requests import WeightedLeastRequests

RULES: dict[str, type[DispatchRule]] = {
    "score": Score,
    "least-delay": LeastDelay,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "weighted-least-requests": WeightedLeastRequests,
    "earliest-finish": EarliestFinish,
    "power-of-two": PowerOfTwo,
    "bounded-affinity": BoundedAffinity,
    "cache-aware": CacheAware,
    "prefix-score": PrefixScore,
}


class UnknownRule(ValueError):
    """A dispatch rule that does not exist; the message lists the known ones."""


def create(settings: DispatchSettings) -> DispatchRule:
    """A new rule object by its public name. Raises `UnknownRule`."""
    try:
        return RULES[settings.rule]()
    except KeyError:
        known = ", ".join(sorted(RULES))
        raise UnknownRule(f"unknown dispatch rule {settings.rule!r}; known are {known}") from None


__all__ = ["RULES", "DispatchRule", "UnknownRule", "create"]
