"""The streams of reports of an engine: when it reports, and each watcher is released, whatever ends its stream."""

import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from tidegate_control import control_contract, control_server
from tidegate_policy import qos
from tidegate_policy.engine import engine_status
from tidegate_proto.v1 import control_pb2


class Aborted(Exception):
    """What `abort` of a context raises."""


class Caller:
    """The context of a call whose caller is there, or has left already."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.left: Any = None
        self.told = ""

    def add_callback(self, callback: Any) -> bool:
        self.left = callback
        return self.is_there

    def abort(self, code: Any, details: str) -> None:
        self.told = details
        raise Aborted(details)


class Engine:
    """An engine that counts its open watches, and may fail to open or to cut one."""

    def __init__(self) -> None:
        self.open = 0
        self.fails: Exception | None = None
        self.fails_to_cut = False
        self.policy = "fcfs"
        self.windows: Iterator[qos.Qos] = itertools.repeat(qos.Qos())
        """What happens in the engine."""

    def watch(self) -> Any:
        if self.fails is not None:
            raise self.fails
        self.open += 1
        return self

    def cut(self) -> engine_status.WatchReport:
        if self.fails_to_cut:
            raise RuntimeError("a defect")
        return engine_status.WatchReport(
            policy=self.policy, policy_parameters={}, bypass=False, window=next(self.windows)
        )

    def close(self) -> None:
        self.open -= 1


def stream(
    control: control_server.Control, caller: Caller, *, idle_period_s: float = 0.0
) -> Iterator[control_pb2.QosReport]:
    request = control_pb2.WatchQosRequest(period_s=0.1, idle_period_s=idle_period_s)
    return control.WatchQos(request, cast("Any", caller))


def served(engine: Engine) -> control_server.Control:
    return control_server.Control(cast("control_contract.ControlledEngine", engine), "1")


def is_served(control: control_server.Control) -> bool:
    """Whether one more watcher gets a report."""
    reports = stream(control, Caller())
    found = next(reports).policy == "fcfs"
    cast("Any", reports).close()
    return found


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), control_contract.NotControllable("no hook")])
def test_watches_that_cannot_be_opened_take_no_place(failure: Exception) -> None:
    engine = Engine()
    control = served(engine)
    engine.fails = failure
    for _ in range(2 * control_server.MAX_WATCHES):
        with pytest.raises((RuntimeError, Aborted)):
            next(stream(control, Caller()))
    engine.fails = None
    assert is_served(control)


def test_a_caller_that_has_left_before_its_stream_begins_is_not_watched_for() -> None:
    engine = Engine()
    control = served(engine)
    for _ in range(2 * control_server.MAX_WATCHES):
        ended = threading.Thread(target=lambda: list(stream(control, Caller(is_there=False))), daemon=True)
        ended.start()
        ended.join(5.0)
        assert not ended.is_alive(), "the stream goes on without a caller"
    assert engine.open == 0
    assert is_served(control)


def test_the_watchers_of_streams_that_end_or_fail_are_closed() -> None:
    engine = Engine()
    control = served(engine)
    for fails in (False, True):
        for _ in range(2 * control_server.MAX_WATCHES):
            engine.fails_to_cut, caller = fails, Caller()
            reports = stream(control, caller)
            if fails:
                with pytest.raises(RuntimeError):
                    next(reports)
            else:
                next(reports)
                caller.left()
                assert list(reports) == []
            assert engine.open == 0
    engine.fails_to_cut = False
    assert is_served(control)


IDLE, BUSY = qos.Qos(window_s=0.1), qos.Qos(window_s=0.1, arrived=1)


def told(windows: Sequence[qos.Qos], *, idle_period_s: float) -> list[tuple[float, int]]:
    """The length of the window, and the calls that arrived, of each report while the engine has these windows."""
    engine = Engine()
    engine.windows = iter([*windows])
    reports, found = stream(served(engine), Caller(), idle_period_s=idle_period_s), []
    with contextlib.suppress(RuntimeError):  # the windows are used up
        while True:
            report = next(reports)
            found.append((round(report.window_s, 3), report.arrived))
    return found


def test_windows_in_which_nothing_happens_are_one_report_for_each_idle_period() -> None:
    assert told([IDLE] * 8, idle_period_s=0.3) == [(0.1, 0), (0.3, 0), (0.3, 0)]


def test_a_window_in_which_something_happens_is_reported_in_time_and_so_is_the_idle_one_after_it() -> None:
    assert told([IDLE, IDLE, BUSY, IDLE, IDLE, BUSY], idle_period_s=10.0) == [(0.1, 0), (0.2, 1), (0.1, 0), (0.2, 1)]


def test_a_caller_that_asks_for_no_idle_period_gets_each_window() -> None:
    assert told([IDLE] * 3, idle_period_s=0.0) == [(0.1, 0)] * 3


def test_a_policy_that_is_new_is_reported_in_time_by_an_idle_engine() -> None:
    engine = Engine()
    engine.windows = itertools.repeat(IDLE)
    reports = stream(served(engine), Caller(), idle_period_s=60.0)
    assert next(reports).policy == "fcfs"
    engine.policy = "edf"
    assert next(reports).policy == "edf"


def test_an_impossible_idle_period_is_rejected() -> None:
    for period_s in (-1.0, 60.5, math.nan):
        caller = Caller()
        with pytest.raises(Aborted):
            next(stream(served(Engine()), caller, idle_period_s=period_s))
        assert "idle_period_s must be between 0 and 60" in caller.told


def test_what_happens_in_a_window_is_seen_in_each_of_its_numbers() -> None:
    assert qos.Qos().is_idle
    one = qos.Histogram(counts=(0, 1))
    tenants = {"search": qos.TenantService(weight=1.0, served_tokens=1, waiting=0, with_target=0, missed=0)}
    numbers = ("arrived", "finished", "waiting", "preemptions", "with_target", "blocked")
    changes: list[dict[str, Any]] = [{name: 1} for name in numbers]
    changes += [{"ttft": one}, {"tpot": one}, {"service": one}, {"tenants": tenants}, {"classes": {"": qos.Targets()}}]
    for change in changes:
        assert not dataclasses.replace(qos.Qos(), **change).is_idle, change
