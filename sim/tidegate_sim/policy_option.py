"""A scheduling policy with parameters, as a command line names it, such as `two-lane:threshold_s=2:fast_share=0.5`."""

from typing import NamedTuple

from tidegate_policy import policies


class PolicyOption(NamedTuple):
    """A policy of the registry, and those of its parameters that are not the defaults."""

    name: str
    parameters: dict[str, float]


def parse(text: str) -> PolicyOption:
    """The option that the text names. Raises `policies.UnknownPolicy` or `policies.BadParameter`."""
    name, *settings = text.split(":")
    parameters: dict[str, float] = {}
    for setting in settings:
        parameter, _, value = setting.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise policies.BadParameter(
                f"policy {name!r}: {setting!r} is no parameter such as threshold_s=2 with a number"
            ) from None
        if parameter in parameters:
            raise policies.BadParameter(f"policy {name!r}: the parameter {parameter!r} is given twice")
        parameters[parameter] = number
    policies.create(name, parameters)  # raises
    return PolicyOption(name, parameters)
