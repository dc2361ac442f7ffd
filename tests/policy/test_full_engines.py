"""Several tenants fill the engines, each within its bound: one that has little of them is owed a place (decision 65)."""

import random
from dataclasses import replace

import pytest
from test_tenant_shares import entered, item

from tidegate_policy import policies
from tidegate_policy.admit import retries
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.prompt_window import PoolPrompts, PromptCosts, PromptSeconds
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad, TenantLoad
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.dispatch.dispatcher import Dispatcher
from tidegate_policy.dispatch.engine_table import EngineFacts, EngineTable, Health
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.model import NO_BACKLOG, Call, CallId, EngineId

LIMIT = 36.0
COST = CostModel(step_s=0.02, prefill_s=1e-4, max_batch=16)
OTHERS = ("a", "b", "c")


def shares(*, serving: float = LIMIT) -> TenantShares:
    return TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: LIMIT, serving=lambda now: serving)


def filled(each: int, *, serving: float = LIMIT) -> TenantShares:
    """Three tenants have so many places each, and a fourth one competes with them."""
    made = shares(serving=serving)
    for name in (*OTHERS, "quiet"):
        made.competes(0.0, item("first", name).call)
    for name in OTHERS:
        assert entered(made, 0.0, name, each) == each, "nobody waits"
    assert made.surplus(0.0) == {}, "each is within its bound"
    return made


def test_a_tenant_that_has_little_of_full_engines_is_owed_a_place() -> None:
    made = filled(10)
    assert made.is_owed(0.0, "quiet")
    assert not any(made.is_owed(0.0, name) for name in OTHERS)
    assert made.marked(0.0, item("call", "quiet", service_s=0.1)).call.owed
    entered(made, 0.0, "quiet", 5, service_s=0.1)
    assert not made.is_owed(0.0, "quiet"), "it has half of its part: 4.5 of 9 places"


@pytest.mark.parametrize("each", [8, 10])
def test_a_tenant_that_has_little_of_full_engines_is_owed_a_place_for_prompts_that_yield_too(each: int) -> None:
    made = filled(each)
    made.prompts = PoolPrompts(PromptCosts(lambda call: PromptSeconds(9.0, 9.0), lambda now: 1))
    call = made.marked(0.0, item("call", "quiet")).call
    assert (call.yields, call.owed) == (True, each == 10)


def test_nobody_is_owed_a_place_while_engines_have_room() -> None:
    made = filled(8)
    assert not made.is_owed(0.0, "quiet")
    made = filled(8, serving=24.0)
    assert made.is_owed(0.0, "quiet"), "a third of the engines does not serve"


def test_places_at_other_gateways_count() -> None:
    made = filled(5)
    assert not made.is_owed(0.0, "quiet")
    made.on_others(1.0, PoolLoad({name: TenantLoad(entered=5, waiting=0, weight=1.0, rate=0.0) for name in OTHERS}), 2)
    assert made.is_owed(1.0, "quiet")


def test_what_a_gateway_has_gained_since_it_told_may_have_come_to_the_others_too() -> None:
    made = shares()
    made.on_others(0.0, NO_LOAD, 2)
    made.competes(0.0, item("first", "quiet").call)
    made.load(0.0)
    assert sum(entered(made, 0.0, name, 5) for name in OTHERS) == 15
    assert made.is_owed(0.0, "quiet"), "the other gateway may have 15 too"
    for _ in range(2):
        made.load(1.0)
    made.on_others(1.0, NO_LOAD, 2)
    assert not made.is_owed(1.0, "quiet"), "it has told that it has none"


def test_the_part_of_a_tenant_is_that_of_its_weight() -> None:
    made = shares()
    made.competes(0.0, item("first", "heavy", 3.0).call)
    entered(made, 0.0, "heavy", 12, 3.0)
    assert entered(made, 0.0, "other", 16) == 16
    assert made.is_owed(0.0, "heavy"), "it has 12 of 27"
    entered(made, 0.0, "heavy", 2, 3.0)
    assert not made.is_owed(0.0, "heavy")


def test_a_tenant_that_has_all_engines_alone_is_owed_nothing() -> None:
    made = shares()
    entered(made, 0.0, "alone", 36)
    assert not made.is_owed(0.0, "alone")


def test_without_bounds_nobody_is_owed_a_place() -> None:
    made = TenantShares(policies.create("fcfs"), bounded=False, limits=lambda: LIMIT, serving=lambda now: LIMIT)
    entered(made, 0.0, "other", 36)
    made.competes(0.0, item("first", "quiet").call)
    assert not made.is_owed(0.0, "quiet")


@pytest.mark.parametrize("down", [0, 1])
def test_its_call_goes_to_an_engine_at_once_and_is_marked(down: int) -> None:
    table = EngineTable("auto", OutlierSettings())
    gate = Dispatcher(
        table,
        policy=policies.create("urgency"),
        settings=DispatchSettings(),
        limits=Limits(),
        retry=retries.RetrySettings(),
        rng=random.Random(0),
    )
    for number in range(2 + down):
        health = Health.UP if number < 2 else Health.DOWN
        facts = EngineFacts(id=EngineId(f"e{number}"), cost=COST, health=health)
        table.update(facts, lambda: NO_BACKLOG)
    gate.tenants.on_settings(several=True)
    long = Call(id=CallId(""), arrived_at_s=0.0, prompt_tokens=20, output_predicted=1500)
    for number in range(36):
        name = f"tenant {number % 4}"
        (send,) = gate.on_arrival(0.0, replace(long, id=CallId(f"long {number}"), tenant=name))
        assert isinstance(send, Send), "no call of theirs waits"
    (send,) = gate.on_arrival(1.0, replace(long, id=CallId("short"), output_predicted=5, tenant="quiet"))
    assert isinstance(send, Send)
    assert send.call.owed
