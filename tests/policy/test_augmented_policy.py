"""`augmented` follows AugServe's equations 4 to 26, with the waiting term turned the right way round."""

import random

import pytest
import small_engine
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
from tidegate_policy.policies import augmented_value

COST = CostModel(step_s=0.02, prefill_s=1e-4, max_step_tokens=1000, kv_tokens=50_000)
TOKEN_S = (0.02 + 1e-4 * 1000) / 1000
"""Seconds of a full prefill step for each of its tokens: T_fwd over N_max."""


def value_s(**fields) -> float:
    known = {"total": 0, "returned": 0, "output": 0.0, "cached": 0, "tool_s": 0.0, "others": 0, "swap_tokens": 0.0}
    return augmented_value.value_s(COST, **{**known, **fields})


def test_stage_1_is_prefill_and_decode() -> None:
    """Equations 9 and 10 for 400 prompt tokens and 100 output tokens."""
    prefill = TOKEN_S * 400**2 / 2
    decode = 0.02 * (400 * 100 + 100**2 / 2)
    assert value_s(returned=400, output=100) == pytest.approx((prefill + decode) / 50_000)


def test_a_short_tool_keeps_its_context_and_a_long_one_gives_it_up() -> None:
    """Preserving 500 tokens wastes 500 T; recomputing them beside 2,000 others wastes T_fwd(500) * 2,500 = 175."""
    plain = value_s(returned=400, output=100)
    assert value_s(returned=400, output=100, tool_s=0.3, others=2000) == pytest.approx(plain + 0.3 * 500 / 50_000)
    assert value_s(returned=400, output=100, tool_s=10.0, others=2000) == pytest.approx(plain)


def test_swapping_is_chosen_where_it_wastes_least() -> None:
    """Swapping 500 tokens at 10,000 a step takes 1 ms: the waste is 2 * 0.001 * 1,000 = 2, below 175 and below 5,000."""
    plain = value_s(returned=400, output=100)
    swapped = value_s(returned=400, output=100, tool_s=10.0, others=2000, swap_tokens=10_000.0)
    assert swapped == pytest.approx(plain + 0.02 / 10_000 * 500**2 / 2 / 50_000)


def test_stage_2_counts_recomputation_only_for_context_that_is_not_cached() -> None:
    """Equations 17 to 19: 600 known tokens, 50 returned tokens, 80 output tokens."""
    process = TOKEN_S * (600 * 50 + 50**2 / 2)
    decode = 0.02 * (650 * 80 + 80**2 / 2)
    preserved = value_s(total=600, returned=50, output=80, cached=600)
    discarded = value_s(total=600, returned=50, output=80, cached=0)
    assert preserved == pytest.approx((process + decode) / 50_000)
    assert discarded == pytest.approx((TOKEN_S * 600**2 / 2 + process + decode) / 50_000)


@given(st.integers(1, 5000), st.integers(1, 2000), st.floats(0, 1e6), st.integers(0, 100_000))
def test_a_value_is_positive_and_grows_with_the_output(prompt: int, output: int, tool_s: float, others: int) -> None:
    """Before a tool a longer output may make the engine give the context up, which takes less memory: only the part that is
    not held for the tool grows."""
    shorter, longer = (value_s(returned=prompt, output=each) for each in (output, output + 1))
    assert 0 < shorter < longer
    for plain, each in ((shorter, output), (longer, output + 1)):
        assert plain <= value_s(returned=prompt, output=each, tool_s=tool_s, others=others)


def engine(cached: dict[str, int] | None = None, **parameters: float) -> small_engine.SmallEngine:
    context = small_engine.context(
        cached_tokens=lambda call_id: (cached or {}).get(call_id, 0), random=random.Random(1)
    )
    return small_engine.SmallEngine(policies.create("augmented", parameters, context), places=1)


def order(of: small_engine.SmallEngine) -> list[str]:
    return [item.call.id for item in of.queue]


def test_the_call_that_holds_least_memory_goes_first() -> None:
    served = engine()
    served.arrive(small_engine.call("wide", prompt_tokens=4000, output_predicted=300))
    served.arrive(small_engine.call("long", prompt_tokens=100, output_predicted=300))
    served.arrive(small_engine.call("small", prompt_tokens=100, output_predicted=10))
    assert order(served) == ["small", "long", "wide"]


def test_waiting_raises_the_priority() -> None:
    served = engine(patience_s=50.0)
    served.arrive(small_engine.call("old", prompt_tokens=4000, output_predicted=300))
    served.now = 20.0
    served.arrive(small_engine.call("new", prompt_tokens=100, output_predicted=10))
    assert order(served) == ["new", "old"]
    served.now = 51.0
    served.arrive(small_engine.call("newest", prompt_tokens=1, output_predicted=1))
    assert order(served) == ["new", "old", "newest"]


def test_a_preempted_call_waits_from_its_preemption() -> None:
    served = engine(patience_s=50.0)
    served.arrive(small_engine.call("first", prompt_tokens=100, output_predicted=200))
    served.step()
    served.now = 100.0
    served.preempt(CallId("first"))
    served.arrive(small_engine.call("second", prompt_tokens=100, output_predicted=10))
    assert order(served) == ["second", "first"]


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(0, 400), st.none() | st.floats(0, 100))
def test_a_preempted_call_waits_by_its_rank_and_the_work_of_computing_its_context_again(
    prompt_tokens: int, predicted: int, steps: int, tool_s: float | None
) -> None:
    """Equation 17 for a context that is not cached: T_fwd over N_max, times half of its square."""
    served = engine()
    fields = {"prompt_tokens": prompt_tokens, "output_predicted": predicted, "tool_s": tool_s}
    item = served.arrive(small_engine.call("victim", **fields), output=1000)
    for _ in range(steps + 1):
        served.step()
    (left_s,) = served.policy.rank(item)
    served.preempt(CallId("victim"))
    context = prompt_tokens + steps + 1
    again_s = augmented_value.prefill_token_s(small_engine.COST) * context**2 / 2 / small_engine.COST.kv_tokens
    share = (served.policy.key(item)[0] - served.now) / 120.0
    assert 0.1 * share / (1 - share) == pytest.approx(left_s + again_s, rel=1e-6)


def test_waiting_time_protects_no_running_call() -> None:
    """The call that waited longer yields, because more memory over time is left of it."""
    context = small_engine.context(random=random.Random(1))
    served = small_engine.SmallEngine(policies.create("augmented", context=context), places=2)
    served.arrive(small_engine.call("old", output_predicted=300))
    served.now = 100.0
    served.arrive(small_engine.call("new", output_predicted=200))
    served.step()
    victim = max(served.running.values(), key=lambda each: served.policy.rank(each.item))
    assert victim.item.call.id == "old"


@pytest.mark.parametrize(("cached", "first"), [({"back": 2100}, "back"), ({}, "other")])
def test_a_session_that_comes_back_is_valued_by_what_the_cache_still_holds(cached: dict[str, int], first: str) -> None:
    served = engine(cached)
    served.arrive(small_engine.call("turn", session="s", prompt_tokens=2000, output_predicted=100))
    served.run(3.0)
    assert served.ended == ["turn"]
    served.arrive(small_engine.call("other", prompt_tokens=2100, output_predicted=20))
    served.arrive(small_engine.call("back", session="s", prompt_tokens=2120, output_predicted=20))
    served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served)[0] == first


def test_many_sessions_of_another_tenant_leave_what_is_known_of_a_session() -> None:
    served = engine({"back": 2100})
    served.arrive(small_engine.call("turn", session="s", prompt_tokens=2000, output_predicted=100))
    served.run(3.0)
    for number in range(4200):
        name = str(number)
        served.arrive(small_engine.call(name, tenant="b", session=name, prompt_tokens=1, output_predicted=1))
        served.step()
    served.run(1.0)
    served.arrive(small_engine.call("other", prompt_tokens=2100, output_predicted=20))
    served.arrive(small_engine.call("back", session="s", prompt_tokens=2120, output_predicted=20))
    served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served)[0] == "back"


def test_a_session_of_another_tenant_with_the_same_name_is_another_session() -> None:
    served = engine({"stranger": 2100})
    served.arrive(small_engine.call("turn", tenant="a", session="s", prompt_tokens=2000, output_predicted=100))
    served.run(3.0)
    served.arrive(small_engine.call("first", tenant="b", session="new", prompt_tokens=2120, output_predicted=20))
    served.arrive(small_engine.call("stranger", tenant="b", session="s", prompt_tokens=2120, output_predicted=20))
    keys = [served.policy.key(item) for item in served.queue]
    assert keys[0] == keys[1]


def test_a_running_call_ranks_by_what_is_left_of_it() -> None:
    context = small_engine.context(random=random.Random(1))
    served = small_engine.SmallEngine(policies.create("augmented", context=context), places=2)
    served.arrive(small_engine.call("nearly", output_predicted=300))
    served.run(5.6)
    served.arrive(small_engine.call("begun", output_predicted=200))
    served.step()
    victim = max(served.running.values(), key=lambda each: served.policy.rank(each.item))
    assert victim.item.call.id == "begun"


def test_sessions_that_never_return_are_forgotten() -> None:
    served = engine()
    for number in range(4200):
        served.arrive(small_engine.call(str(number), session=str(number), prompt_tokens=1, output_predicted=1))
        served.step()
    assert len(vars(served.policy)["_sessions"]) <= 4096
