"""One grammar for durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import duration


@pytest.mark.parametrize(
    ("text", "expected"), [("60ms", 0.06), ("1s", 1.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0)]
)
def test_durations_become_seconds(text: str, expected: float) -> None:
    assert duration.seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "-1s", "1 s", "1d", "s", "1s2", "1e3s", "\u0661s"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write it as 60ms"):
        duration.seconds(text)


@pytest.mark.parametrize("text", ["0", "10", "1.5"])
def test_a_number_without_a_unit_is_refused_with_both_likely_meanings(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text} has no unit; write {text}ms or {text}s"):
        duration.seconds(text)


@pytest.mark.parametrize(
    ("length_s", "expected"), [(0.0, "0s"), (0.06, "60ms"), (1.5, "1.5s"), (90, "90s"), (600.0, "10m"), (86400, "24h")]
)
def test_seconds_become_a_duration_in_a_readable_unit(length_s: float, expected: str) -> None:
    assert duration.text(length_s) == expected


@given(length_ms=st.integers(min_value=0, max_value=10**12))
def test_a_written_duration_is_read_as_the_same_time(length_ms: int) -> None:
    assert duration.seconds(duration.text(length_ms / 1000)) == pytest.approx(length_ms / 1000)
