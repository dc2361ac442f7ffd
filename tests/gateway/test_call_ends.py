"""The journal of ends that the store could not take."""

import asyncio
import collections
import contextlib
import io
import pathlib
import random
import resource
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway.workflows import call_ends, waiting_ends


def end(call: str, *, ok: bool = True, workflow: str = "w", tenant: str = "") -> waiting_ends.CallEnd:
    return waiting_ends.CallEnd(tenant=tenant, workflow=workflow, call=call, ok=ok)


async def delivered(
    ends: call_ends.CallEnds, takes: Callable[[str], bool] = lambda call: True
) -> list[tuple[str, bool]]:
    """The ends that are delivered until one is not taken."""
    seen: list[tuple[str, bool]] = []

    async def record(one: waiting_ends.CallEnd) -> bool:
        if takes(one.call):
            seen.append((one.call, one.ok))
        return takes(one.call)

    await ends.deliver(record)
    return seen


async def test_an_end_outlives_the_process_that_added_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ends.jsonl"
    killed = call_ends.CallEnds(path)
    killed.add(end("cut", ok=False, workflow="wörk\nflow"))
    killed.add(end("told"))
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
        ends.add(end(f"c{number}"))
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
    ends.add(end("after"))
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
        ends.add(end(f"c{number}", ok=number % 2 == 0))
    assert len(ends) == 10
    assert len(path.read_bytes().splitlines()) <= 21
    assert path.stat().st_mode & 0o077 == 0
    ends.close()


def filled(path: pathlib.Path, count: int) -> call_ends.CallEnds:
    """A journal to which so many good ends were added."""
    ends = call_ends.CallEnds(path)
    for number in range(count):
        ends.add(end(f"c{number}"))
    return ends


@pytest.mark.parametrize("most", [10, 100])
async def test_a_process_that_is_killed_while_the_next_journal_is_written_loses_no_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(call_ends, "MOST", most)

    class Killed(BaseException):
        pass

    def kill(following: call_ends._NextJournal, *_: object) -> None:
        following.journal.close()
        raise Killed

    def kill_later(following: call_ends._NextJournal, old: io.FileIO) -> None:
        replace(following, old)
        kill(following)

    replace, copied = call_ends._NextJournal.replace, most // call_ends.COPIED_AT_ONCE
    for number, (step, killing) in enumerate((("add", kill), ("replace", kill), ("replace", kill_later))):
        path = tmp_path / f"{number}.jsonl"
        ends = filled(path, 2 * most)
        first = {f"c{each}" for each in range(most // 2)}
        assert len(await delivered(ends, first.__contains__)) == most // 2
        for each in range(copied):
            ends.add(end(f"later {each}"))
        with monkeypatch.context() as patched:
            patched.setattr(call_ends._NextJournal, step, killing)
            with contextlib.suppress(Killed):
                for _ in range(most // 2 - copied):
                    ends.add(end("next"))
                raise AssertionError("no next journal was written")
        ends.close()
        again = call_ends.CallEnds(path)
        waits = {call for call, _ in await delivered(again)}
        again.close()
        assert {f"c{each}" for each in range(most // 2, most)} | {"next"} <= waits
        assert {f"later {each}" for each in range(copied)} <= waits


async def test_the_ends_in_the_next_journal_keep_their_order(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 100)
    path = tmp_path / "ends.jsonl"
    ends = filled(path, 200)
    first = {f"c{each}" for each in range(50)}
    await delivered(ends, first.__contains__)
    for each in range(20):
        ends.add(end(f"later {each}"))
    ends.close()
    assert len(path.read_bytes().splitlines()) < 200, "it has taken the place of the old one"
    again = call_ends.CallEnds(path)
    expected = [f"c{each}" for each in range(100)] + [f"later {each}" for each in range(20)]
    assert [call for call, _ in await delivered(again)] == expected
    again.close()


def test_a_journal_that_was_replaced_is_still_of_one_gateway(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    path = tmp_path / "ends.jsonl"
    ends = filled(path, 50)
    with pytest.raises(OSError, match="is used by another gateway"):
        call_ends.CallEnds(path)
    ends.close()
    assert [each.name for each in tmp_path.iterdir()] == ["ends.jsonl"]


async def test_a_full_disk_is_reported_and_the_end_still_waits_in_memory(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = call_ends.CallEnds(tmp_path / "ends.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        ends.add(end("c"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the journal of the ends of calls cannot be written" in caplog.text
    assert await delivered(ends) == [("c", True)]
    ends.close()


class SlowStore:
    """Takes each end after some turns of the event loop."""

    def __init__(self) -> None:
        self.recorded: list[waiting_ends.CallEnd] = []
        self.running = 0
        self.most = 0

    async def record(self, one: waiting_ends.CallEnd) -> bool:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(random.Random(one.call).randint(1, 5)):
            await asyncio.sleep(0)
        self.running -= 1
        self.recorded.append(one)
        return True


async def test_ends_of_one_tenant_do_not_wait_behind_all_ends_of_another() -> None:
    ends, store = call_ends.CallEnds(), SlowStore()
    for number in range(1000):
        ends.add(end(f"a{number}", ok=number % 2 == 0, workflow=f"a{number % 100}", tenant="attacker"))
    ends.add(end("v", ok=False, workflow="v", tenant="victim"))
    await ends.deliver(store.record)
    assert [one.tenant for one in store.recorded].index("victim") < 2 * call_ends.AT_ONCE
    assert len(store.recorded) == 1001
    assert store.most == call_ends.AT_ONCE, "several at a time"


async def test_the_ends_of_one_workflow_keep_their_order() -> None:
    ends, store = call_ends.CallEnds(), SlowStore()
    for number in range(200):
        ends.add(end(f"{number:03}", ok=number % 2 == 0, workflow=f"w{number % 3}", tenant=f"t{number % 2}"))
    await ends.deliver(store.record)
    by_workflow = collections.defaultdict(list)
    for one in store.recorded:
        by_workflow[one.tenant, one.workflow].append((not one.ok, one.call))
    assert len(store.recorded) == 200
    assert all(calls == sorted(calls) for calls in by_workflow.values())


async def test_the_tenant_with_most_ends_loses_some_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    ends = call_ends.CallEnds()
    ends.add(end("v", ok=False, workflow="v", tenant="victim"))
    for number in range(20):
        ends.add(end(f"a{number}", ok=False, workflow=f"a{number}", tenant="attacker"))
    ends.add(end("late", ok=False, workflow="v", tenant="victim"))
    assert len(ends) == 10
    assert {("v", False), ("late", False)} <= set(await delivered(ends))


async def test_an_end_that_is_dropped_while_it_is_recorded_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_ends, "MOST", 1)
    ends = call_ends.CallEnds()
    ends.add(end("cut", ok=False))

    async def record(one: waiting_ends.CallEnd) -> bool:
        ends.add(end("told"))
        return True

    await ends.deliver(record)
    assert await delivered(ends) == [("told", True)]
    assert len(ends) == 0


def test_the_cost_of_a_dropped_end_does_not_grow_with_the_number_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = waiting_ends.WaitingEnds()
    for number in range(300):
        waiting.add(end("x", ok=number % 3 == 0, workflow=f"w{number}", tenant=f"t{number % 100}"))
    monkeypatch.setattr(waiting, "_tenants", Unlisted(waiting._tenants))
    assert {waiting.drop().ok for _ in range(200)} == {False}, "ends that no client has seen go first"
    assert {waiting.drop().ok for _ in range(100)} == {True}
    assert not len(waiting)


class Unlisted(dict[str, Any]):
    """May be asked for one tenant, not for all."""

    def __iter__(self) -> Any:
        raise AssertionError

    values = items = keys = __iter__  # type: ignore[assignment]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=200))
def test_the_tenant_that_has_most_of_the_ends_that_go_first_loses_one(steps: list[tuple[int, bool, bool]]) -> None:
    waiting, counts = waiting_ends.WaitingEnds(), collections.Counter[tuple[bool, str]]()
    for tenant, ok, is_dropped in steps:
        if is_dropped and len(waiting):
            kind = not any(count for (good, _), count in counts.items() if not good)
            most = max(count for (good, _), count in counts.items() if good == kind)
            dropped = waiting.drop()
            assert (dropped.ok, counts[dropped.ok, dropped.tenant]) == (kind, most)
            counts[dropped.ok, dropped.tenant] -= 1
        else:
            waiting.add(end("x", ok=ok, workflow=f"w{tenant}", tenant=f"t{tenant}"))
            counts[ok, f"t{tenant}"] += 1


def test_a_next_journal_that_cannot_be_written_is_tried_again_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 100)
    tried = []

    def fail(*_: object) -> None:
        tried.append(1)
        raise OSError

    ends = call_ends.CallEnds(tmp_path / "ends.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(call_ends._NextJournal, "add", fail)
        for number in range(300):
            ends.add(end(f"c{number}"))
    assert 1 < len(tried) <= 10
    for number in range(50):
        ends.add(end(f"d{number}"))
    assert len((tmp_path / "ends.jsonl").read_bytes().splitlines()) < 200
    ends.close()


def test_many_ends_that_are_dropped_share_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_ends, "MOST", 10)
    ends = call_ends.CallEnds()
    for number in range(1500):
        ends.add(end(f"c{number}"))
    assert [record.args[-1] for record in caplog.records if record.args] == [1, 1001]
