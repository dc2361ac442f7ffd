"""A tenant that comes while another one has all places, or the whole queue, is served."""

from dataclasses import replace

from test_dispatcher import call, dispatcher, sent, shed

from tidegate_policy.model import CallId, DropReason, WorkflowId


def test_a_tenant_that_comes_later_is_served_although_another_one_has_all_places() -> None:
    gate = dispatcher(max_inflight="auto", max_waiting=200)
    for index in range(100):
        gate.on_arrival(0.0, replace(call(f"flood-{index}", deadline_at_s=50.0), tenant="flood"))
    limit = sum(item.limit or 0 for item in gate.table)
    assert gate.inflight == limit
    quiet = [sent(gate.on_arrival(1.0, replace(call(f"quiet-{i}"), tenant="quiet"))) for i in range(3)]
    assert quiet == [["quiet-0"], ["quiet-1"], ["quiet-2"]]
    more = [sent(gate.on_arrival(1.0, replace(call(f"quiet-{i}"), tenant="quiet"))) for i in range(3, 20)]
    assert gate.inflight == limit + sum(max(2, (item.limit or 0) // 4) for item in gate.table), "and no more than that"
    assert [] in more
    assert gate.waiting + gate.inflight == 120


def test_a_limit_of_the_settings_has_no_reserve() -> None:
    gate = dispatcher(max_inflight=2)
    for index in range(10):
        gate.on_arrival(0.0, replace(call(f"flood-{index}"), tenant="flood"))
    assert sent(gate.on_arrival(1.0, replace(call("quiet"), tenant="quiet"))) == []
    assert sent(gate.on_end(2.0, CallId("flood-0"))) == ["quiet"], "but the next place is its"


def test_a_full_queue_makes_room_for_a_tenant_that_was_not_there() -> None:
    gate = dispatcher(max_inflight=1, max_waiting=20)
    for index in range(22):
        gate.on_arrival(0.0, replace(call(f"flood-{index}"), tenant="flood"))
    actions = gate.on_arrival(1.0, replace(call("quiet"), tenant="quiet"))
    assert shed(actions) == [DropReason.EVICTED]
    assert gate.waiting == 20
    assert shed(gate.on_arrival(1.0, replace(call("more"), tenant="flood"))) == [DropReason.SATURATED]


def test_a_single_call_of_a_newcomer_does_not_wait_behind_thousands() -> None:
    gate = dispatcher(max_inflight=2)
    for index in range(4000):
        gate.on_arrival(0.0, replace(call(f"flood-{index}"), tenant="flood"))
    assert sent(gate.on_arrival(1.0, replace(call("quiet"), tenant="quiet"))) == []
    assert sent(gate.on_end(1.5, CallId("flood-0"))) == ["quiet"]


def test_a_workflow_whose_call_leaves_while_its_tenants_share_is_full_is_not_active_for_ever() -> None:
    gate = dispatcher(max_inflight=1)
    for _ in range(50):
        gate.gate.observe("", 10.0, 5.0)  # two workflows saturate the pool
        gate.tenants.observe(2.0, 1.0)
    gate.on_arrival(0.0, replace(call("quiet"), tenant="quiet"))
    for index in range(40):
        one = replace(call(f"flood-{index}"), tenant="flood", workflow=WorkflowId(f"w{index}"))
        gate.on_arrival(0.1 + index, one)
        gate.on_tick(0.1 + index)
    for index in range(40):
        gate.on_cancel(60.0, CallId(f"flood-{index}"))
    gate.on_end(61.0, CallId("quiet"))
    assert not gate.gate.must_wait(100.0, WorkflowId("next"), "flood")
    assert gate.gate.active == 0
