"""Loading saved KV against computing it again."""

import pytest

from tidegate_policy.cost import CostModel
from tidegate_policy.engine import reload


def cost(**more):
    return CostModel(step_s=0.02, prefill_s=1e-3, max_step_tokens=512, **more)


@pytest.mark.parametrize(("swap_s", "loads"), [(0.9e-3, True), (1.1e-3, False)])
def test_saved_tokens_are_loaded_if_the_transfer_takes_less_time_than_their_prefill(swap_s, loads):
    assert reload.pays(cost(swap_s=swap_s), context_tokens=200, cached_tokens=32, saved_tokens=128) is loads


def test_a_load_may_save_whole_steps():
    slow = cost(swap_s=1.02e-3)
    assert not reload.pays(slow, context_tokens=500, cached_tokens=0, saved_tokens=480)
    assert reload.pays(slow, context_tokens=1000, cached_tokens=0, saved_tokens=900)


def test_deep_tokens_are_worth_a_slower_transfer_because_they_attend_to_all_tokens_before_them():
    attending = cost(swap_s=1.5e-3, attention_s=1e-6)
    assert not reload.pays(attending, context_tokens=400, cached_tokens=0, saved_tokens=256)
    assert reload.pays(attending, context_tokens=1400, cached_tokens=1000, saved_tokens=256)


def test_a_cost_model_without_a_swap_time_loads_all_saved_tokens():
    assert reload.pays(cost(), context_tokens=200, cached_tokens=0, saved_tokens=16)
