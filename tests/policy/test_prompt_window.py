"""How many prompts a tenant may have at engines that are not computed yet."""

from tidegate_policy.admit.prompt_window import AHEAD_S, UNSEEN_TIMES, YIELDING_TIMES, PromptSeconds, PromptWindow
from tidegate_policy.model import CallId


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
