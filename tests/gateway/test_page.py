"""The status page shows numbers for people."""

import pytest

from tidegate_gateway.edge import status_page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-17, "0"), (-1e-17, "0"), (0.25, "0.25"), (12345.6789, "12345.679"), (3.0, "3"), (100.0, "100"), (7, "7")],
)
def test_a_number_is_rounded_to_what_can_be_read(value: float, shown: str) -> None:
    assert status_page._text(value) == shown


def test_text_is_escaped_and_nothing_is_a_dash() -> None:
    assert [status_page._text(value) for value in ("<b>", None, "")] == ["&lt;b&gt;", "-", "-"]
