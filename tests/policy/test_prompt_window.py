"""How many prompts a tenant may have at engines that are not computed yet."""

from tidegate_policy.admit.prompt_window import (
    AHEAD_S,
    LONG_S,
    UNSEEN_TIMES,
    YIELDING_TIMES,
    PoolPrompts,
    PromptCosts,
    PromptSeconds,
    PromptWindow,
)
from tidegate_policy.model import Call, CallId


def filled(*seconds: float, now: float = 0.0) -> PromptWindow:
    window = PromptWindow()
    for number, each in enumerate(seconds):
        window.add(now, CallId(str(number)), PromptSeconds(each, each))
    return window


def test_each_engine_has_one_prompt_however_long() -> None:
    assert not filled(60.0).is_full(0.0, 2, floods=False)
    assert filled(60.0, 60.0).is_full(0.0, 2, floods=False)


def test_short_prompts_fill_the_window_by_their_work() -> None:
    short = AHEAD_S / 10
    assert not filled(*[short] * 19).is_full(0.0, 2, floods=False)
    assert filled(*[short] * 21).is_full(0.0, 2, floods=False)


def test_prompts_of_a_tenant_that_floods_the_pool_are_one_for_each_engine() -> None:
    assert filled(0.01, 0.01).is_full(0.0, 2, floods=True)
    assert not filled(0.01).is_full(0.0, 2, floods=True)


def test_a_part_of_the_engines_is_that_of_one_of_several_gateways() -> None:
    assert filled(60.0).is_full(0.0, 0.5, floods=False)
    assert not filled().is_full(0.0, 0.5, floods=False)


def test_a_prompt_without_a_first_token_counts_for_a_while() -> None:
    for floods, times in ((False, UNSEEN_TIMES), (True, YIELDING_TIMES)):
        window = filled(2.0, now=10.0)
        assert window.is_full(10.0 + 1.9 * times, 1, floods=floods)
        assert not window.is_full(10.0 + 2.0 * times, 1, floods=floods)


def test_short_prompts_wait_for_each_other_so_each_counts_as_long_as_all() -> None:
    window = filled(*[0.01] * 30)
    assert window.is_full(UNSEEN_TIMES * AHEAD_S - 0.01, 1, floods=False)
    assert not window.is_full(UNSEEN_TIMES * AHEAD_S, 1, floods=False)


def test_an_empty_window_has_no_work_left() -> None:
    window = filled(0.1, 0.2, 0.3)
    window.add(1.0, CallId("0"), PromptSeconds(0.7, 0.7))
    assert all(window.remove(CallId(name)) for name in "012")
    assert not window.remove(CallId("0"))
    assert (len(window), window.work_s) == (0, 0.0)


def call(name: str, seconds: float, *, yields: bool = False) -> Call:
    """A call whose prompt takes so many seconds."""
    return Call(
        id=CallId(name), arrived_at_s=0.0, prompt_tokens=round(1000 * seconds), output_predicted=1, yields=yields
    )


def pool(engines: int) -> PoolPrompts:
    def seconds(each: Call) -> PromptSeconds:
        return PromptSeconds(each.prompt_tokens / 1000, each.prompt_tokens / 1000)

    return PoolPrompts(PromptCosts(seconds=seconds, engines=lambda now: engines))


def test_all_tenants_together_have_few_long_prompts() -> None:
    prompts = pool(engines=2)
    for name in ("a", "b"):
        assert prompts.has_turn(0.0, call(name, 0.6))
        prompts.add(0.0, PromptWindow(), call(name, 0.6))
    assert not prompts.has_turn(0.0, call("c", 0.6))
    assert prompts.has_turn(0.0, call("short", LONG_S))
    assert prompts.remove(PromptWindow(), CallId("a")) == (False, True)
    assert prompts.has_turn(0.0, call("c", 0.6))


def test_prompts_that_yield_take_no_turn() -> None:
    prompts = pool(engines=1)
    window = PromptWindow()
    prompts.add(0.0, window, call("a", 0.6, yields=True))
    assert prompts.has_turn(0.0, call("b", 0.6))
    assert prompts.is_full(0.0, window, floods=False), "of its own tenant it is one"


def test_tenants_take_turns_by_the_seconds_of_their_long_prompts_and_their_weights() -> None:
    prompts = pool(engines=100)
    windows = {"light": PromptWindow(), "heavy": PromptWindow()}
    seconds, weights = {"light": 0.2, "heavy": 0.6}, {"light": 1.0, "heavy": 2.0}
    had = dict.fromkeys(windows, 0.0)
    for number in range(300):
        name = min(windows, key=lambda each: prompts.turn_s(windows[each]))
        each = call(f"{name} {number}", seconds[name])
        for _ in range(2):  # a call that is released is added again when it enters
            prompts.add(0.0, windows[name], each)
        prompts.take_turn(windows[name], weights[name], each.id)
        had[name] += seconds[name]
    assert abs(had["heavy"] / had["light"] - 2.0) < 0.05


def test_a_tenant_that_sent_no_long_prompts_saves_no_turns() -> None:
    prompts = pool(engines=100)
    busy, idle = PromptWindow(), PromptWindow()
    for number in range(50):
        prompts.add(0.0, busy, call(f"b {number}", 0.5))
        prompts.take_turn(busy, 1.0, CallId(f"b {number}"))
    assert prompts.turn_s(idle) == prompts.turn_s(busy) - 0.5
