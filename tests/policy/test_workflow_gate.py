"""The bound on active workflows: when it exists, which workflow starts next, and that no call is lost in it."""

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import gateway_core
from tidegate_policy.admit import entitlements, promises
from tidegate_policy.admit.workflow_gate import FIRST_WORKFLOWS, HEADROOM, PAUSE_S, WorkflowGate
from tidegate_policy.model import Call, CallId, DropReason, WorkflowId
from tidegate_policy.policies import QueuedRequest


def item(
    name: str, workflow: str, *, deadline_at_s: float | None = 100.0, tenant: str = "", weight: float = 1.0
) -> QueuedRequest:
    call = Call(
        id=CallId(name),
        arrived_at_s=0.0,
        prompt_tokens=10,
        output_predicted=10,
        tenant=tenant,
        weight=weight,
        workflow=WorkflowId(workflow),
        deadline_at_s=deadline_at_s,
    )
    return QueuedRequest(call=call, service_s=1.0)


def taught(limit: float, *, bounded: bool = True, demand_s: float = 100.0) -> WorkflowGate:
    gate = WorkflowGate(bounded=bounded)
    for _ in range(FIRST_WORKFLOWS):
        gate.observe("", limit / HEADROOM * demand_s, demand_s)
    return gate


def arrive(gate: WorkflowGate, now: float, name: str, workflow: str, **more: Any) -> bool:
    """Whether the call waits."""
    arriving = item(name, workflow, **more)
    waits = gate.must_wait(now, WorkflowId(workflow), arriving.call.tenant)
    if waits:
        gate.hold(arriving, WorkflowId(workflow))
    else:
        enter(gate, now, arriving)
    return waits


def enter(gate: WorkflowGate, now: float, one: QueuedRequest) -> None:
    assert one.call.workflow is not None
    gate.enter(now, one.call.workflow, one.call.tenant, one.call.weight)


def released(gate: WorkflowGate, now: float) -> list[str]:
    found = gate.release(now)
    for one in found:
        enter(gate, now, one)
    return [one.call.id for one in found]


def test_there_is_no_bound_before_some_workflows_have_finished_or_where_it_is_turned_off() -> None:
    gate = WorkflowGate(bounded=True)
    assert gate.limit is None
    assert taught(3).limit == 3
    assert taught(3, bounded=False).limit is None


def test_the_earliest_deadline_starts_first_and_all_calls_of_its_workflow_with_it() -> None:
    gate = taught(1)
    arrive(gate, 0.0, "a", "A")
    arrive(gate, 0.0, "late", "L", deadline_at_s=90.0)
    arrive(gate, 0.0, "soon", "S", deadline_at_s=50.0)
    arrive(gate, 0.0, "soon2", "S", deadline_at_s=50.0)
    assert [one.call.id for one in gate] == ["soon", "soon2", "late"]
    assert released(gate, 0.0) == []
    gate.leave(1.0, WorkflowId("A"))
    gate.over(WorkflowId("A"))
    assert released(gate, 1.0) == ["soon", "soon2"]
    assert len(gate) == 1


def test_a_started_workflow_never_waits_again_and_a_long_pause_lets_another_one_start() -> None:
    gate = taught(1)
    arrive(gate, 0.0, "a", "A")
    arrive(gate, 0.0, "b", "B")
    gate.leave(1.0, WorkflowId("A"))
    assert released(gate, 1.0 + PAUSE_S / 2) == [], "the next call of the workflow will come soon"
    assert gate.next_start_at_s() == 1.0 + PAUSE_S
    assert released(gate, 1.0 + PAUSE_S) == ["b"]
    assert not gate.must_wait(9.0, WorkflowId("A"), "")
    assert gate.must_wait(9.0, WorkflowId("C"), "")


def test_workflows_that_went_on_at_another_gateway_hold_their_places_no_longer_than_workflows_take() -> None:
    gate = taught(2, demand_s=0.01)
    arrive(gate, 0.0, "a", "A")
    arrive(gate, 0.0, "b", "B")
    arrive(gate, 0.0, "c", "C")
    gate.leave(1.0, WorkflowId("A"))
    path_s = 2 / HEADROOM * 0.01
    assert gate.next_start_at_s() == pytest.approx(1.0 + path_s)
    assert released(gate, 1.0 + path_s / 2) == []
    assert released(gate, 1.0 + 1.01 * path_s) == ["c"]


def entered(gate: WorkflowGate, tenant: str, count: int) -> int:
    """Of so many workflows of a tenant: those that start at once."""
    return sum(
        not arrive(gate, 0.0, f"{tenant}{number}", f"{tenant}{number}", tenant=tenant) for number in range(count)
    )


def test_the_workflows_of_one_tenant_do_not_decide_how_many_another_one_may_have() -> None:
    gate = WorkflowGate(bounded=True)
    for tenant, limit, finished in (("long", 20, FIRST_WORKFLOWS), ("wide", 1, 100), ("few", 1, 1)):
        for _ in range(finished):
            gate.observe(tenant, limit / HEADROOM, 1.0)
    assert gate.limit == 20
    assert entered(gate, "long", 30) == 20
    assert entered(gate, "wide", 5) == 1
    assert gate.limit == round((20 + 1) / 2)
    assert entered(gate, "few", 20) == 7, "a third of the largest limit"


def test_a_tenant_that_came_before_the_first_limit_has_one_afterwards() -> None:
    gate = WorkflowGate(bounded=True)
    arrive(gate, 0.0, "new", "N", tenant="new")
    for _ in range(FIRST_WORKFLOWS):
        gate.observe("old", 4 / HEADROOM, 1.0)
    assert gate.limit == 4
    assert entered(gate, "new", 9) == 3


def test_a_held_call_that_leaves_frees_its_workflow() -> None:
    gate = taught(1)
    arrive(gate, 0.0, "a", "A")
    arrive(gate, 0.0, "b", "B")
    removed = gate.remove(CallId("b"))
    assert removed is not None
    assert gate.remove(CallId("b")) is None
    assert (len(gate), gate.held) == (0, 0)
    arrive(gate, 0.0, "b2", "B")
    assert [one.call.id for one in gate] == ["b2"]


@pytest.mark.parametrize("limit", [1, 3])
@given(seed=st.integers(0, 10**6))
def test_no_call_is_lost_and_the_bound_holds(limit: int, seed: int) -> None:
    rng = random.Random(seed)
    gate = taught(limit)
    held: set[str] = set()
    inside: dict[str, int] = {}
    for step in range(60):
        now, workflow = float(step), f"w{rng.randrange(8)}"
        if rng.random() < 0.6:
            if arrive(gate, now, str(step), workflow):
                held.add(str(step))
            else:
                inside[workflow] = inside.get(workflow, 0) + 1
        elif inside.get(workflow):
            inside[workflow] -= 1
            gate.leave(now, WorkflowId(workflow))
        for one in gate.release(now):
            assert one.call.workflow is not None
            held.remove(one.call.id)
            enter(gate, now, one)
            inside[one.call.workflow] = inside.get(one.call.workflow, 0) + 1
        assert {one.call.id for one in gate} == held
        assert len(gate) == len(held)
        assert not held or gate.active >= limit


def test_a_tenant_below_its_share_starts_although_others_have_filled_the_limit() -> None:
    gate = taught(8)
    assert [arrive(gate, 0.0, f"f{i}", f"F{i}", tenant="flood") for i in range(12)] == [False] * 8 + [True] * 4
    assert [arrive(gate, 0.0, f"h{i}", f"H{i}", tenant="honest") for i in range(6)] == [False] * 4 + [True] * 2
    assert released(gate, 0.0) == []
    assert gate.active == 12
    for i in range(4):
        gate.leave(1.0, WorkflowId(f"F{i}"))
        gate.over(WorkflowId(f"F{i}"))
    assert released(gate, 1.0) == [], "the tenant returns to its share, so its ends free no places"
    gate.leave(2.0, WorkflowId("F4"))
    gate.over(WorkflowId("F4"))
    assert released(gate, 2.0) == ["f8"], "the flood is below its share"
    gate.leave(3.0, WorkflowId("H0"))
    gate.over(WorkflowId("H0"))
    assert released(gate, 3.0) == ["h4"]


def test_shares_follow_weights_and_a_tenant_that_is_alone_has_the_whole_limit() -> None:
    gate = taught(8)
    waits = [arrive(gate, 0.0, f"a{i}", f"A{i}", tenant="a", weight=0.3) for i in range(9)]
    assert waits == [False] * 8 + [True]
    waits = [arrive(gate, 0.0, f"b{i}", f"B{i}", tenant="b", weight=0.9) for i in range(9)]
    assert waits == [False] * 6 + [True] * 3


@pytest.mark.parametrize("limit", [1, 4, 9])
@given(seed=st.integers(0, 10**6))
def test_no_workflow_waits_while_its_tenant_is_below_its_share(limit: int, seed: int) -> None:
    rng = random.Random(seed)
    gate = taught(limit)
    weights = {"a": 1.0, "b": rng.choice([1.0, 2.0]), "c": rng.choice([0.5, 1.0])}
    calls: dict[str, int] = {}
    """Calls of each active workflow, whose tenant is the first letter."""
    held: dict[str, str] = {}
    """The workflow of each call that waits."""
    for step in range(120):
        now, tenant = float(step) / 100, rng.choices("abc", (8, 1, 1))[0]
        workflow = f"{tenant}{rng.randrange(12)}"
        if rng.random() < 0.6:
            if arrive(gate, now, str(step), workflow, tenant=tenant, weight=weights[tenant]):
                held[str(step)] = workflow
            else:
                calls[workflow] = calls.get(workflow, 0) + 1
        elif workflow in calls:
            gate.leave(now, WorkflowId(workflow))
            calls[workflow] -= 1
            if not calls[workflow]:
                del calls[workflow]
                gate.over(WorkflowId(workflow))
        for one in gate.release(now):
            enter(gate, now, one)
            workflow = held.pop(one.call.id)
            calls[workflow] = calls.get(workflow, 0) + 1
        assert {one.call.id for one in gate} == set(held)
        assert gate.active == len(calls)
        here = {name[0] for name in (*calls, *held.values())}
        total = sum(weights[name] for name in here)
        for waiting in {name[0] for name in held.values()}:
            active = sum(name[0] == waiting for name in calls)
            assert active >= limit * weights[waiting] / total - 1e-6
        assert not held or len(calls) >= limit, "no place stays free while a workflow waits"


def test_tenants_whose_last_waiting_workflow_starts_leave_the_shares_of_the_others_as_they_are() -> None:
    gate = taught(20)
    names = [f"many-{i}" for i in range(40)] + [f"t{i}-{j}" for j in range(3) for i in range(9)]
    started = [name for name in names if not arrive(gate, 0.0, name, name, tenant=name.split("-")[0])]
    assert gate.held == 20 + 9
    for name in started:
        gate.leave(1.0, WorkflowId(name))
        gate.over(WorkflowId(name))
    assert len(released(gate, 1.0)) == gate.active == 20


@given(seed=st.integers(0, 10**6))
def test_one_pass_starts_no_workflow_above_the_limit_of_a_tenant_at_its_share(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.randint(1, 12)
    gate = taught(limit)
    weights = {f"t{i}": rng.choice([0.5, 1.0, 3.0]) for i in range(rng.randint(1, 6))}
    tenant_of: dict[str, str] = {}
    active: Counter[str] = Counter()
    inside: list[str] = []
    for step in range(80):
        if rng.random() < 0.6:
            name = str(step)
            tenant = tenant_of[name] = rng.choice(list(weights))
            if not arrive(gate, step, name, name, tenant=tenant, weight=weights[tenant]):
                inside.append(name)
                active[tenant] += 1
        elif inside:
            name = inside.pop(rng.randrange(len(inside)))
            gate.leave(step, WorkflowId(name))
            gate.over(WorkflowId(name))
            active[tenant_of[name]] -= 1
        waiting = {tenant_of[one.call.id] for one in gate}
        total = sum(weights[tenant] for tenant in weights if active[tenant] or tenant in waiting)
        for one in gate.release(step):
            enter(gate, step, one)
            inside.append(one.call.id)
            tenant = one.call.tenant
            share = max(math.ceil(limit * weights[tenant] / total - 1e-9), 1)
            assert active.total() < limit or active[tenant] < share
            active[tenant] += 1
        assert gate.active == active.total()


def test_a_call_that_may_be_shed_is_shed_where_its_workflow_would_wait() -> None:
    settings = gateway_core.CoreSettings(classes=(entitlements.SloClass(name="batch", sheddable=True),))
    core = gateway_core.GatewayCore(settings, random.Random(1))
    core.dispatcher.gate = gate = taught(1)
    arrive(gate, 0.0, "running", "A", tenant="t")
    for workflow, slo_class, shed in (("B", "batch", True), ("B", None, False), ("A", "batch", False)):
        facts = promises.CallFacts(id=CallId("c"), model="m", workflow=workflow, tenant="t", slo_class=slo_class)
        assert (core.draft(0.0, facts) is DropReason.SATURATED) is shed, (workflow, slo_class)
