"""A call that may be shed is shed in a crowd of its own tenant, and costs no look at all tenants that wait."""

import collections
import random
from typing import Any

import counted_looks
import pytest
from test_gateway_core import arrived, core, facts

from tidegate_policy.admit.entitlements import SloClass
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.gateway_core import GatewayCore
from tidegate_policy.model import CallId, DropReason

MOST = 40
"""Calls that may wait."""


def busy() -> GatewayCore:
    """A pool whose engines take one call each."""
    classes = (SloClass(name="chat"), SloClass(name="batch", sheddable=True))
    return core(max_inflight=1, limits=Limits(max_waiting=MOST), classes=classes, default_class="chat")


def is_shed(made: GatewayCore, tenant: str) -> bool:
    return made.draft(0.0, facts("next", tenant=tenant, slo_class="batch")) is DropReason.SATURATED


class Counted(counted_looks.CountedLooks, dict[Any, Any]):
    """Counts of waiting calls that count how often all of them are looked at."""


def test_a_call_that_may_be_shed_costs_no_look_at_all_tenants_that_wait() -> None:
    made = busy()
    made.dispatcher._waiting.by_class_and_tenant = Counted()
    made.dispatcher._waiting.by_tenant = made.dispatcher.waiting_by_tenant = Counted()
    for number in range(MOST // 2 + 2):
        arrived(made, f"{number}", tenant=f"t{number}")
    assert made.dispatcher.waiting >= MOST // 2
    before = Counted.looks
    assert is_shed(made, f"t{MOST // 2}")
    assert not is_shed(made, "new")
    assert Counted.looks == before


@pytest.mark.parametrize("seed", range(10))
def test_the_part_of_a_tenant_is_that_of_a_count_of_all_waiting_calls(seed: int) -> None:
    rng, made = random.Random(seed), busy()
    names = [f"t{number}" for number in range(rng.choice([2, 6, 20]))]
    inside: list[str] = []
    seen = collections.Counter[bool]()
    for number in range(150):
        if not inside or rng.random() < 0.75:
            name = rng.choice(names[: rng.randint(1, len(names))])
            arrived(made, f"{number}", tenant=name, slo_class=rng.choice(["chat", None]))
            inside.append(f"{number}")
        else:
            made.on_cancel(0.0, CallId(inside.pop(rng.randrange(len(inside)))))
        waiting = [call.tenant for call in made.dispatcher.waiting_calls()]
        for name in (*names, "new"):
            part = MOST / 2 / len({name, *waiting})
            crowded = len(waiting) >= MOST / 2 and waiting.count(name) >= part
            assert is_shed(made, name) == crowded
            seen[crowded] += 1
    assert min(seen[True], seen[False]) > 10
