"""The share of a new revision: by a hash, the same in each gateway, and never at the cost of a call."""

import itertools
import random

import pytest

from tidegate_policy import cost, policies
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.retries import Failure, RetrySettings
from tidegate_policy.dispatch.core_actions import Send
from tidegate_policy.dispatch.dispatcher import Dispatcher
from tidegate_policy.dispatch.engine_table import EngineFacts, EngineTable, Health
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.traffic_split import TrafficSplit
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.model import NO_BACKLOG, Call, CallId, EngineId, WorkflowId

MODEL = cost.CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)
NEW = EngineId("new")


def call(number, **fields):
    return Call(
        id=CallId(f"call-{number}"), arrived_at_s=0.0, prompt_tokens=100, output_predicted=20, model="m", **fields
    )


def split(weight, *, until_s=100.0):
    return TrafficSplit(engines=frozenset([NEW]), weight=weight, until_s=until_s)


@pytest.fixture
def gate():
    return made()


def made(*, max_inflight=None):
    table = EngineTable(max_inflight, OutlierSettings())
    dispatcher = Dispatcher(
        table,
        policy=policies.create("fcfs"),
        settings=DispatchSettings(),
        limits=Limits(),
        retry=RetrySettings(max_attempts=5),
        rng=random.Random(0),
    )
    for name in ("old-0", "old-1", NEW):
        report(table, name)
    return table, dispatcher


def report(table, name, health=Health.UP):
    table.update(EngineFacts(id=EngineId(name), cost=MODEL, health=health), lambda: NO_BACKLOG)


def engine_of(dispatcher, each, now=0.0):
    (action,) = dispatcher.on_arrival(now, each)
    assert isinstance(action, Send)
    return action.decision.engine


@pytest.mark.parametrize("weight", [0, 5, 25, 99])
def test_the_share_of_the_new_engines_is_their_weight(gate, weight):
    _, dispatcher = gate
    dispatcher.split = split(weight)
    chosen = [engine_of(dispatcher, call(number)) for number in range(4000)]
    expected = sum(dispatcher.split.is_for_new(call(number)) for number in range(4000))
    assert chosen.count(NEW) == expected
    assert abs(expected / 4000 - weight / 100) < 0.02
    assert chosen.count(EngineId("old-0")) > 0


def test_the_calls_of_a_workflow_and_of_a_session_stay_on_one_side(gate):
    _, dispatcher = gate
    dispatcher.split = split(50)
    for field, kind in (("workflow", WorkflowId), ("session", str)):
        for number in range(20):
            of_one = {field: kind(f"{field}-{number}")}
            sides = {engine_of(dispatcher, call(f"{number}-{field}-{i}", **of_one)) == NEW for i in range(6)}
            assert len(sides) == 1


def test_a_workflow_on_the_new_side_stays_there_when_the_share_grows():
    each = [call(number, workflow=WorkflowId(f"w{number}")) for number in range(300)]
    sides = [[split(weight).is_for_new(one) for one in each] for weight in (5, 25, 60)]
    for less, more in itertools.pairwise(sides):
        assert all(after or not before for before, after in zip(less, more, strict=True))


@pytest.mark.parametrize(("weight", "down"), [(99, [NEW]), (0, ["old-0", "old-1"]), (5, ["old-0", "old-1"])])
def test_a_side_without_an_engine_yields(gate, weight, down):
    table, dispatcher = gate
    dispatcher.split = split(weight)
    for name in down:
        report(table, name, Health.DOWN)
    for number in range(50):
        assert engine_of(dispatcher, call(number)) not in down


def test_a_side_whose_engines_are_full_yields():
    _, dispatcher = made(max_inflight=3)
    dispatcher.split = split(0)
    chosen = [engine_of(dispatcher, call(number)) for number in range(9)]
    assert chosen.count(NEW) == 3


def test_a_call_that_the_new_engine_failed_is_tried_at_an_old_one(gate):
    _, dispatcher = gate
    dispatcher.split = split(99)
    one = next(call(number) for number in range(100) if dispatcher.split.is_for_new(call(number)))
    assert engine_of(dispatcher, one) == NEW
    (again,) = dispatcher.on_attempt_failed(1.0, one.id, Failure.FAILED)
    assert isinstance(again, Send)
    assert again.decision.engine != NEW


def test_a_split_that_is_not_renewed_ends(gate):
    _, dispatcher = gate
    dispatcher.split = split(0, until_s=10.0)
    assert NEW not in {engine_of(dispatcher, call(number), now=9.0) for number in range(60)}
    assert NEW in {engine_of(dispatcher, call(f"later-{number}"), now=10.0) for number in range(60)}
