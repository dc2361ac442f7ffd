"""Which engine gets the call."""

import random

import pytest

from tidegate_policy import cost
from tidegate_policy.dispatch import routing, rules
from tidegate_policy.model import NO_BACKLOG, Call, CallId, EngineId

FAST = cost.CostModel(step_s=0.02, prefill_s=1e-4)
SLOW = cost.scaled(FAST, 2.0)
CALL = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=100)


def view(name: str, model: cost.CostModel, calls: int = 0, cached: int = 0) -> routing.RoutableEngine:
    backlog = sum([model.charge(CALL)] * calls, NO_BACKLOG)
    return routing.RoutableEngine(EngineId(name), model, backlog, cached_tokens=cached)


def context(
    *engines: routing.RoutableEngine,
    call: Call = CALL,
    now: float = 0.0,
    turn: int = 0,
    seed: int = 0,
    **dispatch: object,
) -> routing.RoutingContext:
    settings = routing.DispatchSettings(**{"rule": "score", **dispatch})  # type: ignore[arg-type]
    return routing.RoutingContext(
        now=now,
        call=call,
        engines=engines,
        settings=settings,
        turn=turn,
        rng=random.Random(seed),
        prices=routing.Prices(call),
    )


def pick(*engines: routing.RoutableEngine, **more: object) -> str:
    asked = context(*engines, **more)  # type: ignore[arg-type]
    return rules.create(asked.settings).choose(asked).engine.id


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
def test_among_idle_engines_the_faster_one_is_chosen_at_any_alpha(alpha: float) -> None:
    assert pick(view("slow", SLOW), view("fast", FAST), alpha=alpha) == "fast"


def test_an_idle_slow_engine_comes_before_a_busy_fast_one_while_alpha_is_below_one() -> None:
    engines = view("busy", FAST, calls=3), view("idle", SLOW)
    assert pick(*engines, alpha=0.9) == "idle"
    assert pick(*engines, alpha=1.0) == "busy"


def test_a_longer_backlog_loses_at_equal_speed() -> None:
    assert pick(view("long", FAST, calls=9), view("short", FAST, calls=2), alpha=0.2) == "short"


def test_a_cached_prefix_counts_as_avoided_time() -> None:
    assert pick(view("cold", FAST), view("warm", FAST, cached=900)) == "warm"


def test_an_engine_that_can_meet_the_deadline_is_never_passed_over_for_one_that_cannot() -> None:
    call = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=100, due_at_s=3.0)
    engines = view("idle but slow", SLOW), view("busy but fast", FAST, calls=2)
    assert pick(*engines, alpha=0.0, call=CALL) == "idle but slow"
    assert pick(*engines, alpha=0.0, call=call) == "busy but fast"


def test_a_price_is_computed_once_for_each_cost_model_and_is_that_of_the_cost_model() -> None:
    call = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=100, due_at_s=10.0)
    engines = [view("a", FAST), view("b", FAST, calls=3), view("c", SLOW)]
    asked = context(*engines, call=call, now=1.0)
    prices = [asked.price(engine) for engine in engines]
    assert prices[0] is prices[1]
    assert prices[2].service_s == SLOW.call_seconds(call)
    assert prices[2].charge == SLOW.charge(call)
    assert engines[0].queue_s == 0.0
    assert asked.slack_s(engines[0]) == pytest.approx(9.0 - FAST.call_seconds(call))


@pytest.mark.parametrize("cached", [1, 512, 999, 5000])
def test_the_price_of_a_cached_call_is_that_of_the_cost_model(cached: int) -> None:
    price = routing.Prices(CALL).of(SLOW, cached)
    service_s, charge = SLOW.service_and_charge(CALL, cached)
    assert price.service_s == pytest.approx(service_s)
    assert abs(price.charge.work_us - charge.work_us) <= 1
    assert (price.charge.calls, price.charge.output_tokens) == (charge.calls, charge.output_tokens)


def test_weighted_least_requests_gives_calls_in_proportion_to_speed() -> None:
    assert pick(view("slow", SLOW), view("fast", FAST), rule="weighted-least-requests") == "fast"
    busy = view("slow", SLOW, calls=1), view("fast", FAST, calls=2)
    assert pick(*busy, rule="weighted-least-requests") == "fast"
    busier = view("slow", SLOW, calls=1), view("fast", FAST, calls=4)
    assert pick(*busier, rule="weighted-least-requests") == "slow"


def prompted(*blocks: int, prompt: int = 1000, session: str | None = None) -> Call:
    return Call(
        id=CallId("c"),
        arrived_at_s=0.0,
        prompt_tokens=prompt,
        output_predicted=100,
        session=session,
        blocks=blocks,
        block_tokens=256.0,
    )


def test_bounded_affinity_keeps_a_prefix_on_one_engine_until_its_load_exceeds_its_share() -> None:
    names = [f"e{number}" for number in range(4)]
    homes = {
        pick(*(view(name, FAST) for name in names), rule="bounded-affinity", call=prompted(7, 8, 9, 1, end))
        for end in range(9)
    }
    (home,) = homes
    loaded = [view(name, FAST, calls=4 if name == home else 1) for name in names]
    assert pick(*loaded, rule="bounded-affinity", call=prompted(7, 8, 9, 1)) != home
    spread = {pick(*(view(name, FAST) for name in names), rule="bounded-affinity", call=prompted(n)) for n in range(40)}
    assert len(spread) == 4
    sessions = {
        pick(*(view(name, FAST) for name in names), rule="bounded-affinity", call=prompted(session="s")) for _ in "abc"
    }
    assert len(sessions) == 1


def test_cache_aware_follows_the_longest_prefix_unless_loads_differ_much() -> None:
    warm, cold = view("warm", FAST, calls=60, cached=900), view("cold", FAST)
    assert pick(warm, cold, rule="cache-aware") == "warm"
    assert pick(view("warm", FAST, calls=70, cached=900), cold, rule="cache-aware") == "cold"
    assert pick(view("a", FAST, calls=9, cached=100), view("b", FAST, calls=2, cached=0), rule="cache-aware") == "a"


def test_cache_aware_spreads_new_prompts_by_the_tokens_that_engines_have_computed() -> None:
    asked = context(view("a", FAST), view("b", FAST), rule="cache-aware")
    rule = rules.create(asked.settings)
    assert [rule.choose(asked).engine.id for _ in range(4)] == ["a", "b", "a", "b"]


def test_prefix_score_weighs_the_matched_share_against_the_load() -> None:
    assert pick(view("warm", FAST, calls=2, cached=900), view("cold", FAST, calls=1), rule="prefix-score") == "warm"
    assert pick(view("warm", FAST, calls=2, cached=300), view("cold", FAST, calls=1), rule="prefix-score") == "cold"


def test_least_delay_counts_what_a_call_does_to_those_who_run() -> None:
    crowded_but_fast, quiet_but_slow = view("crowded", FAST, calls=30), view("quiet", SLOW, calls=1)
    assert pick(crowded_but_fast, quiet_but_slow, rule="least-delay") == "quiet"
    assert pick(view("fast", FAST, calls=1), view("slow", SLOW, calls=1), rule="least-delay") == "fast"


def test_round_robin_takes_turns() -> None:
    engines = view("a", FAST), view("b", SLOW), view("c", SLOW)
    assert [pick(*engines, rule="round-robin", turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_least_requests_counts_calls_and_rotates_ties() -> None:
    engines = view("a", FAST, calls=2), view("b", SLOW, calls=1), view("c", SLOW, calls=1)
    assert [pick(*engines, rule="least-requests", turn=turn) for turn in range(3)] == ["b", "b", "c"]


def test_power_of_two_takes_the_less_loaded_of_its_pair() -> None:
    engines = view("a", FAST, calls=5), view("b", FAST, calls=1)
    assert {pick(*engines, rule="power-of-two", seed=seed) for seed in range(20)} == {"b"}


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(
        rules.UnknownRule,
        match="known are bounded-affinity, cache-aware, earliest-finish, least-delay, least-requests, power-of-two",
    ):
        pick(view("a", FAST), rule="best")


def test_earliest_finish_ignores_the_delay_that_a_call_causes_to_others() -> None:
    engines = view("fast but busy", FAST, calls=15), view("idle but slow", SLOW)
    assert pick(*engines, rule="earliest-finish") == "fast but busy"
    assert pick(*engines, rule="least-delay") == "idle but slow"


def test_without_the_deadline_filter_the_scores_alone_decide() -> None:
    call = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=100, due_at_s=3.0)
    engines = view("idle but slow", SLOW), view("busy but fast", FAST, calls=2)
    assert pick(*engines, alpha=0.0, call=call, deadline_filter=False) == "idle but slow"
