"""Values that are made for each call are cheap to make, and immutable for the type checker."""

import pathlib
from dataclasses import replace

import pytest
from mypy import api

from tidegate_policy import immutable
from tidegate_policy.model import Backlog, Call, CallId

PROGRAM = """
from dataclasses import replace
from tidegate_policy.model import Backlog
backlog = replace(Backlog(calls=1), work_us=2)
backlog.calls = 3
"""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Pair:
    left: int
    right: int = 2


def test_the_fields_of_a_value_are_assigned_without_calls() -> None:
    for made in (Call, Backlog, Pair):
        code = getattr(made.__init__, "__code__", None)  # a compiled constructor has none
        assert code is None or "__setattr__" not in code.co_names
    assert "__setattr__" not in Pair.__init__.__code__.co_names


def test_values_with_equal_fields_are_equal_and_have_one_hash() -> None:
    assert Pair(left=1) == replace(Pair(left=3), left=1)
    assert len({Pair(left=1), Pair(left=1, right=2), Pair(left=2)}) == 2


def test_values_take_no_positional_arguments_and_no_further_attributes() -> None:
    with pytest.raises(TypeError):
        Pair(1, 2)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1, output_predicted=1).other = 1  # type: ignore[attr-defined]


def test_mypy_rejects_an_assignment_to_a_field_of_a_value(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found, _, status = api.run(["--strict", "--no-incremental", "--follow-imports=silent", str(program)])
    assert status == 1
    assert 'Property "calls" defined in "Backlog" is read-only' in found
    assert found.count("error:") == 1, found
