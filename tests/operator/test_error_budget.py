"""The error budget of each class over the last hour, from counters of gateways that come and go."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator import error_budget
from tidegate_operator.error_budget import Counts


def budgets(*samples):
    """`samples` are (instant, counts of class chat by gateway)."""
    made = error_budget.ErrorBudgets()
    for now, seen in samples:
        made.add(now, {name: {"chat": Counts(*counts)} for name, counts in seen.items()}, gateways=seen.keys())
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


@given(st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=30))
def test_the_attainment_is_that_of_the_calls_of_the_last_twelve_slices(slices):
    """A gateway is asked at the start, and then once in each slice of five minutes."""
    made = budgets((0, {"a": (0, 0)}))
    met = total = 0
    for number, calls in enumerate(slices):
        met, total = met + sum(calls), total + len(calls)
        made.add(number * error_budget.SLICE_S + 10, {"a": {"chat": Counts(met, total)}}, gateways={"a"})
    seen = made.of_class("chat", 95)
    counted = [call for calls in slices[-12:] for call in calls]
    assert (seen and round(seen.attainment, 9)) == (round(sum(counted) / len(counted), 9) if counted else None)
