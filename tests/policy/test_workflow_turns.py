"""The turns of tenants whose workflows wait are those of the rule, and no event looks at all tenants for them."""

import math
import random
from collections.abc import Callable
from typing import Any

import counted_looks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.admit import workflow_gate
from tidegate_policy.admit.workflow_gate import FIRST_WORKFLOWS, HEADROOM, KNOWN_TENANTS, WorkflowGate
from tidegate_policy.model import Call, CallId, WorkflowId
from tidegate_policy.policies import QueuedRequest


def arrive(gate: WorkflowGate, now: float, workflow: str, tenant: str, weight: float = 1.0, due_s: float = 9.0) -> bool:
    """Whether the first call of the workflow waits."""
    call = Call(
        id=CallId(workflow), arrived_at_s=now, prompt_tokens=10, output_predicted=10,
        tenant=tenant, weight=weight, workflow=WorkflowId(workflow), deadline_at_s=due_s,
    )  # fmt: skip
    waits = gate.must_wait(now, WorkflowId(workflow), tenant)
    if waits:
        gate.hold(QueuedRequest(call=call, service_s=1.0), WorkflowId(workflow))
    else:
        gate.enter(now, WorkflowId(workflow), tenant, weight)
    return waits


def finish(gate: WorkflowGate, tenant: str, limit: float, count: int = FIRST_WORKFLOWS) -> None:
    for _ in range(count):
        gate.observe(tenant, limit / HEADROOM * 100.0, 100.0)


class Counted(counted_looks.CountedLooks, dict[str, Any]):
    """Tenants that count how often all of them are looked at."""


def test_neither_the_end_of_a_workflow_nor_the_choice_of_the_next_one_looks_at_all_tenants() -> None:
    gate = WorkflowGate(bounded=True)
    gate._tenants = Counted()
    finish(gate, "old", 40)
    for turn in range(2):
        for number in range(1000):
            arrive(gate, 0.0, f"{turn}-{number}", f"t{number}")
    assert (gate.active, gate.held) == (1000, 1000)
    before = Counted.looks
    for number in range(500):
        finish(gate, f"t{number % 10}", 40 + number, count=1)
        gate.leave(0.0, WorkflowId(f"0-{number}"))
        gate.over(WorkflowId(f"0-{number}"))
        for one in gate.release(0.0):
            gate.enter(0.0, WorkflowId(one.call.id), one.call.tenant, 1.0)
    assert gate.held == 500
    assert Counted.looks - before <= 2, "the heap is made anew when few of its entries are valid"


def plain(gate: WorkflowGate, own_limit: Callable[[str], int]) -> tuple[int | None, str | None]:
    """The limit, and the tenant whose workflow starts next, as the head of the module states them."""
    limits = {name: own_limit(name) or gate._largest for name in gate._tenants}
    weights = sum(known.weight for known in gate._tenants.values())
    limit = None
    if gate._largest:
        limit = gate._largest
        if weights:
            limit = max(round(sum(limits[name] * it.weight for name, it in gate._tenants.items()) / weights), 1)
    waiting: dict[str, list[tuple[float, int]]] = {}
    for workflow, held in gate._held.items():
        (one,) = held.items.values()
        assert one.call.deadline_at_s is not None
        waiting.setdefault(held.tenant, []).append((one.call.deadline_at_s, held.place))
        assert one.call.workflow == workflow
    found = []
    for name, workflows in waiting.items():
        known = gate._tenants[name]
        share = max(math.ceil(limits[name] * known.weight / weights - 1e-9), 1)
        if limit is None or gate.active < limit or known.active < share:
            found.append((known.active / known.weight, min(workflows), name))
    return limit, min(found)[2] if found else None


@pytest.mark.parametrize("learned", [0, 3])
@given(seed=st.integers(0, 10**6))
def test_the_next_tenant_is_the_one_of_the_rule(learned: int, seed: int) -> None:
    rng, gate = random.Random(seed), WorkflowGate(bounded=True)
    weights = {f"t{number}": rng.choice([0.5, 1.0, 2.0, 4.0]) for number in range(8)}
    finish(gate, "old", rng.randint(1, 9))
    for number in range(learned):
        finish(gate, f"t{number}", rng.randint(1, 20))
    running: list[str] = []

    def own_limit(name: str) -> int:
        means = gate._means_of.get(name)
        return 0 if means is None else workflow_gate._limit(means)

    for step in range(150):
        now, tenant = step * 0.01, rng.choice(list(weights))
        event = rng.choice(["arrives", "arrives", "arrives", "ends", "ends", "gone", "finished", "heavier"])
        held = [one.call.id for one in gate]
        if event == "arrives" and not arrive(
            gate, now, f"w{step}", tenant, weights[tenant], rng.choice([5.0, 7.0, 9.0])
        ):
            running.append(f"w{step}")
        elif event == "ends" and running:
            workflow = WorkflowId(running.pop(rng.randrange(len(running))))
            gate.leave(now, workflow)
            gate.over(workflow)
        elif event == "gone" and held:
            gate.remove(rng.choice(held))
        elif event == "finished":
            finish(gate, rng.choice(["old", tenant]), rng.randint(1, 30), count=rng.choice([1, FIRST_WORKFLOWS]))
        elif event == "heavier":
            weights[tenant] = rng.choice([0.5, 1.0, 2.0, 4.0])
        limit, name = plain(gate, own_limit)
        assert gate.limit == limit
        assert gate._next_tenant(gate.limit) == name
        for one in gate.release(now) if rng.random() < 0.5 else ():
            gate.enter(now, WorkflowId(one.call.id), one.call.tenant, weights[one.call.tenant])
            running.append(one.call.id)


def test_a_tenant_whose_limit_is_forgotten_has_the_largest_one() -> None:
    gate = WorkflowGate(bounded=True)
    finish(gate, "small", 2)
    arrive(gate, 0.0, "a", "small")
    assert gate.limit == 2
    for number in range(KNOWN_TENANTS):
        finish(gate, f"t{number}", 6)
    assert gate.limit == 6
