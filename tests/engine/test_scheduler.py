"""Tidegate's scheduler in vLLM's loop, without a model: order, preemption, bounds, plans, reports."""

import copy
import threading

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import vllm_histories
from driven_scheduler import ROOMY, TIGHT, Driven
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from tidegate_engine import meters
from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler, step_work
from tidegate_policy import policies, qos
from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm


def waiting_calls(driven):
    """Three calls whose order differs under every policy but fcfs and priority."""
    driven.add("slow", prompt=300, output=1, budget_ms=90_000, out_pred=400, urgency=1)
    driven.add("late", prompt=20, output=1, budget_ms=95_000, out_pred=10, urgency=0)
    driven.add("soon", prompt=20, output=1, budget_ms=88_500, out_pred=20, urgency=3)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["slow", "late", "soon"]),
        ("edf", ["soon", "slow", "late"]),
        ("sjf", ["late", "soon", "slow"]),
        ("urgency", ["slow", "soon", "late"]),
        ("priority", ["late", "slow", "soon"]),
        ("two-lane", ["soon", "late", "slow"]),
    ],
)
def test_calls_start_in_the_order_of_the_policy(policy, order):
    driven = Driven(CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=1), policy=policy)
    waiting_calls(driven)
    assert driven.scheduler.state().waiting_ids == tuple(order)
    assert driven.starts() == order


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_a_switch_sorts_all_waiting_calls_again_and_loses_none(policy):
    driven = Driven()
    waiting_calls(driven)
    before = driven.scheduler.state()
    switched = driven.scheduler.set_policy(policy, "why " * 100)
    after = driven.scheduler.state()
    assert (switched.previous, switched.policy, switched.reordered) == ("fcfs", policy, 3)
    assert sorted(after.waiting_ids) == sorted(before.waiting_ids)
    assert (after.policy, after.policy_reason) == (policy, ("why " * 100)[:256])
    driven.scheduler.set_policy("fcfs", "back")
    assert driven.scheduler.state().waiting_ids == before.waiting_ids


def test_the_engine_works_on_while_a_new_policy_learns_of_the_calls(monkeypatch):
    driven = Driven()
    waiting_calls(driven)
    blocked = []

    class Learning(policies.POLICIES["srtf"]):
        name = "learning"

        def on_arrivals(self, now, items):
            engine = threading.Thread(
                target=driven.add, args=("arrived meanwhile",), kwargs={"out_pred": 1}, daemon=True
            )
            engine.start()
            engine.join(timeout=10)
            blocked.append(engine.is_alive())
            return super().on_arrivals(now, items)

        def on_arrival(self, now, item):
            return ()

    monkeypatch.setitem(policies.POLICIES, "learning", Learning)
    switched = driven.scheduler.set_policy("learning", "a test")
    assert blocked == [False]
    assert switched.reordered == 4
    assert driven.scheduler.state().waiting_ids[0] == "arrived meanwhile"


def test_an_unknown_policy_changes_nothing():
    driven = Driven(policy="sjf")
    with pytest.raises(policies.UnknownPolicy):
        driven.scheduler.set_policy("fastest", "")
    assert driven.scheduler.state().policy == "sjf"


def test_a_policy_set_while_the_engine_is_idle_is_in_force_at_once():
    driven = Driven()
    other = threading.Thread(target=driven.scheduler.set_policy, args=("urgency", "from another thread"))
    other.start()
    other.join()
    assert driven.scheduler.state().policy == "urgency"
    assert driven.scheduler.policy is SchedulingPolicy.PRIORITY


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_the_engine_preempts_in_the_reverse_of_the_policys_order(scheduler):
    driven = Driven(TIGHT, policy="urgency", scheduler=scheduler)
    budgets = {"a": 40_000, "b": 90_000, "c": 20_000}
    for name, budget_ms in budgets.items():
        driven.add(name, prompt=90, output=60, budget_ms=budget_ms, out_pred=60)
    driven.step()
    assert sorted(driven.running()) == ["a", "b", "c"]
    while len(driven.running()) == 3:
        driven.step()
    assert sorted(driven.running()) == ["a", "c"], (
        "the call with the latest start goes, though it is not the last to come"
    )
    assert driven.scheduler.state().preemptions == 1


def test_fcfs_preempts_the_call_that_came_last():
    driven = Driven(TIGHT)
    for name in ("a", "b", "c"):
        driven.add(name, prompt=90, output=60, budget_ms={"a": 40_000, "b": 90_000, "c": 20_000}[name])
    while driven.scheduler.state().preemptions == 0:
        driven.step()
    assert driven.running() == ["a", "b"]


def test_a_switch_changes_which_call_is_preempted_next():
    driven = Driven(TIGHT)
    for name, budget_ms in {"a": 40_000, "b": 90_000, "c": 20_000}.items():
        driven.add(name, prompt=90, output=60, budget_ms=budget_ms, out_pred=60)
    driven.step()
    driven.scheduler.set_policy("edf", "")
    while driven.scheduler.state().preemptions == 0:
        driven.step()
    assert sorted(driven.running()) == ["a", "c"]


def test_calls_that_waited_through_a_switch_start_and_are_ranked_under_the_new_policy():
    driven = Driven(CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=1), policy="urgency")
    driven.add("slow", prompt=300, output=9, budget_ms=90_000, out_pred=400, urgency=1)
    driven.add("late", prompt=20, output=9, budget_ms=95_000, out_pred=10, urgency=0)
    driven.scheduler.set_policy("priority", "")
    driven.step()
    (running,) = driven.scheduler.running
    assert running.request_id == "late"
    assert driven.scheduler._core.policy.name == "priority"
    assert driven.scheduler._core.policy.rank(driven.scheduler._core.item(CallId("late"))) < (0, 1.0), (
        "a level, not an instant"
    )


def test_a_preempted_call_has_its_recomputation_as_work():
    driven = Driven(TIGHT, policy="sjf")
    for name, predicted in {"a": 100, "b": 102, "c": 101}.items():
        driven.add(name, prompt=90, output=60, out_pred=predicted)
    while driven.scheduler.state().preemptions == 0:
        driven.step()
    (preempted,) = driven.scheduler.waiting
    assert preempted.request_id == "b"
    generated = preempted.num_output_tokens
    assert generated > 0
    service_s = driven.scheduler._core.item(CallId("b")).service_s
    decode_s = TIGHT.decode_seconds(90 + generated, 102 - generated)
    assert service_s < TIGHT.prefill_seconds(90 + generated) + decode_s, "the prefix cache still holds a part of it"
    assert service_s > decode_s


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_the_priority_of_a_request_is_the_number_of_its_client_at_all_times(policy, scheduler):
    driven = Driven(TIGHT, policy=policy, scheduler=scheduler)
    sent = {"a": 7, "b": -3, "c": 0, "d": 5}
    for name, priority in sent.items():
        driven.add(name, prompt=90, output=60, priority=priority)
    while driven.scheduler.state().preemptions < 2:
        driven.step()
        requests = [*driven.scheduler.running, *driven.scheduler.waiting]
        assert {request.request_id: request.priority for request in requests} == sent


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_the_priority_field_of_plain_clients_orders_their_calls(scheduler):
    driven = Driven(
        CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=1), policy="priority", scheduler=scheduler
    )
    for name, priority in {"a": 7, "b": -3, "c": 0, "d": -3}.items():
        driven.add(name, output=1, priority=priority)
    driven.add("labelled", output=1, priority=-100, urgency=3)
    assert driven.starts() == ["b", "d", "c", "a", "labelled"]


def test_a_call_without_labels_has_the_mean_output_as_its_prediction_not_its_own_bound():
    driven = Driven(policy="urgency")
    driven.add("plain", output=3)
    assert driven.scheduler._core.item(CallId("plain")).call.output_predicted == 128, "nothing has finished yet"
    driven.starts()
    for index in range(30):
        driven.add(str(index), output=3)
        driven.starts()
    driven.add("later", output=3)
    assert driven.scheduler._core.item(CallId("later")).call.output_predicted < 12


def test_bounds_tighten_what_vllm_allows_and_never_widen_it():
    driven = Driven()
    controls = driven.scheduler.set_controls(max_running=1, max_step_tokens=100)
    assert (controls.max_running, controls.max_step_tokens) == (1, 100)
    for name in ("a", "b"):
        driven.add(name, prompt=150, output=5)
    assert driven.step() == ["a"]
    assert driven.scheduler.requests["a"].num_computed_tokens == 100
    assert driven.running() == ["a"]
    unchanged = driven.scheduler.set_controls(max_running=None, max_step_tokens=10_000)
    assert (unchanged.max_running, unchanged.max_step_tokens) == (1, ROOMY.max_step_tokens)
    lifted = driven.scheduler.set_controls(max_running=0, max_step_tokens=0)
    assert (lifted.max_running, lifted.max_step_tokens) == (0, 0)
    driven.step()
    assert driven.running() == ["a", "b"]


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_no_token_bound_keeps_a_long_prompt_from_starting_without_chunked_prefill(scheduler):
    def constructed(vllm_config, **kwargs):
        vllm_config.scheduler_config.enable_chunked_prefill = False
        vllm_config.model_config = copy.copy(vllm_config.model_config)  # other schedulers share it
        vllm_config.model_config.max_model_len = 400
        return scheduler(vllm_config=vllm_config, policy="sjf", **kwargs)

    built = engine.build(constructed, ROOMY)
    controls = built.set_controls(max_running=None, max_step_tokens=1)
    assert controls.max_step_tokens == 401, "the longest prompt, beside the other sequence's decode"
    for name, prompt in {"long": 390, "short": 5}.items():
        built.add_request(engine.request(name, prompt, {}))
    scheduled = {}
    for _ in range(3):
        output = built.schedule()
        scheduled |= output.num_scheduled_tokens
        produced = engine.producing(output, built.requests)
        built.update_from_output(output, engine.forward(output, produced, built.requests, {"long": 2, "short": 2}))
    assert set(scheduled) == {"long", "short"}


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_the_floor_of_the_token_bound_holds_the_drafts_of_each_sequence(scheduler):
    built = vllm_histories.build(scheduler, features=("drafts",), policy="sjf")
    controls = built.set_controls(max_running=2, max_step_tokens=1)
    assert controls.max_step_tokens == 2 * (1 + vllm_histories.DRAFTS)
    history = vllm_histories.History(built, 3, features=("drafts", "aborts"), ahead=int("Async" in scheduler.__name__))
    assert max(sum(tokens for _, tokens in step["tokens"]) for step in history.run()) <= controls.max_step_tokens


def test_a_token_with_its_drafts_is_a_decode_in_the_work_of_a_step():
    built = vllm_histories.build(TidegateScheduler, features=("drafts",))
    built.add_request(engine.request("a", 40, {}))
    ends = {"a": 50}
    output = built.schedule()
    assert step_work(output, built.requests).decodes == 0
    built.update_from_output(output, engine.forward(output, ["a"], built.requests, ends))
    built.update_draft_token_ids(DraftTokenIds(["a"], [[engine.WORD] * vllm_histories.DRAFTS]))
    output = built.schedule()
    assert output.num_scheduled_tokens == {"a": 1 + vllm_histories.DRAFTS}
    work = step_work(output, built.requests)
    assert (work.uncached, work.attended, work.decodes) == (0, 0, 1)


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_a_call_that_fails_in_the_engine_is_not_a_finished_call(scheduler):
    driven = Driven(scheduler=scheduler)
    watch = driven.scheduler.watch()
    for name in ("good", "broken", "gone"):
        driven.add(name, output=3, budget_ms=60_000)
    driven.step()
    driven.scheduler.finish_requests("broken", RequestStatus.FINISHED_ERROR)
    driven.scheduler.encoder_cache_mismatch_reqs.add("gone")  # vLLM ends it in `update_from_output`
    driven.starts()
    window = watch.cut().window
    assert (window.arrived, window.finished, window.with_target, window.missed) == (3, 1, 1, 0)
    assert driven.scheduler._core.output_prior._seen == 1


def test_a_tighter_bound_takes_no_running_call_away():
    driven = Driven()
    for name in ("a", "b"):
        driven.add(name, output=5)
    driven.step()
    controls = driven.scheduler.set_controls(max_running=1, max_step_tokens=1)
    assert controls.max_step_tokens == 2, "both still decode"
    assert driven.step() == ["a", "b"]


def test_aborted_calls_are_forgotten():
    driven = Driven()
    for name in ("a", "b", "c"):
        driven.add(name)
    driven.step()
    driven.scheduler.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    state = driven.scheduler.state()
    assert (state.running, state.waiting, state.waiting_ids) == (1, 0, ())
    assert driven.starts()[-1] == "b"
    assert driven.scheduler.state().kv_usage == 0


def test_a_watch_counts_the_events_since_its_last_cut():
    driven = Driven()
    watch = driven.scheduler.watch()
    driven.add("a", output=3, tenant="t", weight=2, budget_ms=2_500, out_pred=3, **{"class": "interactive"})
    driven.add("b", output=1, budget_ms=60_000)
    for _ in range(3):
        driven.step()
    report = watch.cut()
    window = report.window
    assert (report.policy, window.window_s) == ("fcfs", 3.0)
    assert (window.arrived, window.finished, window.with_target, window.missed) == (2, 2, 2, 1)
    assert (window.ttft.count, window.tpot.count) == (2, 1)
    assert window.tenants["t"].served_tokens == 3
    assert window.tenants["t"].targets == qos.Targets(with_target=1, missed=1)
    assert window.classes == {"interactive": qos.Targets(with_target=1, missed=1), "": qos.Targets(with_target=1)}
    assert window.tenants["t"].weight == 2.0
    empty = watch.cut()
    assert (empty.window.arrived, empty.window.finished) == (0, 0)


def test_two_watchers_do_not_share_windows():
    driven = Driven()
    first, second = driven.scheduler.watch(), driven.scheduler.watch()
    driven.add("a", output=1)
    driven.step()
    assert first.cut().window.finished == 1
    assert second.cut().window.finished == 1
    first.close()
    driven.add("b", output=1)
    driven.step()
    assert second.cut().window.finished == 1


def test_parameters_of_a_policy_reach_the_queue():
    driven = Driven(CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=1), policy="two-lane")
    for name in ("slow0", "slow1", "fast0", "fast1"):
        driven.add(name, output=1, out_pred=400 if name.startswith("slow") else 10)
    driven.scheduler.set_policy("two-lane", "", {"fast_share": 0.01})
    assert driven.scheduler.state().waiting_ids == ("fast0", "slow0", "slow1", "fast1")
    with pytest.raises(policies.BadParameter, match="fast_share"):
        driven.scheduler.set_policy("two-lane", "", {"fast_share": 7.0})


@pytest.mark.parametrize(
    ("tokens", "kind"), [([1, 1], "decode"), ([16, 300], "prefill"), ([1, 300], "mixed"), ([1], "decode")]
)
def test_the_kind_of_a_step_follows_from_its_tokens(tokens, kind):
    assert meters.kind(tokens) == kind
