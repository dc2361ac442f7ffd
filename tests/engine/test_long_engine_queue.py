"""Very many calls wait in vLLM's scheduler under two lanes: each starts once, in the order of its lane.

`make test` has some thousands of calls, `make faults` 100,000.
"""

import os
import random
import time

import pytest
from driven_scheduler import Driven

from tidegate_policy import policies
from tidegate_policy.cost import CostModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MOST = 100_000 if "TIDEGATE_FAULTS" in os.environ else 3000
BATCH = 128
SLOW_OF = 10
"""One call of so many is slow."""
WIDE = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=BATCH * 64, max_batch=BATCH, max_step_tokens=4096)
LATER = 3
"""Steps before the urgent call comes."""


def test_very_many_calls_wait_in_two_lanes_and_none_is_lost(figure):
    rng = random.Random(11)
    driven = Driven(WIDE, policy="two-lane")
    budgets_ms = rng.sample(range(100_000, 100_000 + 10 * MOST), MOST)
    began_s = time.monotonic()
    for number, budget_ms in enumerate(budgets_ms):
        slow = number % SLOW_OF == 0
        name = f"{'slow' if slow else 'fast'} {number}"
        driven.add(name, output=1, budget_ms=budget_ms, out_pred=400 if slow else 10)
    added_s = time.monotonic() - began_s
    starts = [name for _ in range(LATER) for name in driven.step()]
    driven.add("urgent", output=1, budget_ms=1, out_pred=10)
    following = driven.step()
    assert following[:2].count("urgent") == 1, "it passes all others but for one turn of the slow lane"
    starts += following
    starts += driven.starts()
    begun, twice = len(set(starts)), len(starts) - len(set(starts))
    figure(f"{MOST:,} calls wait in an engine: never started, started twice", f"{MOST + 1 - begun}, {twice}",
           goal="0, 0", met=begun == MOST + 1 and not twice)  # fmt: skip
    assert len(starts) == len(set(starts)) == MOST + 1
    starts.remove("urgent")
    for lane in ("fast", "slow"):
        order = [budgets_ms[int(name.split()[1])] for name in starts if name.startswith(lane)]
        assert order == sorted(order), f"in the {lane} lane the smallest slack starts first"
    share = policies.create("two-lane").parameters["fast_share"]
    mixed = starts[: round(MOST / SLOW_OF)]
    fast = sum(name.startswith("fast") for name in mixed) / len(mixed)
    figure(f"{MOST:,} calls wait in an engine: share of the fast lane", f"{fast:.3f}",
           goal=f"{share:g}", met=abs(fast - share) < 0.01)  # fmt: skip
    figure(f"{MOST:,} calls wait in an engine: time to take one, ms", f"{1000 * added_s / MOST:.2f}",
           goal="below 5", met=added_s < 0.005 * MOST)  # fmt: skip
    assert abs(fast - share) < 0.01
    assert not driven.scheduler.state().waiting_ids
