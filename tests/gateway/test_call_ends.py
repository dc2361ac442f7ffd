"""The journal of ends that the store could not take."""

import pathlib
import resource
from collections.abc import Callable

import pytest

from tidegate_gateway.workflows import call_ends


async def delivered(
    ends: call_ends.CallEnds, takes: Callable[[str], bool] = lambda call: True
) -> list[tuple[str, bool]]:
    """The ends that are delivered until one is not taken."""
    seen: list[tuple[str, bool]] = []

    async def record(workflow: str, call: str, ok: bool) -> bool:
        if takes(call):
            seen.append((call, ok))
        return takes(call)

    await ends.deliver(record)
    return seen


async def test_an_end_outlives_the_process_that_added_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ends.jsonl"
    killed = call_ends.CallEnds(path)
    killed.add("wörk\nflow", "cut", ok=False)
    killed.add("w", "told", ok=True)
    killed.close()
    again = call_ends.CallEnds(path)
    assert len(again) == 2
    assert await delivered(again) == [("told", True), ("cut", False)], "the end that a client has seen comes first"
    again.close()
    assert path.read_bytes() == b"", "what is recorded is not read again"


async def test_ends_that_are_not_recorded_stay_in_the_journal(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ends.jsonl"
    ends = call_ends.CallEnds(path)
    for number in range(3):
        ends.add("w", f"c{number}", ok=True)
    assert await delivered(ends, lambda call: call == "c0") == [("c0", True)]
    ends.close()
    again = call_ends.CallEnds(path)
    assert await delivered(again) == [(f"c{number}", True) for number in range(3)], (
        "c0 is delivered twice, none is lost"
    )
    again.close()


async def test_lines_that_a_crash_cut_or_another_program_wrote_are_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ends.jsonl"
    path.write_bytes(b'["w","whole",true]\n[1,2,3]\n{}\n\xff\n["w","c",1]\n["w","cut",tr')
    ends = call_ends.CallEnds(path)
    ends.add("w", "after", ok=True)
    ends.close()
    again = call_ends.CallEnds(path)
    assert await delivered(again) == [("whole", True), ("after", True)], "the next line does not follow the cut one"
    again.close()


def test_two_gateways_cannot_use_one_journal(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ends.jsonl"
    first = call_ends.CallEnds(path)
    with pytest.raises(OSError, match="is used by another gateway"):
        call_ends.CallEnds(path)
    first.close()
    call_ends.CallEnds(path).close()


def test_the_journal_is_private_and_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    path = tmp_path / "ends.jsonl"
    ends = call_ends.CallEnds(path)
    for number in range(1000):
        ends.add("w", f"c{number}", ok=number % 2 == 0)
    assert len(ends) == 10
    assert len(path.read_bytes().splitlines()) <= 20
    assert path.stat().st_mode & 0o077 == 0
    ends.close()


def filled(path: pathlib.Path, count: int) -> call_ends.CallEnds:
    """A journal to which so many good ends were added."""
    ends = call_ends.CallEnds(path)
    for number in range(count):
        ends.add("w", f"c{number}", ok=True)
    return ends


async def test_a_process_that_is_killed_while_the_journal_is_rewritten_loses_no_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    path = tmp_path / "ends.jsonl"
    ends = filled(path, 20)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    written = path.read_bytes()
    for where, step in ((call_ends, "_line"), (call_ends, "_write"), (pathlib.Path, "replace")):
        with monkeypatch.context() as patched:
            patched.setattr(where, step, kill)
            with pytest.raises(Killed):
                ends.add("w", "next", ok=True)
        assert path.read_bytes() == written, "the old journal is whole"
    ends.add("w", "last", ok=True)
    ends.close()
    again = call_ends.CallEnds(path)
    assert await delivered(again) == [(f"c{number}", True) for number in range(10)], "the new one has what waits"
    again.close()


def test_a_journal_that_was_replaced_is_still_of_one_gateway(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    path = tmp_path / "ends.jsonl"
    ends = filled(path, 50)
    with pytest.raises(OSError, match="is used by another gateway"):
        call_ends.CallEnds(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ends.jsonl"]
    ends.close()


async def test_a_full_disk_is_reported_and_the_end_still_waits_in_memory(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = call_ends.CallEnds(tmp_path / "ends.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        ends.add("w", "c", ok=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the journal of the ends of calls cannot be written" in caplog.text
    assert await delivered(ends) == [("c", True)]
    ends.close()
