"""The regulators: each decision in the situation that it is made for, and where it leaves the plan alone."""

import random
from dataclasses import replace

import pytest
from regulated_engine import COST, FULL, LIMITS, World, shaped

from tidegate_policy import policies
from tidegate_policy.engine import bounds, regulators, snapshot, yielding_prompts
from tidegate_policy.engine.call_census import group_of
from tidegate_policy.engine.regulators import arranger, stage_awareness
from tidegate_policy.engine.step import EndedCall, StepFacts, StepPlan
from tidegate_policy.model import LEAST_URGENT, Call, CallId
from tidegate_policy.policies import Computed
from tidegate_policy.predict.conformal_bound import ConformalBound


@pytest.mark.parametrize("name", sorted(regulators.REGULATORS))
def test_an_idle_engine_keeps_its_plan(name: str) -> None:
    assert shaped(name, World().engine()) == FULL


# arranger


def test_the_arranger_admits_a_waiting_call_that_goes_before_the_running_calls() -> None:
    world = World()
    world.runs("long", output=900, done=1)
    world.waits("short", output=5)
    assert shaped("arranger", world.engine()).max_starts == 1


def test_the_arranger_completes_the_group_that_runs_and_stops_at_its_boundary() -> None:
    world = World()
    world.runs("a0", output=50, done=1, group="a")
    world.waits("a1", output=55, group="a")
    world.waits("a2", output=56, group="a")
    world.waits("b0", output=400, group="b")
    assert shaped("arranger", world.engine()).max_starts == 2


@pytest.mark.parametrize(("prompt", "starts"), [(20, 1), (900, 0)])
def test_in_a_transition_the_arranger_weighs_the_prefill_against_the_shared_decodes(prompt: int, starts: int) -> None:
    """A long prefill that shares few decode steps waits; a short one joins."""
    world = World()
    world.runs("ending", output=5, done=1)
    world.waits("next", prompt=prompt, output=400)
    assert shaped("arranger", world.engine()).max_starts == starts


def test_the_arranger_compares_with_the_first_call_that_can_start() -> None:
    world = World()
    world.runs("ending", output=5, done=1)
    world.waits_blocked("grammar", output=1)
    world.waits("next", prompt=2000, output=400)
    assert shaped("arranger", world.engine()).max_starts == 0


@pytest.mark.parametrize(("prompt", "starts"), [(1593, 1), (1595, 0)])
def test_the_added_latency_is_that_of_the_paper(prompt: int, starts: int) -> None:
    """Equations 15 to 17 by hand, with the prefill term of a mixed step. Twice the prefill and the delay of the tokens that
    the groups decode beside the call cost as much as the 8 steps that it shares save, at 1,594 tokens."""
    assert 1e-4 * 1594 * 2 + 1e-4 * 1 * (min(4, 8) + min(20, 8)) == pytest.approx(2 * 0.02 * min(8, 20))
    world = World()
    world.runs("r0", output=6, done=2, group="r")
    world.runs("q0", output=21, done=1, group="q")
    world.waits("p0", prompt=prompt, output=8, group="p")
    world.waits("x0", prompt=300, output=900, group="x")
    assert shaped("arranger", world.engine()).max_starts == starts


def test_the_arranger_counts_the_output_that_a_preempted_call_has_left() -> None:
    """The preempted call has 10 of its 100 output tokens left. It would share too few steps with the 12 tokens of the
    call that runs for the 2,190 tokens that it must compute again."""
    world = World()
    world.runs("r0", output=13, done=1, group="r")
    world.runs("p0", prompt=2100, output=100, done=90, group="p")
    queue = world.core.queues[0]
    queue.push_preempted(world.core.on_preemption(1.0, CallId("p0"), output_tokens=90))
    engine = world.engine()
    assert 1e-4 * 2190 + 1e-4 * 10 > 0.02 * 10
    assert shaped("arranger", engine).max_starts == 0


@pytest.mark.parametrize(("delivered", "starts"), [(700, 2), (900, 1)])
def test_the_calls_that_start_together_fit_with_the_output_that_they_compute_again(delivered: int, starts: int) -> None:
    world = World()
    world.runs("r0", output=500, done=1, group="g")
    world.runs("p0", output=950, done=delivered, group="g")
    queue = world.core.queues[0]
    queue.push_preempted(world.core.on_preemption(1.0, CallId("p0"), output_tokens=delivered))
    world.waits("p1", output=950, group="g")
    assert shaped("arranger", world.engine()).max_starts == starts


# stage awareness


def test_a_lower_levels_prefill_stays_within_the_target_of_a_higher_levels_decodes() -> None:
    world = World("priority")
    world.runs("high", done=3, urgency=0, tpot_s=0.05)
    world.waits("low", prompt=5000, urgency=4)
    plan = shaped("stage-awareness", world.engine())
    assert COST.step_seconds(uncached=plan.max_step_tokens - 1, decodes=1, context=0) <= 0.05
    assert plan.max_step_tokens > 200
    assert plan.max_starts is None


def test_a_prefill_for_which_the_target_leaves_no_room_waits() -> None:
    world = World("priority")
    world.runs("high", done=3, urgency=0, tpot_s=0.0205)
    world.runs("prefilling", urgency=3)
    world.waits("same", urgency=0)
    world.waits("low", urgency=4)
    plan = shaped("stage-awareness", world.engine())
    assert (plan.paused, plan.max_starts) == ({"prefilling"}, 1)


def test_a_prefill_of_the_level_that_decodes_gets_the_whole_step() -> None:
    world = World("priority")
    world.runs("high", done=3, urgency=1, tpot_s=0.03)
    world.runs("prefilling", prompt=4000, urgency=1)
    world.waits("higher", prompt=4000, urgency=0)
    assert shaped("stage-awareness", world.engine()) == FULL


def test_each_level_is_protected_from_the_levels_below_it() -> None:
    """The target of level 2 is tight, and that of level 0 is loose: level 4 must respect both."""
    world = World("priority")
    world.runs("loose", done=3, urgency=0, tpot_s=1.0)
    world.runs("tight", done=3, urgency=2, tpot_s=0.03)
    world.waits("low", prompt=4000, urgency=4)
    plan = shaped("stage-awareness", world.engine())
    assert COST.step_seconds(uncached=plan.max_step_tokens - 2, decodes=2, context=0) <= 0.03
    world.runs("between", prompt=1800, urgency=1)
    plan = shaped("stage-awareness", world.engine())
    assert (plan.max_step_tokens, plan.max_starts) == (FULL.max_step_tokens, 0), "level 1 takes the target's room"


def test_a_bounded_prefill_takes_no_tokens_from_a_prefill_of_a_higher_level_behind_it() -> None:
    """The running prompt of level 2 would take the whole bound, and the waiting prompt of level 1 would get nothing."""
    world = World("priority")
    world.runs("high", done=3, urgency=1, tpot_s=0.08)
    world.runs("low", prompt=3000, urgency=2)
    world.waits("same", prompt=500, urgency=1)
    plan = shaped("stage-awareness", world.engine(), replace(FULL, max_step_tokens=2048))
    assert (plan.paused, plan.max_step_tokens, plan.max_starts) == ({"low"}, 2048, None)


def test_a_short_prefill_that_the_targets_allow_changes_nothing() -> None:
    world = World("priority")
    world.runs("high", done=3, urgency=0, tpot_s=0.05)
    world.waits("low", prompt=20, urgency=4)
    assert shaped("stage-awareness", world.engine()) == FULL


def test_without_targets_only_the_strict_variant_holds_back_prefills() -> None:
    world = World("priority")
    world.runs("high", done=3, urgency=1)
    world.waits("low", urgency=4)
    assert shaped("stage-awareness", world.engine()) == FULL
    assert shaped("strict-stage-awareness", world.engine()).max_starts == 0
    world.waits("equal", urgency=1)
    assert shaped("strict-stage-awareness", world.engine()).max_starts == 1


# prefill order


def test_a_partly_computed_prompt_gives_way_to_a_waiting_one_that_goes_first() -> None:
    world = World("sjf")
    world.runs("long", prompt=4000, output=500)
    world.waits("short", prompt=100, output=5)
    assert shaped("prefill-order", world.engine()).paused == {"long"}
    world.waits("longer", prompt=4000, output=900)
    assert shaped("prefill-order", world.engine()).paused == {"long"}


def test_of_two_partly_computed_prompts_the_first_by_the_policy_is_computed() -> None:
    world = World("sjf")
    world.runs("long", prompt=4000, output=500)
    world.runs("short", prompt=200, output=5)
    assert shaped("prefill-order", world.engine()).paused == {"long"}


def test_a_call_that_is_owed_a_place_goes_before_a_prompt_that_goes_first_by_the_policy() -> None:
    world = World("sjf")
    world.runs("short", prompt=4000, output=5)
    world.waits("long", prompt=1000, output=900)
    assert shaped("prefill-order", world.engine()).paused == set()
    world.waits("owed", prompt=1000, output=900, owed=True)
    assert shaped("prefill-order", world.engine()).paused == {"short"}


@pytest.mark.parametrize("reason", ["the prompt goes first", "no place", "no memory", "no start"])
def test_a_partly_computed_prompt_goes_on_where_no_better_one_can_start(reason: str) -> None:
    world = World("sjf")
    world.runs("running", prompt=4000, output=5 if reason == "the prompt goes first" else 500)
    world.waits("waiting", prompt=4100 if reason == "the prompt goes first" else 100, output=5)
    if reason == "no memory":
        world.free = 40
    plan = replace(FULL, max_running=1) if reason == "no place" else FULL
    plan = replace(plan, max_starts=0) if reason == "no start" else plan
    assert shaped("prefill-order", world.engine(), plan) == plan


def test_a_prompt_gives_way_to_no_more_tokens_than_it_must_still_compute() -> None:
    """2,000 tokens are left of it, and the step has room for 1,000 of the other prompt: it pauses for two steps."""
    world = World("sjf")
    world.runs("long", prompt=4000, output=5000)
    world.waits("endless", prompt=3000, output=5)
    (regulator,) = regulators.create(["prefill-order"])
    pauses = [bool(regulator.shape(world.engine(), FULL).paused) for _ in range(6)]
    assert pauses == [True, True, False, False, False, False]


def test_a_pause_by_another_regulator_forgets_no_tokens_that_a_prompt_has_given() -> None:
    world = World("sjf")
    world.runs("long", prompt=4000, output=5000)
    world.waits("endless", prompt=3000, output=5)
    (regulator,) = regulators.create(["prefill-order"])
    paused_already = replace(FULL, paused=frozenset({CallId("long")}))
    plans = (FULL, paused_already, FULL, paused_already, FULL)
    pauses = [regulator.shape(world.engine(), plan) is not plan for plan in plans]
    assert pauses == [True, False, True, False, False], "2,000 tokens are left of it"


# slack chunks


def test_the_chunk_grows_with_the_slack_of_the_decodes() -> None:
    world = World()
    world.runs("decoding", done=5, tpot_s=0.05)
    behind = shaped("slack-chunks", world.engine(now=1.0)).max_step_tokens
    ahead = shaped("slack-chunks", world.engine(now=0.18)).max_step_tokens
    assert COST.step_seconds(uncached=behind - 1, decodes=1, context=0) <= 0.05 + 1e-9
    assert ahead > behind


# All together


def test_no_combination_of_regulators_stalls_an_engine() -> None:
    """Random engines, all regulators together: the plan always lets a call compute or start."""
    rng = random.Random(11)
    for _ in range(200):
        world = World(rng.choice(["sjf", "priority", "urgency", "fcfs"]))
        running = rng.randrange(8)
        for number in range(running):
            world.runs(
                f"r{number}",
                prompt=rng.randrange(2, 2000),
                output=rng.randrange(1, 500),
                done=rng.choice([0, 0, 1, 30]),
                urgency=rng.randrange(5),
                tpot_s=rng.choice([None, 1e-9, 0.03, 0.5]),
                group=rng.choice([None, "g", "h"]),
            )
        for number in range(rng.randrange(6)):
            world.waits(f"w{number}", prompt=rng.randrange(2, 2000), urgency=rng.randrange(5))
        world.free = rng.choice([0, 50, max(world.free, 0)])
        engine = world.engine()
        plan = FULL
        for regulator in regulators.create(sorted(regulators.REGULATORS)):
            plan = regulator.shape(engine, plan)
        plan = bounds.safe(plan, LIMITS, running=running)
        active = running - len(plan.preempt) - len(plan.paused - set(plan.preempt))
        assert active > 0 or plan.max_starts is None or plan.max_starts >= 1


# Speculative drafts


def _step_of_five_decodes(tokens_per_sequence: int) -> World:
    world = World("sjf", limits=replace(LIMITS, tokens_per_sequence=tokens_per_sequence))
    for number in range(5):
        world.runs(f"decodes{number}", done=5, urgency=0, tpot_s=0.03)
    return world


@pytest.mark.parametrize("tokens_per_sequence", [1, 4])
@pytest.mark.parametrize("name", ["slack-chunks", "stage-awareness", "yielding prompts"])
def test_the_bound_of_a_step_leaves_room_for_the_drafts_of_its_decodes(name: str, tokens_per_sequence: int) -> None:
    world = _step_of_five_decodes(tokens_per_sequence)
    world.runs("low", prompt=1900, urgency=3, yields=name == "yielding prompts")
    engine = world.engine()
    if name == "yielding prompts":
        plan = yielding_prompts.YieldingPrompts().shape(engine, FULL)
        prompts = round(yielding_prompts.CHUNK_STEPS * COST.step_s / COST.prefill_s)
    else:
        plan, prompts = shaped(name, engine), stage_awareness.prefill_tokens(engine, 0.03)
    assert plan.max_step_tokens == prompts + 5 * tokens_per_sequence


@pytest.mark.parametrize(("prompt", "paused"), [(160, False), (120, True)])
def test_a_prompt_for_which_the_drafts_leave_no_tokens_is_no_prefill_of_the_step(prompt: int, paused: bool) -> None:
    """Of 100 tokens the decodes need 20. The running prompt of their level needs the other 80, or 60 of them."""
    world = _step_of_five_decodes(4)
    world.runs("same", prompt=prompt, urgency=0)
    world.runs("low", prompt=1900, urgency=3)
    tight = replace(COST, step_s=0.03 - 5 * COST.decode_s - (prompt // 2 + 10) * COST.prefill_s)
    world.core.step_cost.model = tight
    plan = shaped("stage-awareness", world.engine(), replace(FULL, max_step_tokens=100))
    assert plan.paused == ({"low"} if paused else frozenset())


@pytest.mark.parametrize(("tokens_per_sequence", "pauses"), [(1, 2), (4, 5)])
def test_a_prompt_gives_way_to_the_tokens_that_the_drafts_leave(tokens_per_sequence: int, pauses: int) -> None:
    """100 tokens are left of it, and a step of 40 computes 35 or 20 of the other prompt."""
    world = _step_of_five_decodes(tokens_per_sequence)
    world.runs("long", prompt=200, output=5000)
    world.waits("first", prompt=3000, output=5)
    (regulator,) = regulators.create(["prefill-order"])
    narrow = replace(FULL, max_step_tokens=40)
    assert sum(bool(regulator.shape(world.engine(), narrow).paused) for _ in range(8)) == pauses


# What a step does not look at one by one


class Counting(policies.StaticPolicy):
    """The work that is left is the key. It counts the ranks that it is asked for."""

    name = "counting"
    ranks = 0

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return (item.service_s,)

    def rank(self, item: policies.QueuedRequest) -> policies.Key:
        self.ranks += 1
        return self.key(item)


@pytest.mark.parametrize(("output", "before", "ranks"), [(1, True, 21), (10, False, 21), (500, False, 2)])
def test_a_waiting_call_is_compared_once_with_each_call_that_decodes(
    output: int, before: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policies.POLICIES, "counting", Counting)
    world = World("counting")
    for number in range(20):
        world.runs(f"decodes{number}", output=200 if number else 4, done=2)
    world.runs("prefilling", output=1)
    world.waits("waiting", output=output)
    engine = world.engine()
    counting = world.core.policy.unguarded
    counting.ranks = 0
    assert engine.goes_before_decodes(world.core.item(CallId("waiting"))) == before
    assert counting.ranks == ranks


def test_without_calls_that_decode_none_goes_before_them() -> None:
    world = World()
    world.runs("prefilling")
    world.waits("waiting")
    with pytest.raises(ValueError, match="decode"):
        world.engine().goes_before_decodes(world.core.item(CallId("waiting")))


WIDE = replace(FULL, max_running=16)


def _slow_victims(engine: snapshot.EngineSnapshot) -> list[CallId]:
    """The order of yielding by the ranks of all running calls."""
    ranked = sorted(engine.running, key=lambda call: (not call.protected, engine.rank(engine.left(call))), reverse=True)
    return [call.call.id for call in ranked]


def _slow_fence(engine: snapshot.EngineSnapshot, plan: StepPlan, bound: ConformalBound) -> int:
    """The calls that the fence starts, by the promises to all running calls."""

    def upper(call: Call) -> int:
        return max(bound.upper(call.prompt_tokens, call.output_predicted), call.output_upper)

    promised = engine.limits.kv_tokens - engine.free_kv_tokens
    for known in engine.running:
        promised += known.uncached_tokens + max(upper(known.call) - known.output_tokens, known.output_left)
    starts = 0
    for item in engine.first(32):
        promised += engine.uncached_tokens(item) + upper(item.call)
        if promised > 0.97 * engine.limits.kv_tokens:
            break
        starts += 1
    return starts


def _slow_arranger(engine) -> int | None:
    """The starts that the arranger allows, by the work that is left of every call that decodes."""
    places = engine.places(WIDE)
    candidate = arranger._candidate(engine, engine.first(min(max(places, 0), arranger.MOST_CANDIDATES)))
    if not candidate or not engine.decode_count:
        return None
    best, rank = engine.first_decode()
    group = group_of(candidate[0].call)
    output = arranger._output(engine, candidate)
    groups, tokens = arranger._groups(engine, engine.decodes, output), arranger._uncached(engine, candidate)
    if arranger._latency_s(engine, groups, candidate, output, tokens) < 0 or group_of(best.call) == group:
        return len(candidate)
    return len(candidate) if engine.rank(candidate[0]) < rank else 0


@pytest.mark.parametrize("policy", ["urgency", "llf", "sjf", "semantic"])
@pytest.mark.parametrize("kv_tokens", [6_000, 40_000])
def test_the_decisions_are_those_of_a_look_at_every_running_call(policy: str, kv_tokens: int) -> None:
    """Random histories: calls arrive, run, deliver tokens or stall, are preempted and end, and costs drift."""
    rng = random.Random(kv_tokens)
    world = World(policy, limits=replace(LIMITS, kv_tokens=kv_tokens), cost=replace(COST, context_s=1e-7))
    fence, bound, starts, arranged = regulators.create(["fence"])[0], ConformalBound(), [], []
    for step in range(400):
        now = 0.02 * step
        if rng.random() < 0.3:
            due_at_s = rng.choice([None, now + rng.uniform(-5, 60)])
            world.waits(
                f"c{step}", rng.randrange(1, 400), rng.randrange(1, 60),
                output_upper=rng.choice([0, 90]), due_at_s=due_at_s, urgency=rng.randrange(3),
                group=rng.choice([None, f"group{step // 16}"]),
            )  # fmt: skip
        queue = world.core.queues[0]
        if len(queue) and len(world.kv) < 12:
            world.kv[queue.pop(now).call.id] = 0
        world.free = max(kv_tokens - sum(world.kv.values()), 0)
        engine = world.engine(now)
        victims = [victim.call for victim in engine.victims()]
        assert [call.call.id for call in victims] == _slow_victims(engine)
        assert engine.all_victims() == victims
        assert [call.call.id for call in engine.prefills] == [c.call.id for c in engine.running if not c.decodes]
        assert engine.highest_level == min((call.call.urgency for call in engine.decodes), default=LEAST_URGENT)
        arranged.append(shaped("arranger", engine, WIDE).max_starts)
        assert arranged[-1] == _slow_arranger(engine)
        found = fence.shape(engine, FULL).max_starts
        places = max(FULL.max_running - len(world.kv), 0) + 8
        slow = _slow_fence(engine, FULL, bound)
        if engine.head is not None:
            assert found == min(slow, places)
            starts.append(found)
        computed, ended = {}, {}
        for call_id in list(world.kv):
            known = world.core._calls[call_id]
            uncached = known.call.prompt_tokens + known.output_tokens - world.kv[call_id]
            if rng.random() < 0.05:
                continue
            tokens = min(uncached, 100)
            world.kv[call_id] += tokens
            prompt = max(min(tokens, known.call.prompt_tokens - world.kv[call_id] + tokens), 0)
            computed[call_id] = Computed(prompt, int(tokens == uncached))
            if rng.random() < 0.02:
                ended[call_id] = True
        facts = [
            EndedCall(call=world.core._calls[c].call, output_tokens=world.core._calls[c].output_tokens, finished=True)
            for c in ended
        ]
        world.core.on_step(now, step_s=0.02, computed=computed, ended=ended)
        fence.observe(StepFacts(now=now, step_s=0.02, computed=computed, preempted=(), ended=tuple(facts)))
        for one in facts:
            bound.observe(one.call.prompt_tokens, one.call.output_predicted, one.output_tokens)
            del world.kv[one.call.id]
        if world.kv and rng.random() < 0.1:
            victim = rng.choice(list(world.kv))
            del world.kv[victim]
            output_tokens = world.core._calls[victim].output_tokens
            queue.push_preempted(world.core.on_preemption(now, victim, output_tokens=output_tokens))
        if rng.random() < 0.02:
            drifted = replace(world.core.cost, step_s=world.core.cost.step_s * rng.uniform(0.9, 1.1))
            world.core.step_cost.model = drifted
    assert len(set(starts)) > 2
    assert {0, 1} <= set(arranged)
