"""How long is `1m30s`? One grammar for settings, ServingPools and the command line: Kubernetes' durations, unsigned."""

import re

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h)"


def seconds(text: str) -> float:
    """The length of a duration in seconds. Raises `ValueError`."""
    if not re.fullmatch(f"(?:{_PART})+", text, re.ASCII):
        raise ValueError(f"{text!r} is not a duration; write it as 60ms, 1.5s, 10m or 1h30m")
    return sum(float(count) * UNITS_S[unit] for count, unit in re.findall(_PART, text, re.ASCII))
