"""The flood of `tests/faults/test_floods.py` in virtual time: what it does to the first tokens of an honest tenant.

One engine at four times the speed of its profile. The honest tenant sends four calls a second. From `FLOOD_FROM_S` on the
other tenant sends four times what the engine serves of it. The first seconds of the flood do not count: calls that arrive
before the tenant is known to flood the pool enter as those of any tenant.
"""

import random

import pytest

import tidegate_profiles
from tidegate_policy import cost
from tidegate_policy.model import EngineId
from tidegate_sim import cell
from tidegate_sim.trace_format import TraceCall

ENGINE = cost.scaled(cost.from_mapping(tidegate_profiles.load("a100-70b-tp8")["cost"]), 0.25)
FLOOD_FROM_S, COUNTED_FROM_S, END_S = 12.0, 18.0, 30.0
FLOOD_RATE = 30.0
"""Calls a second."""


def trace(prompt_tokens: tuple[int, int], output_tokens: tuple[int, int]) -> list[TraceCall]:
    rng = random.Random(1)
    calls = [
        TraceCall(
            id=f"honest-{index}",
            arrival_s=index / 4 + rng.random() / 50,
            prompt_tokens=200,
            output_tokens=50,
            tenant="honest",
        )
        for index in range(int(END_S * 4))
    ]
    at_s = FLOOD_FROM_S
    while at_s < END_S:
        calls.append(
            TraceCall(
                id=f"flood-{len(calls)}",
                arrival_s=at_s,
                prompt_tokens=rng.randint(*prompt_tokens),
                output_tokens=rng.randint(*output_tokens),
                tenant="flood",
            )
        )
        at_s += rng.expovariate(FLOOD_RATE)
    return sorted(calls, key=lambda call: call.arrival_s)


def p95_s(calls: list[cell.CallOutcome]) -> float:
    return sorted(call.ttft_s or 0.0 for call in calls)[int(0.95 * len(calls))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens"),
    [((600, 600), (200, 200)), ((200, 1000), (50, 350))],
    ids=["alike", "mixed"],
)
def test_a_flood_less_than_doubles_the_time_to_first_token_of_an_honest_tenant(
    prompt_tokens: tuple[int, int], output_tokens: tuple[int, int]
) -> None:
    run = cell.Cell({EngineId("only"): ENGINE}, cell.Row(model="fast"), (), seed=1)
    outcome = run.run(trace(prompt_tokens, output_tokens))
    honest = [call for call in outcome.calls if call.tenant == "honest"]
    alone = [call for call in honest if call.arrived_at_s < FLOOD_FROM_S - 1]
    during = [call for call in honest if call.arrived_at_s >= COUNTED_FROM_S]
    assert p95_s(during) < 2 * p95_s(alone)
    assert all(call.shed is None for call in honest)
    ended = sum(
        COUNTED_FROM_S <= (call.finished_at_s or 0.0) < END_S for call in outcome.calls if call.tenant == "flood"
    )
    assert ended > 4 * (END_S - COUNTED_FROM_S), "the flooding tenant keeps its share"
