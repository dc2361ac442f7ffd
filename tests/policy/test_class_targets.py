"""When a call is due whose class promises a part of what a class may promise."""

import random

import pytest

from tidegate_policy import cost, gateway_core
from tidegate_policy.admit.entitlements import SloClass
from tidegate_policy.admit.promises import CallFacts, Claims
from tidegate_policy.dispatch.engine_table import EngineFacts
from tidegate_policy.model import DropReason, EngineId

STEP_S, PREFILL_S = 0.02, 1e-4


def due_at_s(promised: SloClass, claims: Claims) -> float | None:
    settings = gateway_core.CoreSettings(classes=(promised,))
    core = gateway_core.GatewayCore(settings, random.Random(0))
    model = cost.CostModel(step_s=STEP_S, prefill_s=PREFILL_S, max_batch=4)
    core.on_engine(0.0, EngineFacts(id=EngineId("e"), cost=model))
    facts = CallFacts(id="a", model="m", characters=400, slo_class="chat", max_tokens=101, claims=claims)  # type: ignore[arg-type]
    draft = core.draft(0.0, facts)
    assert not isinstance(draft, DropReason)
    return core.promise(draft, None).due_at_s


@pytest.mark.parametrize(
    ("promised", "claims"),
    [
        (SloClass(name="chat", ttft_s=1.0), Claims()),
        (SloClass(name="chat", ttft_s=1.0), Claims(ttft_s=0.1)),
        (SloClass(name="chat"), Claims(ttft_s=1.0)),
    ],
)
def test_a_target_for_the_first_token_alone_makes_a_call_due(promised: SloClass, claims: Claims) -> None:
    both = due_at_s(SloClass(name="chat", ttft_s=1.0, tpot_s=STEP_S), Claims())
    assert both is not None
    assert due_at_s(promised, claims) == pytest.approx(both, rel=0.05), "a further token takes a step"


def test_a_target_for_the_further_tokens_alone_makes_no_call_due() -> None:
    assert due_at_s(SloClass(name="chat", tpot_s=0.05), Claims()) is None
