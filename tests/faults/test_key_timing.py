"""F11: the time in which a wrong API key is refused does not tell how much of it is right."""

import hashlib
import math
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tidegate_gateway.callers import api_keys
from tidegate_gateway.openai import error_table

KEYS, GUESSES = 1000, 100_000
MOST_T = 4.5
"""dudect (Reparaz, Balasch and Verbauwhede, 2017) calls two means of times different from this Welch's t on."""
KEPT = 0.9
"""The share of the times that counts. The longest are those of interruptions by other processes."""


def refused_after_ns(keys: api_keys.ApiKeys, guess: str) -> int:
    began_ns = time.perf_counter_ns()
    try:
        keys.caller_of(guess)
    except error_table.GatewayError:
        return time.perf_counter_ns() - began_ns
    raise AssertionError("a wrong key is accepted")


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Welch's t of two samples."""
    spread = sum(statistics.variance(sample) / len(sample) for sample in (first, second))
    return (statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(spread)


@pytest.mark.faults
def test_the_time_of_a_refusal_tells_nothing_of_a_key(tmp_path: Any, figure: Any) -> None:
    known = [secrets.token_hex(16) for _ in range(KEYS)]
    lines = [f"- {{tenant: acme, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}" for key in known]
    (tmp_path / "keys.yaml").write_text("keys:\n" + "\n".join(lines))
    keys = api_keys.ApiKeys(str(tmp_path / "keys.yaml"))
    rng = random.Random(11)
    near, far = [], []
    for _ in range(GUESSES):
        almost = rng.choice(known)[:-1] + "x"  # all but the last character is right
        turn = [(near, almost), (far, secrets.token_hex(16))]
        rng.shuffle(turn)
        for times, guess in turn:
            times.append(refused_after_ns(keys, guess))
    most_ns = sorted(near + far)[int(KEPT * 2 * GUESSES)]
    t = welch(*([ns for ns in times if ns <= most_ns] for times in (near, far)))
    figure(
        f"refusals of {GUESSES} nearly right and as many random keys: Welch's t of their times",
        f"{t:.1f}",
        goal=f"between -{MOST_T} and {MOST_T}",
        met=abs(t) <= MOST_T,
    )
