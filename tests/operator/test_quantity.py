"""Quantities of Kubernetes, and what people may write in their place."""

from decimal import Decimal

import pytest

from tidegate_operator import quantity


@pytest.mark.parametrize(
    ("given", "value"),
    [("1000m", 1), ("1Gi", 2**30), (4, 4), ("0.5", Decimal("0.5")), ("1e3", 1000), ("1n", Decimal("1e-9"))],
)
def test_a_quantity_has_its_value(given: object, value: object) -> None:
    assert quantity.number(given) == value


LARGE = ("1e9999999", "1e999999", "1e-999999", "0e999999", "1e400", "9" * 100, "Infinity", "1e999999Ei")


@pytest.mark.parametrize("given", [*LARGE, "NaN", "x", "", None])
def test_what_no_machine_has_is_no_quantity_and_takes_no_time(given: object) -> None:
    assert quantity.number(given) is None
    requests = {"requests": {"memory": given}}
    assert quantity.normalised(requests) == requests
