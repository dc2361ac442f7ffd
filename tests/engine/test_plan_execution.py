"""Plans of the engine core in vLLM: starts, preemption, pauses, held contexts, and the order of yielding."""

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from driven_scheduler import TIGHT, Driven
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import session_hold
from tidegate_policy.engine.regulators import REGULATORS
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

CLASSES = [TidegateScheduler, TidegateAsyncScheduler]
HOLD = session_hold.Settings(max_share=0.8, max_s=100.0)
SMALL = CostModel(step_s=0.02, prefill_s=0.1, kv_tokens=64 * engine.BLOCK_TOKENS, max_batch=4, max_step_tokens=512)


class Scripted:
    """A regulator that plays one plan change for each step."""

    SAFETY = False

    def __init__(self, *changes):
        self.changes = list(changes)

    def observe(self, facts):
        return None

    def shape(self, engine, plan):
        return replace(plan, **self.changes.pop(0)) if self.changes else plan


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_call_that_a_plan_preempts_yields_and_finishes_later(scheduler):
    changes = Scripted({}, {}, {"preempt": ("a",), "max_starts": 0})
    driven = Driven(regulators=[changes], scheduler=scheduler)
    for name in ("a", "b"):
        driven.add(name, output=6)
    assert [sorted(driven.step()) for _ in range(2)] == [["a", "b"], ["a", "b"]]
    assert driven.step() == ["b"]
    state = driven.scheduler.state()
    assert (state.preemptions, state.running, state.waiting_ids) == (1, 1, ("a",))
    generated = driven.scheduler.requests["a"].num_output_tokens
    assert generated == 2
    rest = driven.starts()
    assert rest.count("a") == 6 - generated, "the call resumes with the tokens that it had"


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_waiting_call_takes_the_place_of_a_running_call_in_the_same_step(scheduler):
    one_place = replace(SMALL, max_batch=1)
    driven = Driven(one_place, policy="priority", regulators=[REGULATORS["slot-preemption"]()], scheduler=scheduler)
    driven.add("patient", output=9, urgency=4)
    driven.step()
    driven.step()
    driven.add("urgent", output=2, urgency=0)
    assert driven.step() == ["urgent"]
    rest = driven.starts()
    assert rest[0] == "urgent"
    assert rest.count("patient") >= 7, "the preempted call finishes with all its tokens"
    assert driven.scheduler.state().preemptions == 1


def test_a_call_whose_blocks_a_step_in_flight_may_write_pauses_and_is_preempted_then():
    """So it is with a KV connector and steps ahead of the device."""
    one_place = replace(SMALL, max_batch=1)
    preempts = REGULATORS["slot-preemption"]()
    driven = Driven(one_place, policy="priority", regulators=[preempts], scheduler=TidegateAsyncScheduler)
    driven.scheduler.defer_block_free = True
    driven.add("patient", output=40, urgency=4)
    flight = [driven.begin()]
    for _ in range(3):
        flight.append(driven.begin())
        driven.end(*flight.pop(0))
    driven.add("urgent", output=2, urgency=0)
    steps = []
    while driven.scheduler.has_requests():
        flight.append(driven.begin())
        steps.append(list(flight[-1][0].num_scheduled_tokens))
        driven.end(*flight.pop(0))
    assert steps.index(["urgent"]) <= 3
    assert driven.scheduler.state().preemptions == 1
    assert sum(names == ["patient"] for names in steps) >= 30, "it goes on when the other has ended"


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_waiting_call_takes_the_memory_of_running_calls_in_the_same_step(scheduler):
    driven = Driven(policy="priority", limits=SMALL, regulators=[REGULATORS["slot-preemption"]()], scheduler=scheduler)
    for name in ("low0", "low1"):
        driven.add(name, prompt=440, output=40, urgency=4)
    for _ in range(3):
        driven.step()
    driven.add("urgent", prompt=320, output=2, urgency=0)
    assert "urgent" in driven.step()
    assert driven.scheduler.state().preemptions == 1


def test_a_plan_bounds_the_starts_of_one_step():
    limits = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=8, max_step_tokens=512)
    driven = Driven(limits, regulators=[Scripted({}, {"max_starts": 2}, {"max_starts": 0})])
    driven.add("first")
    driven.step()
    for name in "abcd":
        driven.add(name)
    assert driven.step() == ["first", "a", "b"]
    assert driven.step() == ["first", "a", "b"]
    assert driven.step() == ["first", "a", "b", "c", "d"]


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_paused_call_computes_nothing_in_one_step_and_keeps_its_memory(scheduler):
    driven = Driven(regulators=[Scripted({}, {}, {"paused": frozenset({"a"})})], scheduler=scheduler)
    for name in ("a", "b"):
        driven.add(name, output=6)
    driven.step()
    driven.step()
    before = driven.scheduler.get_kv_cache_usage()
    assert driven.step() == ["b"]
    assert driven.scheduler.get_kv_cache_usage() == before
    assert driven.step() == ["a", "b"]
    assert driven.starts().count("a") == 3


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_call_with_an_adapter_is_not_paused(scheduler):
    """vLLM counts the adapters of the calls that compute. It would start one with another adapter beside a paused call, and
    stop with an AssertionError once that goes on."""
    changes = Scripted({}, {}, {"paused": frozenset({"a"})})
    driven = Driven(replace(SMALL, kv_tokens=16_000), regulators=[changes], scheduler=scheduler)
    driven.scheduler.lora_config = LoRAConfig(max_loras=1)
    for name in ("a", "plain", "b"):
        driven.add(name, output=6)
    for number, name in enumerate(("a", "b"), start=1):
        driven.scheduler.requests[name].lora_request = LoRARequest(f"lora{number}", number, "somewhere")
    assert [driven.step() for _ in range(4)] == [["a", "plain"]] * 4
    assert driven.starts().count("b") == 6


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_plan_bounds_the_tokens_of_one_call_in_one_step(scheduler):
    driven = Driven(regulators=[Scripted({}, {"max_call_tokens": 48})], scheduler=scheduler)
    driven.scheduler.scheduler_config.long_prefill_token_threshold = 400
    driven.scheduler.adaptive_long_prefill_threshold = True
    driven.add("a", prompt=20, output=6)
    driven.step()
    driven.add("long", prompt=300, output=6)
    driven.step()
    assert driven.scheduler.requests["long"].num_computed_tokens == 48
    assert driven.scheduler.scheduler_config.long_prefill_token_threshold == 400, "vLLM's own bound counts otherwise"
    assert driven.scheduler.adaptive_long_prefill_threshold
    driven.step()
    assert driven.scheduler.requests["long"].num_computed_tokens == 300


def test_a_plan_that_pauses_every_call_pauses_none():
    driven = Driven(regulators=[Scripted({}, {"paused": frozenset({"a", "b"})})])
    for name in ("a", "b"):
        driven.add(name)
    driven.step()
    assert driven.step() == ["a", "b"]


def used_blocks(driven):
    pool = driven.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def finish_turn(driven, name, **more):
    """A call of session s with 320 tokens of context, run to its end."""
    driven.add(name, prompt=320, output=2, prefixes=[(7, 320)], session="s", tool="search", tool_ms=5000, **more)
    while name in driven.scheduler.requests:
        driven.step()


def fill(driven, name, prompt=640):
    """Another call that takes most of the memory."""
    driven.add(name, prompt=prompt, output=4)
    while name in driven.scheduler.requests:
        driven.step()


@pytest.mark.parametrize("scheduler", CLASSES)
@pytest.mark.parametrize("hold", [None, HOLD])
def test_the_context_of_a_session_survives_the_tool_call_when_it_is_held(scheduler, hold):
    driven = Driven(SMALL, scheduler=scheduler, hold=hold)
    for turn in range(3):  # the tool's return is learned; memory is busy between the turns
        finish_turn(driven, f"warm{turn}")
        fill(driven, f"busy{turn}")
    finish_turn(driven, "first")
    assert used_blocks(driven) == (0 if hold is None else 20)
    fill(driven, "between")
    fill(driven, "between again")
    driven.add("second", prompt=400, output=1, prefixes=[(7, 320)], session="s")
    output = driven.scheduler.schedule()
    assert output.num_scheduled_tokens["second"] == (400 if hold is None else 80)


def test_a_held_context_yields_to_a_waiting_call_that_needs_memory():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    fill(driven, "large", prompt=1000)
    assert used_blocks(driven) == 0


def test_a_held_context_yields_before_a_running_call_is_preempted():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    assert used_blocks(driven) == 20
    driven.add("grows", prompt=650, output=100)
    driven.starts()
    assert driven.scheduler.state().preemptions == 0
    assert used_blocks(driven) == 0


def test_a_hold_ends_with_its_time():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    assert used_blocks(driven) == 20
    driven.clock.now_s += 1000.0
    fill(driven, "later", prompt=16)
    assert used_blocks(driven) == 0


def test_a_hold_of_an_idle_engine_ends_with_its_time_at_the_next_report():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    watch = driven.scheduler.watch()
    for report in (driven.scheduler.state, watch.cut):
        report()
    assert used_blocks(driven) == 20
    driven.clock.now_s += 1000.0
    watch.cut()
    assert used_blocks(driven) == 0


def test_a_reset_of_the_cache_frees_what_is_held():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    assert driven.scheduler.reset_prefix_cache()
    assert used_blocks(driven) == 0


def test_a_bypass_frees_what_is_held_and_holds_nothing_until_it_ends():
    driven = Driven(SMALL, hold=HOLD)
    finish_turn(driven, "first")
    fill(driven, "busy")
    finish_turn(driven, "second")
    assert used_blocks(driven) == 20
    driven.scheduler.set_policy("fcfs", "an emergency", bypass=True)
    assert used_blocks(driven) == 0
    fill(driven, "busy again")
    finish_turn(driven, "third")
    assert used_blocks(driven) == 0
    driven.scheduler.set_policy("edf", "calm again")
    fill(driven, "busy once more")
    finish_turn(driven, "fourth")
    assert used_blocks(driven) == 20


@pytest.mark.parametrize("scheduler", CLASSES)
@pytest.mark.parametrize("seed", range(4))
def test_held_blocks_never_leak(scheduler, seed):
    """Random sessions, aborts, resets and pressure end with the free blocks of the start."""
    rng = random.Random(seed)
    blocks = 28 if seed % 2 else 64
    limits = replace(SMALL, kv_tokens=blocks * engine.BLOCK_TOKENS, prefill_s=5.0)
    driven = Driven(limits, policy=rng.choice(["fcfs", "sjf"]), scheduler=scheduler, hold=HOLD)
    free = driven.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    most_held = 0
    for number in range(150):
        session = rng.randrange(6)
        driven.add(
            f"c{number}",
            prompt=rng.randrange(16, 200),
            output=rng.randrange(1, 20),
            prefixes=[(session, 160)],
            session=f"s{session}",
            tool=rng.choice(["a", "b"]),
            tool_ms=rng.randrange(1, 5000),
        )
        for _ in range(rng.randrange(0, 30)):
            driven.step()
        most_held = max(most_held, driven.scheduler._core.snapshot(driven.clock()).pinned_kv_tokens)
        driven.clock.now_s += rng.choice([0.0, 0.0, 20.0])
        if rng.random() < 0.1 and driven.scheduler.requests:
            driven.scheduler.finish_requests(
                rng.choice(list(driven.scheduler.requests)), RequestStatus.FINISHED_ABORTED
            )
        if rng.random() < 0.05:
            driven.scheduler.reset_prefix_cache()
    driven.starts()
    driven.clock.now_s += 1000.0
    driven.scheduler.schedule()
    assert driven.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert most_held > 0


def test_running_calls_yield_by_the_work_that_is_left_and_keep_their_own_priority():
    driven = Driven(TIGHT, policy="sjf")
    driven.add("long", prompt=100, output=60, out_pred=60)
    for _ in range(50):
        driven.step()
    driven.add("short", prompt=100, output=40, out_pred=40)
    driven.scheduler.requests["long"].priority = 7
    preempted = []
    while driven.scheduler.requests:
        output = driven.scheduler.schedule()
        preempted += output.preempted_req_ids or ()
        produced = engine.producing(output, driven.scheduler.requests)
        made_up = engine.forward(output, produced, driven.scheduler.requests, driven.ends)
        if "long" in driven.scheduler.requests:
            assert driven.scheduler.requests["long"].priority == 7
        driven.scheduler.update_from_output(output, made_up)
    assert set(preempted) <= {"short"}, "the long call had less work left"
