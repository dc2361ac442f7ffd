"""The parts of a form: found in windows of the body, in one step of the event loop each."""

import asyncio
from typing import Any

import event_loop_turns
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import loop_steps
from tidegate_gateway.edge import multipart_form
from tidegate_gateway.openai import error_table

HEAD = b'--%s\r\nContent-Disposition: form-data; name="%d"\r\n\r\n'


def form(boundary: bytes, contents: list[bytes]) -> bytes:
    parts = [HEAD % (boundary, i) + content + b"\r\n" for i, content in enumerate(contents)]
    return b"".join(parts) + b"--" + boundary + b"--"


def read(body: bytes, boundary: bytes, steps: loop_steps.LoopSteps) -> Any:
    kind = f"multipart/form-data; boundary={boundary.decode()}"
    return asyncio.run(multipart_form.parts(body, kind, steps))


async def test_a_boundary_that_resembles_the_content_is_sought_in_steps() -> None:
    boundary, steps = b"a" * 69 + b"b", event_loop_turns.CountedSteps()
    body = HEAD % (boundary, 0) + b"a" * (4 * multipart_form.WINDOW_BYTES)
    with pytest.raises(error_table.BadRequest, match="cut off"):
        await multipart_form.parts(body, f"multipart/form-data; boundary={boundary.decode()}", steps)
    assert steps.taken >= 4


def test_many_parts_within_a_window_are_found_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, window = event_loop_turns.CountedSteps(), 20_000
    monkeypatch.setattr(multipart_form, "WINDOW_BYTES", window)
    assert len(read(form(b"x", [b"y" * 1000] * 10), b"x", steps)) == 10
    assert steps.taken == 0
    assert len(read(form(b"x", [b"y" * 1000] * 60), b"x", steps)) == 60
    assert steps.taken == 60 * 1000 // window, "small parts count together"


@given(
    contents=st.lists(st.lists(st.sampled_from([b"\r", b"\n", b"-", b"a"]), max_size=12).map(b"".join), max_size=4),
    window=st.integers(1, 40),
)
def test_a_boundary_across_two_windows_is_found(contents: list[bytes], window: int) -> None:
    boundary = b"aab"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipart_form, "WINDOW_BYTES", window)
        body = form(boundary, contents)
        found = read(body, boundary, loop_steps.LoopSteps())
    assert [body[part.first : part.end] for part in found.values()] == contents
