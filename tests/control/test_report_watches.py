"""The streams of reports of an engine: each watcher is released, whatever ends its stream."""

import threading
from collections.abc import Iterator
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

    def watch(self) -> Any:
        if self.fails is not None:
            raise self.fails
        self.open += 1
        return self

    def cut(self) -> engine_status.WatchReport:
        if self.fails_to_cut:
            raise RuntimeError("a defect")
        return engine_status.WatchReport(policy="fcfs", policy_parameters={}, bypass=False, window=qos.Qos())

    def close(self) -> None:
        self.open -= 1


def stream(control: control_server.Control, caller: Caller) -> Iterator[control_pb2.QosReport]:
    return control.WatchQos(control_pb2.WatchQosRequest(period_s=0.1), cast("Any", caller))


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
