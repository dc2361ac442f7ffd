"""A client sends tools that its engine counts no tokens for: neither lengths nor costs are learned wrong from that."""

import random

import pytest

from tidegate_policy import gateway_core
from tidegate_policy.admit.promises import CallFacts
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.dispatch.engine_table import EngineFacts
from tidegate_policy.model import Call, CallId, DropReason, EngineId
from tidegate_policy.predict import engine_cost
from tidegate_policy.predict.engine_cost import EngineCost

COST = engine_cost.STARTING
TOOLS, LONG = 1000 * 440, 19_000 * 6
"""Characters of the tools, and of a long text."""
OUTPUT = 60


class Pool:
    """One engine without a profile, with the costs that such an engine is believed to have."""

    def __init__(self) -> None:
        self.core = gateway_core.GatewayCore(gateway_core.CoreSettings(), random.Random(0))
        self.core.on_engine(0.0, EngineFacts(id=EngineId("e"), cost=None))
        self.now = 0.0
        self._number = 0

    def send(self, characters: int, tenant: str = "tools") -> tuple[Call, float]:
        """The call, and the seconds for which it is predicted to be served."""
        self._number += 1
        facts = CallFacts(
            id=CallId(str(self._number)), model="m", tenant=tenant, characters=characters, messages=1, max_tokens=OUTPUT
        )
        draft = self.core.draft(self.now, facts)
        assert not isinstance(draft, DropReason)
        (send,) = self.core.on_arrival(self.now, self.core.promise(draft, None))
        assert isinstance(send, Send)
        return send.call, send.decision.service_s

    def answer(self, call: Call, prompt: int) -> None:
        self.now += COST.step_seconds(uncached=prompt, attended=prompt * prompt // 2, decodes=0, context=0)
        self.core.on_first_token(self.now, call.id)
        for tokens in range(2, OUTPUT + 1):
            self.now += COST.step_seconds(uncached=0, attended=0, decodes=1, context=prompt + tokens)
            self.core.on_progress(self.now, call.id, tokens)
        result = gateway_core.CallResult(ok=True, prompt_tokens=prompt, output_tokens=OUTPUT)
        self.core.on_end(self.now, call.id, result)

    def predicted(self, tenant: str) -> tuple[int, float]:
        """Tokens of a long text, and the seconds in which it is served."""
        call, service_s = self.send(LONG, tenant)
        self.core.on_cancel(self.now, call.id)
        return call.prompt_tokens, service_s


@pytest.mark.parametrize("tenant", ["tools", "another"])
def test_a_long_text_is_as_long_as_before_the_engine_left_out_the_tools_of_many_calls(tenant: str) -> None:
    pool = Pool()
    tokens, service_s = pool.predicted(tenant)
    for _ in range(50):
        call, _ = pool.send(TOOLS)
        pool.answer(call, 20)
        pool.now += 1.0
    after_tokens, after_s = pool.predicted(tenant)
    assert tokens / 3 < after_tokens < 3 * tokens
    assert service_s / 3 < after_s < 3 * service_s


def test_the_usage_of_an_engine_corrects_the_work_of_a_prompt_that_was_predicted_wrong() -> None:
    """Calls overlap: another call begins its answer before the first one has ended, and ends after it."""
    wrong, right = EngineCost(None), EngineCost(None)
    for estimate, predicted in ((wrong, 50_000), (right, 20)):
        for index in range(50):
            now = 10.0 * index
            first, second = CallId(f"a{index}"), CallId(f"b{index}")
            for name, tokens in ((first, predicted), (second, 500)):
                call = Call(id=name, arrived_at_s=now, prompt_tokens=tokens, output_predicted=OUTPUT)
                estimate.on_sent(now, call, 0, others=0)
            estimate.on_tokens(now + 0.1, first, 1, 1.0)
            estimate.on_tokens(now + 0.2, second, 1, 1.0)
            estimate.on_end(now + 2.2, first, OUTPUT, 1.0, streamed=True, prompt_tokens=20)
            estimate.on_end(now + 3.2, second, OUTPUT, 1.0, streamed=True, prompt_tokens=500)
    assert wrong.cost.prefill_s == pytest.approx(right.cost.prefill_s, rel=0.2)


def test_a_prompt_without_tokens_of_an_engine_leaves_the_prediction() -> None:
    estimate = EngineCost(CostModel(step_s=0.02, prefill_s=1e-4))
    call = Call(id=CallId("a"), arrived_at_s=0.0, prompt_tokens=500, output_predicted=OUTPUT)
    estimate.on_sent(0.0, call, 0, others=0)
    estimate.on_tokens(0.1, call.id, 1, 1.0)
    estimate.on_end(1.3, call.id, OUTPUT, 1.0, streamed=True, prompt_tokens=0)
    assert estimate.learned == 2
