"""The error budget of each class over the last hour, from counters of gateways that come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator import error_budget
from tidegate_operator.error_budget import Counts


def budgets(*samples):
    """`samples` are (instant, counts of class chat by gateway)."""
    made = error_budget.ErrorBudgets()
    for now, seen in samples:
        counted = {name: {"chat": Counts(*counts)} for name, counts in seen.items()}
        made.add(now, counted, gateways=seen.keys(), classes={"chat"})
    return made


def test_calls_from_before_the_first_look_do_not_count():
    assert budgets((0, {"a": (50, 100)})).of_class("chat", 95) is None
    seen = budgets((0, {"a": (50, 100)}), (30, {"a": (149, 200)})).of_class("chat", 95)
    assert round(seen.attainment, 4) == 0.99
    assert round(seen.left, 4) == 0.8


def test_gateways_add_up_and_one_that_starts_anew_counts_from_zero():
    first, second = {"a": (0, 0), "b": (10, 10)}, {"a": (8, 10), "b": (20, 20)}
    made = budgets((0, first), (30, second), (60, {"a": (1, 2), "b": (20, 20)}))
    assert made.of_class("chat", 95).attainment == (8 + 10 + 1) / (10 + 10 + 2)


def test_the_budget_is_overdrawn_when_more_is_missed_than_the_objective_allows():
    made = budgets((0, {"a": (0, 0)}), (30, {"a": (8, 10)}))
    assert round(made.of_class("chat", 90).left, 4) == -1
    assert round(made.of_class("chat", 50).left, 4) == 0.6


def test_an_hour_later_the_calls_are_forgotten():
    samples = [(0, {"a": (0, 0)}), (30, {"a": (0, 10)}), (1800, {"a": (10, 20)})]
    assert budgets(*samples).of_class("chat", 95).attainment == 0.5
    assert budgets(*samples, (3700, {"a": (10, 20)})).of_class("chat", 95).attainment == 1
    assert budgets(*samples, (9000, {"a": (10, 20)})).of_class("chat", 95) is None


def test_classes_that_a_gateway_invents_are_not_kept():
    made = error_budget.ErrorBudgets()
    for now in range(20):
        counted = {"a": {"chat": Counts(now, now)} | {f"{now}-{number}": Counts(1, 1) for number in range(250)}}
        made.add(now, counted, gateways={"a"}, classes={"chat"})
    assert made.of_class("chat", 95).attainment == 1
    assert [totals.keys() for _, totals in made._slices] == [{"chat"}]


@pytest.mark.parametrize(("met", "with_target"), [(2, 1), (-1, 1), (0, 2**60), (1.7e308, 1.7e308)])
def test_counts_that_no_gateway_can_have_are_an_error(met, with_target):
    with pytest.raises(ValueError, match="met their target"):
        error_budget.parse({"targets": {"chat": {"met": met, "with_target": with_target}}})


@given(st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=30))
def test_the_attainment_is_that_of_the_calls_of_the_last_twelve_slices(slices):
    """A gateway is asked at the start, and then once in each slice of five minutes."""
    made = budgets((0, {"a": (0, 0)}))
    met = total = 0
    for number, calls in enumerate(slices):
        met, total = met + sum(calls), total + len(calls)
        counted = {"a": {"chat": Counts(met, total)}}
        made.add(number * error_budget.SLICE_S + 10, counted, gateways={"a"}, classes={"chat"})
    seen = made.of_class("chat", 95)
    counted = [call for calls in slices[-12:] for call in calls]
    assert (seen and round(seen.attainment, 9)) == (round(sum(counted) / len(counted), 9) if counted else None)
