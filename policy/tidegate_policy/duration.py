"""How long is `1m30s`? One grammar for settings, ServingPools and the command line: Kubernetes' durations, unsigned."""

import re

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h)"


def seconds(text: str) -> float:
    """The length of a duration in seconds. Raises `ValueError`, also for a number without a unit."""
    if re.fullmatch(r"\d+(?:\.\d+)?", text, re.ASCII):
        raise ValueError(f"{text} has no unit; write {text}ms or {text}s")
    if not re.fullmatch(f"(?:{_PART})+", text, re.ASCII):
        raise ValueError(f"{text!r} is not a duration; write it as 60ms, 1.5s, 10m or 1h30m")
    return sum(float(count) * UNITS_S[unit] for count, unit in re.findall(_PART, text, re.ASCII))


def text(length_s: float) -> str:
    """A duration as `seconds` reads it: in the largest unit that gives a whole number, such as 10m, 90s, 1.5s or 60ms."""
    for unit in ("h", "m", "s"):
        if length_s and length_s % UNITS_S[unit] == 0:
            return f"{length_s / UNITS_S[unit]:.0f}{unit}"
    return f"{length_s * 1000:.12g}ms" if 0 < length_s < 1 else f"{length_s:.12g}s"
