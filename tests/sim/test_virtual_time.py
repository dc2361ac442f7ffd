"""Virtual time: the loop, and an engine in it."""

import pytest

from tidegate_sim.virtual_time import Loop

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

COST = CostModel(step_s=0.02, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-7, kv_tokens=64_000)


def test_events_run_in_the_order_of_their_instants_and_then_of_asking():
    loop, seen = Loop(), []
    for name, delay_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        loop.after(delay_s, lambda name=name: seen.append((name, loop.now())))
    loop.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_an_event_cannot_be_in_the_past():
    with pytest.raises(ValueError, match="in the past"):
        Loop().after(-1.0, lambda: None)


class Heard:
    def __init__(self, loop):
        self.loop, self.tokens, self.ended = loop, {}, {}

    def on_tokens(self, call_id, produced):
        self.tokens.setdefault(call_id, []).append((self.loop.now(), produced))

    def on_end(self, call_id):
        self.ended[call_id] = self.loop.now()


def alone(prompt, output, cost=COST):
    loop = Loop()
    heard = Heard(loop)
    machine = engine.VirtualEngine(loop, cost, policy="urgency", listener=heard)
    machine.submit(Call(id=CallId("a"), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=9), output)
    loop.run()
    return heard, machine


@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (100, 40), (20_000, 5)])
def test_a_call_alone_takes_what_the_cost_model_says(prompt, output):
    heard, machine = alone(prompt, output)
    call = Call(id=CallId("a"), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=output)
    assert heard.ended["a"] == pytest.approx(COST.call_seconds(call), rel=1e-3)
    assert machine.busy_s == pytest.approx(heard.ended["a"])


def test_an_answer_has_its_true_length_whatever_was_predicted():
    heard, _ = alone(100, 40)
    assert [produced for _, produced in heard.tokens["a"]] == list(range(1, 40))


def test_a_shared_prefix_is_computed_once():
    loop = Loop()
    heard = Heard(loop)
    machine = engine.VirtualEngine(loop, COST, policy="fcfs", listener=heard)
    for name, at_s in (("first", 0.0), ("second", 5.0)):
        call = Call(id=CallId(name), arrived_at_s=at_s, prompt_tokens=4000, output_predicted=1)
        loop.after(at_s, lambda call=call: machine.submit(call, 1, prefixes=((7, 3904),)))
    loop.run()
    assert heard.ended["first"] > 0.4
    assert heard.ended["second"] - 5.0 < 0.1
