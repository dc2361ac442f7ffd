"""`relquery` follows RelServe's Algorithm 1 and equations 9 to 13, at a bounded cost, whatever clients declare."""

import random
from collections.abc import Sequence

import pytest
import small_engine
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
from tidegate_policy.policies import batch_decomposition, relquery_policy

COST = CostModel(
    step_s=0.03, prefill_s=2e-4, decode_s=5e-4, max_batch=4, max_step_tokens=1000, kv_tokens=2500, context_s=0.0
)


def algorithm_1(tokens: Sequence[float], output: int) -> tuple[list[list[float]], list[int]]:
    """RelServe's Algorithm 1 line by line, with the accumulator reset after each flush: prefill batches and the sizes of
    the decode batches."""
    prefills: list[list[float]] = []
    decodes: list[int] = []
    batch: list[float] = []
    decoding, accumulated = 0, 0.0
    for each in tokens:
        if each + accumulated > COST.kv_tokens or decoding + 1 > COST.max_batch:
            prefills.append(batch)
            decodes += [decoding] * output
            batch, decoding, accumulated = [], 0, 0.0
        if each + sum(batch) > COST.max_step_tokens:
            prefills.append(batch)
            batch = []
        batch.append(each)
        decoding += 1
        accumulated += each
    if batch:
        prefills.append(batch)
        decodes += [decoding] * output
    return prefills, decodes


@given(st.lists(st.integers(1, 900), min_size=1, max_size=40), st.integers(1, 60))
def test_the_estimate_of_a_group_is_the_sum_over_the_batches_of_algorithm_1(tokens: list[int], output: int) -> None:
    prefills, decodes = algorithm_1(tokens, output)
    expected_s = sum(COST.prefill_s * sum(batch) + COST.step_s for batch in prefills if batch)
    expected_s += sum(COST.decode_s * size + COST.step_s for size in decodes)
    assert batch_decomposition.seconds(COST, uncached=tokens, output=output) == pytest.approx(expected_s)


def test_two_batches_worked_out_by_hand() -> None:
    """600 + 300 tokens fill the first prefill batch, 500 the second; all three decode together for ten steps."""
    expected_s = (900 * 2e-4 + 0.03) + (500 * 2e-4 + 0.03) + 10 * (3 * 5e-4 + 0.03)
    assert batch_decomposition.seconds(COST, uncached=[600, 300, 500], output=10) == pytest.approx(expected_s)


def test_calls_that_decode_need_no_prefill_and_only_their_remaining_tokens() -> None:
    expected_s = 0.03 * 7 + 5e-4 * (7 + 3)
    assert batch_decomposition.seconds(COST, uncached=[], decoding=[7, 3], output=50) == pytest.approx(expected_s)


def test_the_cache_is_empty_again_after_a_flush() -> None:
    """Five calls of 1,000 tokens in a cache of 2,500: three flushes, not one for each call after the second."""
    seconds = batch_decomposition.seconds(COST, uncached=[1000.0] * 5, output=10)
    assert seconds == pytest.approx(5 * (0.2 + 0.03) + 3 * 10 * 0.03 + 5 * 10 * 5e-4)


class Cache:
    """A prefix cache that counts the lookups."""

    def __init__(self, cached: int = 0) -> None:
        self.cached = cached
        self.lookups: list[CallId] = []

    def __call__(self, call_id: CallId) -> int:
        self.lookups.append(call_id)
        return self.cached


def engine(cache: Cache | None = None, places: int = 2, **parameters: float) -> small_engine.SmallEngine:
    context = small_engine.context(cached_tokens=cache or Cache(), random=random.Random(1))
    return small_engine.SmallEngine(policies.create("relquery", parameters, context), places=places)


def send(
    to: small_engine.SmallEngine, group: str | None, count: int, *, prompt: int = 100, output: int = 10, **fields
) -> None:
    for number in range(count):
        name = f"{group}-{number}-{output}-{to.now:.2f}"
        to.arrive(small_engine.call(name, group=group, prompt_tokens=prompt, output_predicted=output, **fields))


def order(of: small_engine.SmallEngine) -> list[str]:
    """The groups in the order of their first calls."""
    return list(dict.fromkeys(item.call.group or item.call.id.split("-")[0] for item in of.queue))


def test_groups_go_in_the_order_of_their_whole_remaining_work() -> None:
    served = engine()
    send(served, "many", 40)
    send(served, "few", 3, output=12)
    send(served, "long", 1, output=400)
    assert order(served) == ["few", "many", "long"]


def test_all_calls_of_a_group_share_one_rank_but_for_their_age() -> None:
    served = engine()
    send(served, "a", 3)
    send(served, "b", 2, output=50)
    ranks = {item.call.group: served.policy.rank(item)[:-1] for item in served.queue}
    for item in served.queue:
        assert served.policy.rank(item)[:-1] == ranks[item.call.group]
    assert ranks["a"] < ranks["b"]


def test_a_call_without_a_group_is_a_group_of_one() -> None:
    served = engine()
    send(served, "group", 4, output=10)
    send(served, None, 1, output=9)
    send(served, None, 1, output=300)
    listed = [item.call.output_predicted for item in served.queue]
    assert listed == [9, 10, 10, 10, 10, 300]


def test_progress_makes_a_group_more_urgent() -> None:
    """A large group that is nearly done goes before a newcomer that is smaller than the group was."""
    served = engine(places=4)
    send(served, "large", 12, output=50)
    served.run(2.0)
    assert len(served.ended) >= 4
    send(served, "new", 6, output=40)
    assert order(served)[0] == "large"
    fresh = engine(places=4)
    send(fresh, "large", 12, output=50)
    send(fresh, "new", 6, output=40)
    assert order(fresh)[0] == "new"


def test_cached_prefixes_make_a_group_shorter() -> None:
    class Hits(Cache):
        def __call__(self, call_id: CallId) -> int:
            super().__call__(call_id)
            return 2900 if call_id.startswith("cached") else 0

    cache = Hits()
    served = engine(cache)
    send(served, "plain", 5, prompt=2000)
    send(served, "cached", 6, prompt=3000)
    assert order(served) == ["plain", "cached"]
    for _ in range(10):
        served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served) == ["cached", "plain"]
    assert len(cache.lookups) == 2 * relquery_policy.SAMPLE


def test_nothing_is_looked_up_again_while_nothing_of_a_group_has_started() -> None:
    cache = Cache()
    served = engine(cache)
    send(served, "waiting", 20, output=500)
    send(served, "first", 3, output=5)
    for _ in range(4):
        served.queue.rekey(served.policy.on_tokens(served.now, {}))
    before = sum(name.startswith("waiting") for name in cache.lookups)
    served.step(max_starts=2)
    for _ in range(3):
        served.step(max_starts=0)
    assert sum(name.startswith("waiting") for name in cache.lookups) == before == relquery_policy.SAMPLE


def test_a_group_is_forgotten_when_its_last_call_is_gone() -> None:
    served = engine()
    send(served, "g", 3, output=3)
    served.run(2.0)
    assert len(served.ended) == 3
    send(served, "h", 1)
    assert {served.policy.lane(item) for item in served.queue} == {4}, "a lane is never used again"


@pytest.mark.parametrize("declared", [0, 1, 3, 10**9])
def test_a_declared_size_moves_only_the_lift_and_only_against_its_own_group(declared: int) -> None:
    served = engine(patience_s=1.0)
    send(served, "honest", 10, group_size=10, output=20)
    send(served, "other", 12, group_size=declared, output=20)
    assert order(served) == ["honest", "other"]
    served.now = 11.0
    served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served)[0] == "honest", "a small lie does not lift a group before its calls have waited"
    served.now = 13.0
    send(served, None, 1, output=1)
    if declared < 13:
        assert order(served)[:2] == ["honest", "other"]
    else:
        assert order(served)[:2] == ["honest", "None"]


def lifted() -> small_engine.SmallEngine:
    """An engine whose group of two is lifted before a smaller group, and has a third call since."""
    served = engine(patience_s=1.0)
    send(served, "large", 2, output=100)
    served.now = 3.0
    send(served, "small", 3)
    send(served, "large", 1, output=90)
    return served


def test_a_lift_holds_for_the_calls_that_are_here_not_for_those_that_were_announced() -> None:
    served = engine(patience_s=0.01)
    send(served, "large", 1, group_size=10_000, output=100)
    served.now = 101.0
    send(served, "small", 3)
    assert order(served)[0] == "large"
    send(served, "large", 4, output=100)
    served.queue.pop(served.now)
    assert order(served)[0] == "small"


def test_calls_that_ended_are_no_patience_of_their_group() -> None:
    """Of 100 calls 99 are gone: the last one waits for a second, not for a hundred."""
    served = engine(patience_s=1.0)
    send(served, "large", 100, output=100)
    for item in list(served.queue)[1:]:
        served.queue.remove(item.call.id)
        served.policy.on_end(served.now, item.call.id)
    served.now = 2.0
    send(served, "small", 3)
    assert order(served)[0] == "large"


def test_the_listed_order_of_a_lifted_group_ends_with_its_lift() -> None:
    served = lifted()
    listed = [item.call.id for item in served.queue]
    assert [name.split("-")[0] for name in listed] == ["large"] * 2 + ["small"] * 3 + ["large"]
    assert [served.queue.pop(served.now).call.id for _ in listed] == listed


def test_a_call_that_is_passed_over_uses_nothing_of_the_lift_of_its_group() -> None:
    served = lifted()
    listed = [item.call.id for item in served.queue]
    served.queue.pass_over()
    served.queue.end_scan()
    assert [item.call.id for item in served.queue] == listed


def test_a_group_is_lifted_again_when_it_has_lost_its_patience_again() -> None:
    served = lifted()
    for _ in range(2):
        served.queue.pop(served.now)
    assert order(served)[0] == "small"
    served.now += 2.9
    served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served)[0] == "small"
    served.now += 0.2
    served.queue.rekey(served.policy.on_tokens(served.now, {}))
    assert order(served)[0] == "large"


def test_the_estimate_of_a_very_large_group_reads_a_bounded_number_of_its_calls() -> None:
    served = engine()
    send(served, "huge", 5000)
    for _ in range(5):
        served.queue.rekey(served.policy.on_tokens(served.now, {}))
    exact_s = batch_decomposition.seconds(small_engine.COST, uncached=[100.0] * 5000, output=10, context=100.0)
    assert served.policy.rank(next(iter(served.queue)))[1] == pytest.approx(exact_s, rel=0.1)


def test_groups_beyond_the_lanes_are_groups_of_one() -> None:
    served = engine()
    for number in range(relquery_policy.MAX_GROUPS + 50):
        send(served, f"g{number}", 1)
    assert len({served.policy.lane(item) for item in served.queue}) == relquery_policy.MAX_GROUPS + 1
    served.run(60.0)
    assert len(served.ended) == relquery_policy.MAX_GROUPS + 50
