"""A line in which names take turns."""

import random

import pytest

from tidegate_gateway import turn_line


def test_names_take_turns_and_those_of_one_name_keep_their_order() -> None:
    line: turn_line.TurnLine[str] = turn_line.TurnLine()
    for name, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("c", "c2")):
        line.add(name, item)
    assert list(line) == ["a1", "a2", "a3", "b1", "c1", "c2"]
    assert [line.pop() for _ in range(len(line))] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    with pytest.raises(KeyError):
        line.pop()


@pytest.mark.parametrize("seed", range(5))
def test_items_leave_in_any_order_and_nothing_of_them_stays(seed: int) -> None:
    chance, line, waiting = random.Random(seed), turn_line.TurnLine[int](), list[int]()
    for item in range(500):
        line.add(str(chance.randrange(5)), item)
        waiting.append(item)
        if chance.random() < 0.4:
            gone = chance.choice(waiting)
            waiting.remove(gone)
            line.remove(gone)
            line.remove(gone)  # it does not wait any more, which is ignored
        if chance.random() < 0.4 and waiting:
            waiting.remove(line.pop())
    assert sorted(line) == waiting
    assert sorted(line.pop() for _ in range(len(line))) == waiting
    assert not line
    assert not line._lines


def test_a_name_with_a_long_line_loses_its_newest_item_and_one_with_a_short_line_none() -> None:
    line: turn_line.TurnLine[str] = turn_line.TurnLine()
    for name, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")):
        line.add(name, item)
    assert (line.shorten("b"), line.shorten("a"), line.shorten("a")) == ("a3", "a2", "a1")
    assert (line.shorten("b"), len(line)) == ("b1", 0)
