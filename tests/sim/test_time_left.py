"""Lines of progress say how long the rest will take."""

import pytest

from tidegate_sim import time_left


@pytest.mark.parametrize(
    ("done", "elapsed_s", "said"),
    [(0, 9.0, ""), (1, 5.0, "about 45 s left"), (5, 500.0, "about 8 min left"), (10, 100.0, "")],
)
def test_the_rest_takes_as_long_for_each_part_as_the_parts_that_are_done(
    done: int, elapsed_s: float, said: str
) -> None:
    assert time_left.text(done, 10, elapsed_s) == said
