"""One grammar for durations."""

import pytest

from tidegate_policy import duration


@pytest.mark.parametrize(
    ("text", "expected"), [("60ms", 0.06), ("1s", 1.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0)]
)
def test_durations_become_seconds(text: str, expected: float) -> None:
    assert duration.seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "10", "-1s", "1 s", "1d", "s", "1s2", "1e3s", "\u0661s"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write it as 60ms"):
        duration.seconds(text)
