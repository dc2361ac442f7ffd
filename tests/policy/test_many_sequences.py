"""Calls of many sequences and long prompts fill the engines: a tenant with small calls is served at once (decision 66)."""

import random
from dataclasses import replace

import pytest
from test_owed_calls import LIMITS, Engine
from test_tenant_shares import entered, item

from tidegate_policy import policies
from tidegate_policy.admit import retries
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.pool_places import FIRST_CALLS
from tidegate_policy.admit.tenant_shares import TenantShares
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.dispatch.dispatcher import Dispatcher
from tidegate_policy.dispatch.engine_table import EngineFacts, EngineTable
from tidegate_policy.dispatch.pool_shares import PoolShares
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.engine import owed_calls, yielding_prompts
from tidegate_policy.model import NO_BACKLOG, Call, CallId, EngineId

LIMIT = 144.0
COST = CostModel(step_s=0.02, prefill_s=1e-4, max_batch=64)
ENGINES = ("e0", "e1")
MANY = 16
"""Sequences of a call."""
SHORT = Call(id=CallId(""), arrived_at_s=0.0, prompt_tokens=20, output_predicted=5)


MARKS = ((True, False), (True, True), (False, False), (False, True))
"""Owed a place, and whether the prompt yields."""


def table() -> EngineTable:
    made = EngineTable("auto", OutlierSettings())
    for name in ENGINES:
        made.update(EngineFacts(id=EngineId(name), cost=COST), lambda: NO_BACKLOG)
    return made


def gate(engines: EngineTable) -> Dispatcher:
    made = Dispatcher(
        engines,
        policy=policies.create("urgency"),
        settings=DispatchSettings(),
        limits=Limits(),
        retry=retries.RetrySettings(),
        rng=random.Random(0),
    )
    made.tenants.on_settings(several=True)
    return made


def shares() -> TenantShares:
    return TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: LIMIT, serving=lambda now: LIMIT)


def test_calls_that_wait_for_an_engine_have_no_place() -> None:
    made = shares()
    for name in ("a", "b", "c", "quiet"):
        made.competes(0.0, item("first", name).call)
    for name in ("a", "b", "c"):
        entered(made, 0.0, name, 40)
    for number in range(30):
        made.enter(0.0, item(f"queued {number}", "quiet"))
    assert made.is_owed(0.0, "quiet"), "it has none of its 36 places"
    assert list(made.owed(0.0)) == ["queued 0"], "the turn of a tenant ends with a call that is not sent"
    sent = []
    for call in made.owed(0.0):
        made.queue.remove(item(call, "quiet").call)
        sent.append(call)
    assert sent == [f"queued {number}" for number in range(18)], "half of its part"


def test_calls_of_many_sequences_leave_places_for_those_of_few() -> None:
    engines = table()
    made = gate(engines)
    for number in range(10):
        many = replace(SHORT, id=CallId(f"many {number}"), tenant=f"t{number}", sequences=MANY)
        assert made.on_arrival(0.0, replace(many, output_predicted=500)), "no call of theirs waits"
    assert {engine.routable.calls for engine in engines} == {5 * MANY}, "more than the limit of 72"
    for number in range(4):
        large = replace(SHORT, id=CallId(f"large {number}"), tenant="large", sequences=MANY)
        assert made.on_arrival(0.0, large) == [], "it would take all places that are left"
    for number in range(6):
        (send,) = made.on_arrival(1.0, replace(SHORT, id=CallId(f"few {number}"), tenant="quiet"))
        assert isinstance(send, Send)
        assert (send.call.id, send.call.owed) == (f"few {number}", True)


def test_a_light_tenant_is_not_bounded_by_the_heavy_calls_of_others() -> None:
    made = shares()
    for _ in range(FIRST_CALLS):
        made.observe(10.0, 0.8)
    assert made.places == pytest.approx(12.5)
    for number in range(10):
        call = item(f"heavy {number}", f"t{number}")
        made.competes(0.0, call.call)
        made.sends(0.0, call, 4.0)
        made.enter(0.0, call)
    found = []
    for number in range(30):
        call = item(f"light {number}", "light", service_s=0.1)
        made.competes(0.0, call.call)
        made.sends(0.0, call, 0.001)
        found.append(made.lets_in(0.0, call))
        made.enter(0.0, call)
    assert None not in found
    assert not any(each.call.yields for each in found if each is not None), "it floods nothing"


def test_places_are_counted_in_sequences() -> None:
    found = []
    for sequences in (1, MANY):
        made = PoolShares(policies.create("fcfs"), bounded=True, engines=table())
        for number in range(FIRST_CALLS):
            call = replace(SHORT, id=CallId(f"{number}"), tenant="t", sequences=sequences, output_predicted=200)
            made.competes(0.0, call)
            made.arrived(0.0, policies.QueuedRequest(call=call, service_s=1.0))
        found.append(made._whole.places)
    assert found[1] >= found[0], "the sequences of a call are side by side, as those of several calls"


def test_short_prompts_go_before_long_ones_that_are_owed_a_place_too() -> None:
    turns = [replace(SHORT, owed=owed, yields=yields).turn for owed, yields in MARKS]
    assert turns == sorted(set(turns))


def test_a_prompt_that_yields_does_not_start_while_another_one_is_paused() -> None:
    engine = Engine("fcfs", max_batch=64, blocks=4000)
    engine.compute_long_prompt(1000)
    engine.arrives("yields", yields=True, prompt=1000)
    engine.step()
    for number in range(8):
        engine.arrives(f"twin {number}", owed=True, yields=True, prompt=1000)
    before = engine.computed("yields")
    starts = []
    for _ in range(6):
        started, _ = engine.step()
        starts.append((engine.computed("yields") == before, len(started)))
        before = engine.computed("yields")
    assert all(not count for is_paused, count in starts if is_paused)


def test_a_long_prompt_that_yields_does_not_start_behind_many_short_ones() -> None:
    engine = Engine("fcfs", max_batch=256, blocks=4000)
    for number in range(yielding_prompts.MOST_STARTS + 8):
        engine.arrives(f"short {number}", owed=True, prompt=2)
    engine.arrives("long", yields=True, prompt=1000)
    engine.step()
    assert engine.computed("long") == 0
    assert engine.computed("short 0") == 2


def test_a_long_prompt_that_is_owed_a_place_leaves_most_of_a_step_to_the_others() -> None:
    engine = Engine("fcfs", max_batch=64, blocks=4000)
    engine.arrives("decodes", owed=True)
    engine.step()
    for number in range(4):
        engine.arrives(f"long {number}", owed=True, prompt=8000)
    chunk = round(owed_calls.CHUNK_STEPS * LIMITS.step_s / LIMITS.prefill_s)
    before = 0
    for _ in range(20):
        engine.step()
        now = engine.computed(*[f"long {number}" for number in range(4)])
        assert now - before <= chunk + 4, "and a token of each answer"
        before = now
    assert before >= 4 * chunk


def test_older_calls_of_a_tenant_that_is_owed_a_place_start_too() -> None:
    engine = Engine("fcfs", max_batch=2, blocks=4000)
    for name in ("f0", "f1", "f2"):
        engine.arrives(name)
    engine.step()
    engine.arrives("older")
    engine.scheduler.core.on_update(replace(engine.scheduler.core.item(CallId("older")).call, tenant="quiet"))
    assert engine.step() == (set(), set()), "answers fill the batch"
    engine.arrives("quiet", owed=True)
    started = set.union(*[engine.step()[0] for _ in range(2 * owed_calls.AGAIN_STEPS)])
    assert started == {"older", "quiet"}
