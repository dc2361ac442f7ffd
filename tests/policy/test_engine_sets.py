"""The cheapest set of engines, against a search of all sets."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy.scale import engine_sets
from tidegate_policy.scale.engine_sets import Kind

KINDS = st.lists(
    st.builds(
        dict,
        price=st.floats(0.1, 8.0),
        share=st.sampled_from((0.0, 0.07, 0.25, 0.4, 1.1)),
        low=st.integers(0, 1),
        high=st.integers(0, 4),
        present=st.integers(0, 4),
        start_price=st.sampled_from((0.0, 0.5)),
    ),
    min_size=1,
    max_size=3,
).map(
    lambda items: [
        Kind(name=f"k{index}", **{**item, "high": max(item["high"], item["low"])}) for index, item in enumerate(items)
    ]
)


def whole_price(kinds, counts):
    return sum(
        kind.price * count + kind.start_price * max(count - max(kind.present, kind.low), 0)
        for kind, count in zip(kinds, counts, strict=True)
    )


@settings(max_examples=300, deadline=None)
@given(kinds=KINDS)
def test_no_other_set_that_carries_the_load_is_cheaper(kinds):
    found = engine_sets.cheapest(kinds)
    assert all(kind.low <= found[kind.name] <= kind.high for kind in kinds)
    every = list(itertools.product(*(range(kind.low, kind.high + 1) for kind in kinds)))
    carries = [
        counts
        for counts in every
        if sum(kind.share * count for kind, count in zip(kinds, counts, strict=True)) >= 1 - 1e-9
    ]
    if not carries:
        most = max(sum(kind.share * count for kind, count in zip(kinds, counts, strict=True)) for counts in every)
        assert engine_sets.carried(kinds, found) >= most - 1e-9
        return
    assert engine_sets.carried(kinds, found) >= 1 - 1e-9
    least = min(whole_price(kinds, counts) for counts in carries)
    assert whole_price(kinds, [found[kind.name] for kind in kinds]) <= least + 1e-6


def test_the_search_is_quick_for_many_kinds():
    kinds = [
        Kind(name=f"k{index:02}", price=1 + index * 0.37 % 1, share=0.011 + index * 0.0007, low=0, high=1000)
        for index in range(16)
    ]
    found = engine_sets.cheapest(kinds)
    assert engine_sets.carried(kinds, found) >= 1 - 1e-9


def test_an_unfit_kind_comes_last():
    kinds = [
        Kind(name="dear", price=10.0, share=0.5, low=0, high=1),
        Kind(name="unfit", price=0.1, share=0.5, low=0, high=9, fit=False),
    ]
    assert engine_sets.cheapest(kinds) == {"dear": 1, "unfit": 1}
