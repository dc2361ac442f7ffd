"""The gateway core: what a call is promised, how failures are handled, and what is learned."""

import random
from dataclasses import replace

import pytest

from tidegate_policy import cost, gateway_core, policies
from tidegate_policy.admit import outliers
from tidegate_policy.admit.entitlements import SloClass, Tenant
from tidegate_policy.admit.promises import CallFacts, Claims
from tidegate_policy.admit.retries import Failure
from tidegate_policy.dispatch import rules
from tidegate_policy.dispatch.core_actions import Action, GiveUp, Send, Shed
from tidegate_policy.dispatch.engine_table import EngineFacts, Health
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.gateway_core import (
    CallResult,
    CoreSettings,
    GatewayCore,
    StageFacts,
    UnknownSloClass,
    WorkflowFacts,
    used_tokens,
)
from tidegate_policy.model import Call, CallId, DropReason, EngineId, WorkflowId
from tidegate_policy.scale import call_load

COST = cost.CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)


def core(engines: int = 2, *, profile: cost.CostModel | None = COST, **settings: object) -> GatewayCore:
    made = GatewayCore(CoreSettings(**settings), random.Random(0))  # type: ignore[arg-type]
    for index in range(engines):
        made.on_engine(0.0, EngineFacts(id=EngineId(f"e{index}"), cost=profile))
    return made


def facts(name: str = "a", **more: object) -> CallFacts:
    return CallFacts(**{"id": CallId(name), "model": "m", "characters": 400, **more})  # type: ignore[arg-type]


def promised(made: GatewayCore, now: float = 0.0, given: CallFacts | None = None) -> Call:
    draft = made.draft(now, given or facts())
    assert not isinstance(draft, DropReason)
    return made.promise(draft, None)


def arrived(made: GatewayCore, name: str, now: float = 0.0, **more: object) -> list[Action]:
    return made.on_arrival(now, promised(made, now, facts(name, **more)))


def engine_of(actions: list[Action]) -> str:
    (send,) = actions
    assert isinstance(send, Send)
    return send.decision.engine


def answered(tokens: int = 50, **more: object) -> CallResult:
    return CallResult(**{"ok": True, "prompt_tokens": 100, "output_tokens": tokens, **more})  # type: ignore[arg-type]


# Promises.


def test_a_claim_loosens_the_targets_of_a_class_and_never_tightens_them() -> None:
    made = core(classes=(SloClass(name="chat", ttft_s=1.0, tpot_s=0.1),))
    tight = promised(made, given=facts("a", slo_class="chat", claims=Claims(ttft_s=0.1, tpot_s=0.5)))
    assert (tight.ttft_s, tight.tpot_s) == (1.0, 0.5)


def test_a_tenant_claims_urgency_only_up_to_its_entitlement() -> None:
    made = core(tenants=(Tenant(name="vip", max_urgency=0),))
    levels = [
        promised(made, given=facts(tenant, tenant=tenant, claims=Claims(urgency=0))).urgency
        for tenant in ("vip", "other")
    ]
    assert levels == [0, 2]


def test_no_call_is_due_before_the_fastest_engine_could_have_answered_it() -> None:
    call = promised(core(), 5.0, facts(claims=Claims(deadline_s=0.001)))
    assert call.due_at_s == pytest.approx(5.0 + COST.call_seconds(call))
    assert call.deadline_at_s == pytest.approx(5.001)


def test_an_unknown_class_is_an_error_only_where_classes_are_configured() -> None:
    made = core(classes=(SloClass(name="chat"),))
    with pytest.raises(UnknownSloClass, match="class 'batch' is unknown; known are chat"):
        made.draft(0.0, facts(slo_class="batch"))
    assert promised(core(), given=facts(slo_class="batch")).slo_class == "batch"


def test_tokens_to_book_are_the_prompt_and_every_predicted_answer() -> None:
    draft = core().draft(0.0, facts(sequences=3, max_tokens=10))
    assert not isinstance(draft, DropReason)
    assert draft.tokens_to_book == 100 + 3 * 10


def test_a_declared_stage_gets_a_share_of_its_workflows_time_and_an_undeclared_one_follows_history() -> None:
    made = core()
    declared = tuple(StageFacts(name=name, after=after) for name, after in (("plan", ()), ("write", ("plan",))))
    flow = WorkflowFacts(
        id=WorkflowId("w"), tenant="t", template="", deadline_at_s=100.0, cutoff_at_s=110.0, stages=declared
    )
    assert made.stage_grant(0.0, flow, "plan", "m").due_at_s == pytest.approx(50.0)
    assert made.stage_grant(0.0, flow, "write", "m").due_at_s == 100.0
    undeclared = replace(flow, stages=())
    assert made.stage_grant(0.0, undeclared, "plan", "m").due_at_s == 100.0
    own_s = made.lengths.stage_seconds(("t", "", "plan", "m"), [COST])
    made.remaining_work.observe(("t", "", "plan"), 3 * own_s)
    grant = made.stage_grant(0.0, undeclared, "plan", "m")
    assert (grant.due_at_s, grant.rest_s) == (pytest.approx(25.0), pytest.approx(3 * own_s))


def test_a_stage_without_calls_in_earlier_workflows_takes_no_part_of_the_time_of_a_workflow() -> None:
    made = core()
    order = (("plan", ()), ("run-sql", ("plan",)), ("write", ("run-sql",)))
    stages = tuple(StageFacts(name=name, after=after) for name, after in order)
    flow = WorkflowFacts(
        id=WorkflowId("w"), tenant="t", template="x", deadline_at_s=90.0, cutoff_at_s=90.0, stages=stages
    )
    assert made.stage_grant(0.0, flow, "plan", "m").due_at_s == pytest.approx(30.0)
    for call in ("plan", "write"):
        made.workflows.on_call(0.0, WorkflowId("earlier"), CallId(call), call, tenant="t", template="x")
        made.workflows.on_end(1.0, WorkflowId("earlier"), CallId(call), 1.0)
    made.on_workflow_end(1.0, WorkflowId("earlier"), ok=True, uncalled=["run-sql"])
    assert made.stage_grant(0.0, flow, "plan", "m").due_at_s == pytest.approx(45.0)
    assert made.stage_grant(0.0, flow, "write", "m").due_at_s == pytest.approx(90.0)
    assert made.stage_grant(0.0, flow, "run-sql", "m").due_at_s == pytest.approx(45.0), "it has a call now"


def test_a_call_that_names_no_tenant_is_one_of_the_tenant_of_its_workflow() -> None:
    made = core(tenants=(Tenant(name="t", weight=3.0, max_urgency=1),))
    flow = WorkflowFacts(id=WorkflowId("w"), tenant="t", template="", deadline_at_s=100.0, cutoff_at_s=110.0, stages=())
    draft = made.draft(0.0, facts(workflow="w", claims=Claims(urgency=0)))
    assert not isinstance(draft, DropReason)
    call = made.promise(draft, made.stage_grant(0.0, flow, "main", "m"))
    assert (call.tenant, call.weight, call.urgency) == ("t", 3.0, 1)
    made.on_arrival(0.0, call)
    assert made.dispatcher.gate._tenant_of == {"w": "t"}


def test_calls_that_may_be_shed_are_shed_in_a_crowd_of_their_own_tenant_only() -> None:
    made = core(max_inflight=1, limits=Limits(max_waiting=20), classes=(SloClass(name="batch", sheddable=True),))
    for index in range(16):
        arrived(made, f"flood-{index}", tenant="flood")
    assert made.draft(0.0, facts("a", tenant="flood", slo_class="batch")) is DropReason.SATURATED
    assert not isinstance(made.draft(0.0, facts("b", tenant="quiet", slo_class="batch")), DropReason)


# Failures.


def test_a_call_that_lost_its_engine_goes_to_another_one_and_is_given_up_after_that() -> None:
    made = core()
    first = engine_of(arrived(made, "a"))
    second = engine_of(made.on_attempt_failed(0.1, CallId("a"), Failure.GONE))
    assert first != second
    (last,) = made.on_attempt_failed(0.2, CallId("a"), Failure.GONE)
    assert isinstance(last, GiveUp)


def test_retries_of_late_calls_share_a_budget_and_those_of_calls_that_no_engine_works_on_do_not() -> None:
    for failure in (Failure.GONE, Failure.FAILED):
        made = core(engines=2, max_inflight=None)
        for index in range(10):
            arrived(made, str(index))
        late = [made.on_attempt_failed(0.1, CallId(str(index)), Failure.LATE)[0] for index in range(5)]
        assert [isinstance(action, GiveUp) for action in late] == [False, False, False, True, True]
        others = [made.on_attempt_failed(0.1, CallId(str(index)), failure)[0] for index in range(5, 10)]
        assert all(isinstance(action, Send) for action in others)


def test_an_engine_that_fails_three_calls_in_a_row_is_ejected_unless_it_is_the_last() -> None:
    made = core()
    assert [made.on_engine_result(0.0, EngineId("e0"), "t", ok=False).ejected_s for _ in range(3)] == [None, None, 1.0]
    assert {engine_of(arrived(made, str(index), 0.5)) for index in range(6)} == {"e1"}
    assert [made.on_engine_result(0.5, EngineId("e1"), "t", ok=False).ejected_s for _ in range(5)] == [None] * 5
    assert {engine_of(arrived(made, f"later {index}", 1.5)) for index in range(6)} == {"e0"}


def test_the_failures_of_one_tenant_eject_no_engine_that_serves_another_one() -> None:
    made, engine = core(), EngineId("e0")

    def fail(now: float, tenant: str, calls: int = 1) -> list[float | None]:
        return [made.on_engine_result(now, engine, tenant, ok=False).ejected_s for _ in range(calls)]

    made.on_engine_result(0.0, engine, "honest", ok=True)
    made.on_engine_result(0.0, engine, "hostile", ok=True)
    assert fail(0.1, "hostile", 100) == [None] * 100
    assert {engine_of(arrived(made, str(index), 0.2)) for index in range(6)} == {"e0", "e1"}
    assert fail(0.2, "honest") == [1.0], "the calls of two tenants fail"
    for _ in range(outliers.OutlierSettings().consecutive_failures):
        made.on_engine_result(2.0, engine, "honest", ok=True)
    assert fail(2.0 + outliers.SERVED_S, "hostile", 3) == [None, None, 1.0], "no other tenant shows that it works"


def test_a_doubtful_engine_gets_calls_only_while_every_engine_is_doubtful() -> None:
    made = core()
    made.on_engine(0.0, EngineFacts(id=EngineId("e0"), cost=COST, health=Health.DOUBTFUL))
    assert {engine_of(arrived(made, str(index))) for index in range(4)} == {"e1"}
    made.on_engine(0.0, EngineFacts(id=EngineId("e1"), cost=COST, health=Health.DOUBTFUL))
    assert "e0" in {engine_of(arrived(made, f"more {index}")) for index in range(4)}
    for name in ("e0", "e1"):
        made.on_engine(0.0, EngineFacts(id=EngineId(name), cost=COST, health=Health.DOWN))
    (shed,) = arrived(made, "none")
    assert isinstance(shed, Shed)
    assert shed.reason is DropReason.NO_ENGINES


# Late predictions.


def test_a_waiting_call_is_ordered_anew_when_its_predicted_length_has_changed() -> None:
    made = core(engines=1, max_inflight=1, policy="sjf")
    arrived(made, "out", slo_class="new")
    arrived(made, "known", slo_class="known")  # predicted with the default of 128 tokens too
    waiting = arrived(made, "of the new kind", slo_class="new")
    assert waiting == []
    (send,) = made.on_end(1.0, CallId("out"), answered(3))
    assert isinstance(send, Send)
    assert (send.call.id, send.call.output_predicted) == ("of the new kind", 3)


def test_a_new_prediction_keeps_the_arrival_and_makes_the_promise_anew() -> None:
    made = core(engines=1, max_inflight=1, policy="edf", classes=(SloClass(name="chat", ttft_s=1.0, tpot_s=0.1),))
    arrived(made, "out", slo_class="chat")
    arrived(made, "waits", 2.0, slo_class="chat")
    (before,) = made.dispatcher.waiting_calls()
    made.on_engine(3.0, EngineFacts(id=EngineId("e0"), cost=COST, health=Health.DOWN))
    made.on_end(3.0, CallId("out"), answered(10))
    (after,) = made.dispatcher.waiting_calls()
    assert (before.arrived_at_s, before.output_predicted, before.due_at_s) == (2.0, 128, pytest.approx(15.8))
    assert (after.arrived_at_s, after.output_predicted, after.due_at_s) == (2.0, 10, pytest.approx(4.0))


def test_a_small_change_of_a_prediction_moves_no_call() -> None:
    made = core(engines=1, max_inflight=1, policy="sjf")
    arrived(made, "out")
    arrived(made, "waits")
    (before,) = made.dispatcher.waiting_calls()
    made.on_engine(3.0, EngineFacts(id=EngineId("e0"), cost=COST, health=Health.DOWN))
    made.on_end(3.0, CallId("out"), answered(100))
    assert made.dispatcher.waiting_calls() == [before]


def test_an_answer_predicts_few_waiting_calls_again_and_all_in_turn() -> None:
    count = 3 * gateway_core.PREDICTED_AGAIN
    limits = Limits(max_waiting=1000, share_among_tenants=False)
    made = core(engines=1, max_inflight=1, policy="fcfs", limits=limits)
    for index in range(count + 3):
        arrived(made, f"call {index}")
    seen = []
    for index in range(3):
        made.on_end(1.0, CallId(f"call {index}"), answered(10))
        seen.append(sum(call.output_predicted == 10 for call in made.dispatcher.waiting_calls()))
    assert seen == [gateway_core.PREDICTED_AGAIN - 1, 2 * gateway_core.PREDICTED_AGAIN - 2, count - 3]


def test_a_prediction_that_its_driver_replaced_is_left_alone() -> None:
    made = core(engines=1, max_inflight=1)
    arrived(made, "out")
    made.on_arrival(0.0, replace(promised(made, given=facts("known")), output_predicted=999))
    made.on_engine(3.0, EngineFacts(id=EngineId("e0"), cost=COST, health=Health.DOWN))
    made.on_end(3.0, CallId("out"), answered(10))
    assert [call.output_predicted for call in made.dispatcher.waiting_calls()] == [999]


def test_no_call_that_left_is_remembered_as_waiting() -> None:
    made = core(engines=1, max_inflight=1, limits=Limits(ttl_s=5.0))
    for name in ("out", "cancelled", "expired"):
        arrived(made, name)
    made.on_cancel(1.0, CallId("cancelled"))
    made.on_tick(6.0)
    made.on_end(7.0, CallId("out"), answered(10))
    assert not made._waiting


# Learning.


def test_lengths_follow_the_answers_of_the_same_kind() -> None:
    made = core()
    for index in range(30):
        arrived(made, str(index), tenant="t")
        made.on_end(1.0, CallId(str(index)), answered(7))
    assert promised(made, given=facts("next", tenant="t")).output_predicted == 7


def agent_turn(
    made: GatewayCore, name: str, now: float, *, tool: str | None, prompt: int = 100, **more: object
) -> Call:
    """A call of an agent's session, from its arrival to an answer of one second that invokes `tool`."""
    call = promised(made, now, facts(name, **{"tenant": "t", "session": "s", "offers_tools": True, **more}))
    made.on_arrival(now, call)
    made.on_end(now + 1.0, call.id, answered(20, prompt_tokens=prompt, tool=tool))
    return call


def test_the_tool_after_a_call_is_learned_from_answers_and_from_the_returns_of_sessions() -> None:
    made = core()
    for index in range(
        4
    ):  # each answer invokes a tool of 4 s that returns 30 tokens, and the next one ends the session
        first = agent_turn(made, f"first {index}", 100.0 * index, tool="search", session=f"s{index}")
        last = agent_turn(made, f"last {index}", 100.0 * index + 5.0, tool="", prompt=150, session=f"s{index}")
    assert (first.tool, first.tool_s, first.tool_return_tokens) == ("search", 4.0, 30)
    assert (last.tool, last.tool_s, last.tool_return_tokens) == (None, None, 0), "nothing follows it"
    other = promised(made, 900.0, facts("other", tenant="u", session="s", offers_tools=True))
    without_tools = promised(made, 900.0, facts("without", tenant="t", session="v"))
    single = promised(made, 900.0, facts("single", tenant="t", offers_tools=True))
    assert (other.tool, without_tools.tool, single.tool) == (None, None, None)


def test_an_answer_that_nothing_read_teaches_no_tool() -> None:
    made = core()
    for index in range(8):
        call = agent_turn(made, str(index), 10.0 * index, tool=None)
    assert call.tool is None
    assert not made.tools._names


def test_the_calls_of_a_workflow_without_sessions_learn_tools_too() -> None:
    made = core()
    for index in range(4):
        names = {"session": None, "workflow": f"w{index}"}
        call = agent_turn(made, f"a {index}", 100.0 * index, tool="search", **names)
        agent_turn(made, f"b {index}", 100.0 * index + 3.0, tool="", prompt=120, **names)
    assert (call.tool, call.tool_s) == ("search", 2.0)


def test_calls_that_end_in_any_way_leave_nothing_of_their_session() -> None:
    made = core(engines=1, max_inflight=1, limits=Limits(max_waiting=1))
    for name in ("out", "waits", "shed"):
        arrived(made, name, session="s")
    made.on_cancel(1.0, CallId("waits"))
    made.on_end(1.0, CallId("out"), CallResult(ok=False))
    assert not made.tools._running


def rejected(made: GatewayCore, name: str, **more: object) -> None:
    """A call that an engine rejects at once."""
    arrived(made, name, **more)
    made.on_end(0.0, CallId(name), CallResult(ok=False, rejected=True))


def test_calls_that_engines_reject_displace_no_prefixes() -> None:
    made = core(engines=1)
    arrived(made, "good", blocks=(1, 2), block_share=0.4)
    made.on_first_token(0.0, CallId("good"))
    made.on_end(0.0, CallId("good"), answered())
    for number in range(40):
        blocks = tuple(range(100 * number + 100, 100 * number + 180))
        rejected(made, f"wrong {number}", blocks=blocks, characters=400_000, block_share=0.0125)
    index = made.dispatcher.prefixes
    assert index.cached_tokens(replace(promised(made), blocks=(1, 2), block_tokens=40.0)) == {"e0": 80}
    assert index.cached_tokens(replace(promised(made), blocks=(100,), block_tokens=40.0)) == {}
    arrived(made, "good 2", blocks=(5,), block_share=0.4)
    made.on_end(0.0, CallId("good 2"), answered())
    assert index.cached_tokens(replace(promised(made), blocks=(5,), block_tokens=40.0)), "also without a first token"


def test_a_prompt_is_no_more_work_than_the_longest_context_holds() -> None:
    made = core(engines=1)
    for name, characters, tokens in (("long", 4_000_000, 8192), ("short", 400, 100)):
        call = promised(made, 0.0, facts(name, characters=characters, most_prompt_tokens=8192))
        assert call.prompt_tokens == tokens


def test_calls_that_engines_reject_are_no_offered_load() -> None:
    made = core(engines=1, max_inflight=1, limits=Limits(max_waiting=1))
    for number in range(20):
        rejected(made, f"wrong {number}", characters=400_000)
    assert made.offered.load == call_load.NOTHING
    for name in ("out", "waits", "shed"):
        arrived(made, name)
    assert made.offered.load.calls == 3, "calls that wait or are shed for lack of room count"
    made.on_end(1.0, CallId("out"), CallResult(ok=False))
    made.on_cancel(1.0, CallId("waits"))
    assert made.offered.load.calls == 3, "calls that fail or are cancelled count"


def test_a_call_that_one_engine_rejects_is_offered_load_if_another_one_answers_it() -> None:
    made = core()
    for name in ("answered", "given up"):
        arrived(made, name)
        made.on_attempt_failed(0.0, CallId(name), Failure.REJECTED)
    made.on_first_token(1.0, CallId("answered"))
    made.on_cancel(2.0, CallId("answered"))
    (action,) = made.on_attempt_failed(1.0, CallId("given up"), Failure.REJECTED)
    assert isinstance(action, GiveUp)
    assert made.offered.load.calls == 1


def test_the_offered_load_that_is_shown_never_shrinks() -> None:
    made = core(engines=1)
    arrived(made, "wrong", characters=400_000)
    shown = made.offered.load
    assert shown.calls == 1
    made.on_end(0.0, CallId("wrong"), CallResult(ok=False, rejected=True))
    assert made.offered.load == shown
    arrived(made, "good")
    assert made.offered.load == shown, "it takes the place of the rejected call"
    arrived(made, "good 2")
    assert made.offered.load.calls == 2


def test_what_engines_cost_follows_their_answers_where_that_is_turned_on_or_they_have_no_profile() -> None:
    learns, without_profile, keeps = core(1, learn_costs=True), core(1, profile=None), core(1)
    for made in (learns, without_profile, keeps):
        for index in range(60):
            now = 2.0 * index
            arrived(made, str(index), now)
            made.on_first_token(now + 0.5, CallId(str(index)))
            made.on_end(now + 1.6, CallId(str(index)), answered(11, finished_at_s=now + 1.5))
    for made in (learns, without_profile):
        (learned,) = made.engines.costs()
        assert learned.alone_seconds(100, 11) == pytest.approx(1.5, rel=0.05)
    assert keeps.engines.costs() == [COST]


def test_engines_of_one_kind_share_one_learned_cost_model() -> None:
    made, slower = core(3, learn_costs=True), cost.scaled(COST, 1.5)
    for index in range(90):
        now, prompt = 2.0 * index, (200, 2000, 4000)[index // 3 % 3]
        arrived(made, str(index), now, characters=4 * prompt)
        first_at_s = now + slower.prefill_seconds(prompt)
        made.on_first_token(first_at_s, CallId(str(index)))
        made.on_end(first_at_s + 10 * slower.step_s, CallId(str(index)), answered(11, prompt_tokens=prompt))
    ((learned, engines),) = made.engines.kinds()
    assert engines == 3
    assert learned.alone_seconds(2000, 11) == pytest.approx(slower.alone_seconds(2000, 11), rel=0.05)


def test_service_is_counted_by_tenant_and_weight() -> None:
    made = core(tenants=(Tenant(name="heavy", weight=3.0),))
    for tenant in ("heavy", "light"):
        arrived(made, tenant, tenant=tenant)
        made.on_end(0.0, CallId(tenant), answered(200))
    assert made.tenant_service.shares(0.0) == pytest.approx({"heavy": 0.25, "light": 0.75})


def test_the_first_tenant_leaves_places_where_the_settings_name_another_one() -> None:
    named = (Tenant(name="first"), Tenant(name="second"))
    for tenants, sent in (((), 72), (named, 60)):
        made = core(1, profile=replace(COST, max_batch=64), tenants=tenants)
        assert sum(len(arrived(made, str(index), tenant="first", characters=4)) for index in range(100)) == sent
    made = core(1, profile=replace(COST, max_batch=64))
    made.set_classes((), None, named)
    assert sum(len(arrived(made, str(index), tenant="first", characters=4)) for index in range(100)) == 60


def test_alpha_and_beta_are_shown_only_where_the_dispatch_rule_reads_them() -> None:
    shown = {}
    for rule in rules.RULES:
        dispatcher = core(dispatch=DispatchSettings(rule=rule, alpha=0.3, beta=2.0)).dispatcher
        shown[rule] = (dispatcher.alpha, dispatcher.beta)
    assert shown.pop("score") == (0.3, 2.0)
    assert set(shown.values()) == {(None, None)}


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_policy_serves_every_call_of_the_gateways_queue(policy: str) -> None:
    made = core(engines=1, max_inflight=1, policy=policy)
    pending = [action for index in range(20) for action in arrived(made, str(index), 0.1 * index)]
    served = []
    while pending:
        send = pending.pop()
        served.append(send.call.id)
        pending += made.on_end(5.0, send.call.id, answered())
    assert sorted(served) == sorted(str(index) for index in range(20))


# What a review found.


def test_a_call_never_returns_to_an_engine_that_failed_it_while_another_one_serves() -> None:
    made = core(engines=3)
    tried = [engine_of(arrived(made, "a"))]
    tried += [engine_of(made.on_attempt_failed(0.1, CallId("a"), Failure.BUSY)) for _ in range(2)]
    assert sorted(tried) == ["e0", "e1", "e2"]


def test_an_anonymous_call_is_learned_once() -> None:
    made = core()
    for index in range(7):
        arrived(made, str(index))
        made.on_end(1.0, CallId(str(index)), answered(7))
    assert promised(made, given=facts("next")).output_upper == 0, "seven calls do not give a bound"


def test_a_call_that_generated_nothing_is_charged_its_prompt() -> None:
    call = promised(core())
    assert used_tokens(call, CallResult(ok=True, prompt_tokens=30, output_tokens=0), otherwise=500) == 30
    assert used_tokens(call, CallResult(ok=False), otherwise=500) == 500
