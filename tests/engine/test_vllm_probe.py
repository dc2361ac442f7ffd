"""The answers of vLLM's scheduler to the core, against what vLLM then does, and the regulators that read them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import vllm_histories
from driven_scheduler import ROOMY, Driven
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from tidegate_engine.scheduler import TidegateScheduler
from tidegate_engine.vllm_probe import VllmProbe
from tidegate_policy.engine.regulators import create
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

PLACES = replace(ROOMY, max_batch=4)


class Watched(TidegateScheduler):
    """It notes for each step the waiting requests, those of them that may start, and those that start."""

    def schedule(self, *args, **kwargs):
        waiting = [item for queue in self._core.queues for item in queue]
        startable = [item.call.id for item in VllmProbe(self).startable(waiting)]
        output = super().schedule(*args, **kwargs)
        started = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        self.__dict__.setdefault("looks", []).append((len(waiting), startable, started))
        return output


@pytest.mark.parametrize(
    "features", [("grammars", "aborts", "errors"), ("loras",), ("sessions",), ("pauses", "resets")]
)
def test_vllm_starts_the_first_of_the_calls_that_may_start(features):
    scheduler = vllm_histories.build(Watched, features=features, seed=1)
    vllm_histories.History(scheduler, 1, features=features).run()
    for _, startable, started in scheduler.looks:
        assert set(startable[: len(started)]) == started
    assert any(len(startable) < waiting for waiting, startable, _ in scheduler.looks)
    assert any(started for _, _, started in scheduler.looks)


def test_a_call_whose_kv_is_loaded_from_elsewhere_may_not_start():
    """vLLM also skips calls for which the connector does not know yet what it finds; the probe cannot ask it."""
    features = ("connector", "aborts")
    scheduler = vllm_histories.build(Watched, features=features, seed=1)
    vllm_histories.History(scheduler, 1, features=features).run()
    assert all(started <= set(startable) for _, startable, started in scheduler.looks)
    assert any(len(startable) < waiting for waiting, startable, _ in scheduler.looks)


def add_without_grammar(driven, name, *, prompt=16, output=2, **labels):
    """A request whose grammar is compiled when the test says so. Returns the request."""
    driven.scheduler.structured_output_manager = vllm_histories.Grammars()
    driven.ends[name] = output
    request = engine.request(name, prompt, {f"tg.{key}": value for key, value in labels.items()})
    request.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(json="{}"))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    driven.scheduler.add_request(request)
    return request


def test_no_call_yields_to_a_call_without_its_grammar_until_the_grammar_is_ready():
    driven = Driven(PLACES, policy="priority", regulators=create(["slot-preemption"]))
    for name in "abcd":
        driven.add(name, output=60, urgency=4)
    driven.step()
    request = add_without_grammar(driven, "urgent", urgency=0)
    for _ in range(20):
        assert sorted(driven.step()) == ["a", "b", "c", "d"]
    assert driven.scheduler.state().preemptions == 0
    request.structured_output_request.grammar = SimpleNamespace(is_terminated=lambda: False)
    assert "urgent" in driven.step()
    assert driven.scheduler.state().preemptions == 1


def test_a_call_that_is_aborted_while_its_grammar_compiles_is_forgotten():
    driven = Driven(PLACES, policy="fcfs")
    driven.add("a", output=60)
    driven.step()
    add_without_grammar(driven, "b")
    probe, waiting = VllmProbe(driven.scheduler), SimpleNamespace(call=SimpleNamespace(id="b"))
    assert not list(probe.startable([waiting]))
    assert probe._pending
    driven.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    driven.step()
    assert not list(probe.startable([]))
    assert not probe._pending


def test_the_fence_lets_calls_start_behind_a_call_without_its_grammar():
    driven = Driven(PLACES, policy="fcfs", regulators=create(["fence"]))
    driven.add("a", output=60)
    driven.step()
    add_without_grammar(driven, "long", prompt=15_900)
    for name in "bcd":
        driven.add(name, output=60)
    assert sorted(driven.step()) == ["a", "b", "c", "d"]


def test_a_call_yields_to_an_urgent_one_although_a_session_between_two_inputs_keeps_a_place():
    driven = Driven(PLACES, policy="priority", regulators=create(["slot-preemption"]))
    driven.ends["session"] = 1
    driven.scheduler.add_request(vllm_histories.made("session", 20, arrival_s=1.0, resumable=True))
    for name in "abc":
        driven.add(name, output=60, urgency=4)
    driven.step()
    assert driven.running() == ["a", "b", "c"]
    driven.add("urgent", urgency=0)
    assert "urgent" in driven.step()
    assert driven.scheduler.state().preemptions == 1


def test_the_preemption_of_a_call_frees_the_tokens_that_only_it_holds():
    driven = Driven(replace(PLACES, max_batch=8, max_step_tokens=2048))
    for number, prompt in enumerate((624, 640, 700, 300)):
        driven.add(f"c{number}", prompt=prompt, output=60, prefixes=[(7, 608)])
        driven.step()
    probe, found = VllmProbe(driven.scheduler), []
    for name in ("c1", "c2", "c0", "c3"):
        before = probe.free_kv_tokens()
        found.append(probe.own_kv_tokens(name, enough=10_000))
        assert probe.own_kv_tokens(name, enough=16) == min(found[-1], 16)
        driven.scheduler._execution._preempt(name)
        assert probe.free_kv_tokens() - before == found[-1]
    assert found == [48, 96, 352, 304]


def test_a_session_that_waits_holds_the_tokens_that_it_has_computed():
    """Also where the prefix cache does not know them."""
    driven = Driven(PLACES)
    driven.ends["session"] = 1
    driven.scheduler.add_request(vllm_histories.made("session", 20, arrival_s=1.0, resumable=True))
    driven.step()
    probe = VllmProbe(driven.scheduler)
    held = driven.scheduler.requests["session"].num_computed_tokens
    assert held >= 20
    assert probe.cached_tokens("session") == probe.shared_tokens("session") == held


def test_the_memory_of_a_cached_prefix_is_in_use_only_while_a_call_keeps_it():
    driven = Driven(replace(PLACES, max_step_tokens=2048))
    probe = VllmProbe(driven.scheduler)
    driven.add("first", prompt=640, output=1, prefixes=[(7, 608)])
    driven.starts()
    driven.add("second", prompt=640, output=60, prefixes=[(7, 608)])
    assert (probe.cached_tokens("second"), probe.shared_tokens("second")) == (608, 0)
    driven.step()
    driven.add("third", prompt=640, output=60, prefixes=[(7, 608)])
    assert (probe.cached_tokens("third"), probe.shared_tokens("third")) == (608, 608)


def test_calls_that_share_their_memory_do_not_yield_one_by_one():
    """Each of eight calls holds 608 tokens that all share, and a few blocks of its own. At the end the last of them has the
    shared tokens alone, and yields."""
    limits = replace(PLACES, max_batch=12, max_step_tokens=2048, kv_tokens=64 * engine.BLOCK_TOKENS)
    driven = Driven(limits, policy="priority", regulators=create(["slot-preemption"]))
    for number in range(8):
        driven.add(f"low{number}", prompt=620, output=10, prefixes=[(7, 608)], urgency=4)
        driven.step()
    driven.add("urgent", prompt=800, output=2, urgency=0)
    driven.starts()
    assert driven.scheduler.state().preemptions <= 1
    assert not driven.scheduler.requests


def test_slot_preemption_before_the_fence_starts_an_urgent_call_in_the_same_step():
    limits = replace(PLACES, kv_tokens=64 * engine.BLOCK_TOKENS, max_batch=2)
    driven = Driven(limits, policy="priority", regulators=create(["slot-preemption", "fence"]))
    for name in ("a", "b"):
        driven.add(name, prompt=300, output=100, out_pred=100, urgency=4)
        driven.step()
    driven.step()
    driven.add("urgent", prompt=300, output=100, out_pred=100, urgency=0)
    assert "urgent" in driven.step()
    assert driven.scheduler.state().preemptions == 1
