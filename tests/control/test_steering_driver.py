"""The steering loop against real EngineControl servers on loopback. Time is handed in; only reports take real
time."""

import asyncio
import contextlib
import dataclasses
import logging
import math

import pytest

import control_double
from tidegate_control import control_connections, steering_driver
from tidegate_policy.steer import guards, llm_choice, steering_loop
from tidegate_proto.v1 import control_pb2

SETTINGS = steering_loop.Settings(
    allow=("two-lane", "edf", "urgency", "fcfs"),
    interval_s=0.2,
    guards=guards.GuardSettings(dwell_s=60.0, window_s=20.0, rho=1.2),
)
START_S = 1_000_000.0


@contextlib.asynccontextmanager
async def steered(count=2, *, settings=SETTINGS, state=None, now=START_S):
    """A loop over `count` engines that have all reported."""
    engines = [control_double.FakeEngine() for _ in range(count)]
    for engine in engines:
        engine.report = control_double.calm()
        await engine.start()
    loop = steering_driver.SteeringDriver(state, settings, now=now)
    try:
        await loop.engines.retarget([engine.address for engine in engines])
        yield loop, engines
    finally:
        await loop.engines.close()
        for engine in engines:
            await engine.stop()


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


async def heard(loop, engines):
    await until(lambda: loop.engines.reported() >= {engine.address for engine in engines})


async def decide(loop, engines, now, report=None, override=None):
    """One decision over fresh reports, of the given kind from now on, put in force."""
    if report is not None:
        for engine in engines:
            engine.report = report
        await asyncio.sleep(0.15)  # one of the old kind may be on its way
    loop.engines.take_reports()
    await heard(loop, engines)
    outcome = loop.observe(now, override)
    return outcome, await loop.enforce()


async def test_a_new_pool_starts_with_the_start_policy_on_every_engine():
    async with steered() as (loop, engines):
        outcome, failed = await decide(loop, engines, START_S + 1)
        assert (outcome.state.active, failed) == ("urgency", {})
        assert [engine.set_to for engine in engines] == [["urgency"], ["urgency"]]


async def test_a_shift_of_the_load_switches_every_engine_once():
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        outcome, _ = await decide(loop, engines, START_S + 100, control_double.blocked())
        assert outcome.verdict.kind is guards.Kind.SWITCH
        assert outcome.verdict.policy == "two-lane"
        assert "waited longer than twice their own work" in outcome.verdict.reason
        assert [engine.set_to for engine in engines] == [["urgency", "two-lane"]] * 2
        await decide(loop, engines, START_S + 200, control_double.blocked())
        assert [engine.set_to for engine in engines] == [["urgency", "two-lane"]] * 2


async def test_a_policy_stays_for_its_dwell():
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        outcome, _ = await decide(loop, engines, START_S + 59, control_double.blocked())
        assert outcome.verdict.kind is guards.Kind.KEEP


async def test_a_switch_that_worsens_the_service_is_rolled_back_and_not_repeated():
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        await decide(loop, engines, START_S + 100, control_double.blocked())
        outcome, _ = await decide(loop, engines, START_S + 130, control_double.worse())
        assert outcome.verdict.kind is guards.Kind.ROLLBACK
        assert [engine.policy for engine in engines] == ["urgency", "urgency"]
        outcome, _ = await decide(loop, engines, START_S + 200, control_double.blocked())
        assert outcome.verdict.kind is guards.Kind.KEEP  # two-lane is banned for a while


async def test_a_pool_with_mostly_silent_engines_switches_to_the_safe_policy():
    async with steered(3) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        for engine in engines[1:]:
            await engine.stop()
        loop.engines.take_reports()
        await until(lambda: len(loop.engines.silent()) == 2)
        await heard(loop, engines[:1])
        outcome = loop.observe(START_S + 2, None)  # inside the dwell: an emergency does not wait
        await loop.enforce()
        assert outcome.verdict.kind is guards.Kind.BYPASS
        assert (engines[0].policy, engines[0].bypass) == ("fcfs", True)


async def test_a_bypass_is_set_again_on_an_engine_that_restarted_and_ends_with_the_next_switch():
    state = guards.SteerState(active="fcfs", since_at_s=START_S - 100, kind=guards.Kind.BYPASS)
    async with steered(state=state) as (loop, engines):
        await decide(loop, engines, START_S + 0.1)
        assert [engine.bypass for engine in engines] == [True, True]
        engines[0].bypass = False
        await decide(loop, engines, START_S + 0.5, control_double.calm())
        assert [(engine.bypass, len(engine.set_to)) for engine in engines] == [(True, 2), (True, 1)]
        outcome, _ = await decide(loop, engines, START_S + 1, control_double.blocked())
        assert outcome.verdict.kind is guards.Kind.SWITCH
        assert [(engine.policy, engine.bypass) for engine in engines] == [("two-lane", False)] * 2


async def test_engines_with_a_long_report_period_are_not_silent():
    slow = dataclasses.replace(SETTINGS, interval_s=4.0)
    async with steered(4, settings=slow) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        for engine in engines[1:]:
            engine.mute = True
        loop.engines.take_reports()
        await heard(loop, engines[:1])
        assert loop.observe(START_S + 2, None).verdict.kind is guards.Kind.KEEP


async def test_engines_report_at_a_new_pace_when_the_interval_changes():
    async with steered(4, settings=dataclasses.replace(SETTINGS, interval_s=30.0)) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        assert [engine.periods for engine in engines] == [[2.5]] * 4
        loop.settings = dataclasses.replace(SETTINGS, interval_s=1.0)
        await loop.engines.retarget([engine.address for engine in engines])
        await until(lambda: [engine.periods for engine in engines] == [[0.25]] * 4)
        outcome, _ = await decide(loop, engines, START_S + 3)
        assert outcome.verdict.kind is guards.Kind.KEEP


async def test_an_engine_with_an_open_stream_without_reports_is_silent():
    async with steered(3) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        for engine in engines[1:]:
            engine.mute = True
        await until(lambda: loop.engines.silent() == {engine.address for engine in engines[1:]})
        assert loop.not_following() == dict.fromkeys(loop.engines.silent(), "it does not report")
        outcome = loop.observe(START_S + 2, None)
        assert (outcome.verdict.kind, outcome.verdict.reason) == (
            guards.Kind.BYPASS,
            "silence: 2 of 3 engines do not report",
        )


@pytest.mark.parametrize(("interval_s", "period_s"), [(0.1, 0.1), (1, 0.25), (30, 7.5), (600, 60)])
def test_the_report_period_is_within_the_range_that_engines_accept(interval_s, period_s):
    wide = guards.GuardSettings(window_s=10_000.0)
    assert dataclasses.replace(SETTINGS, interval_s=interval_s, guards=wide).report_period_s == period_s


async def test_a_rejected_stream_is_logged_once_as_a_warning(caplog):
    caplog.set_level(logging.DEBUG, logger="tidegate_control.control_connections")
    engine = control_double.FakeEngine()
    await engine.start()
    engines = control_connections.EngineConnections(pace=control_connections.ReportPace(75.0, 75.0))
    try:
        await engines.retarget([engine.address])
        await until(lambda: len(caplog.records) >= 2)
    finally:
        await engines.close()
        await engine.stop()
    assert [record.levelname for record in caplog.records[:2]] == ["WARNING", "DEBUG"]
    assert "INVALID_ARGUMENT: period_s must be between" in caplog.text


async def test_an_engine_that_restarts_with_another_policy_is_set_again():
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        engines[0].policy = "fcfs"
        await decide(loop, engines, START_S + 2)
        assert engines[0].set_to == ["urgency", "urgency"]
        assert engines[1].set_to == ["urgency"]


async def test_an_engine_that_accepts_a_policy_and_goes_on_with_another_is_named_until_it_follows():
    async with steered() as (loop, engines):
        engines[0].policy, engines[0].disobeys = "fcfs", True
        for now in (1, 2, 3):
            await decide(loop, engines, START_S + now)
        why = "it accepted urgency and went on with fcfs"
        assert loop.not_following() == {engines[0].address: why}
        engines[0].disobeys = False
        await decide(loop, engines, START_S + 4)
        await decide(loop, engines, START_S + 5)
        assert loop.not_following() == {}


async def test_the_parameters_of_the_decided_policy_reach_every_engine_once():
    settings = dataclasses.replace(SETTINGS, parameters={"two-lane": {"threshold_s": 2.5}})
    async with steered(settings=settings) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        await decide(loop, engines, START_S + 100, control_double.blocked())
        await decide(loop, engines, START_S + 101)
        assert [engine.set_to for engine in engines] == [["urgency", "two-lane"]] * 2
        assert [engine.parameters_set_to for engine in engines] == [[{}, {"threshold_s": 2.5}]] * 2
        assert [engine.parameters for engine in engines] == [{"threshold_s": 2.5, "fast_share": 0.75}] * 2


async def test_an_engine_with_other_parameters_is_set_again():
    settings = dataclasses.replace(SETTINGS, parameters={"two-lane": {"threshold_s": 2.5}})
    async with steered(state=guards.SteerState(active="two-lane", since_at_s=START_S), settings=settings) as (
        loop,
        engines,
    ):
        await decide(loop, engines, START_S + 1)
        engines[0].parameters = {"threshold_s": 9.0, "fast_share": 0.75}
        await decide(loop, engines, START_S + 2, control_double.calm())
        assert [len(engine.set_to) for engine in engines] == [2, 1]
        assert engines[0].parameters["threshold_s"] == 2.5


async def test_a_changed_parameter_reaches_the_engines_and_a_removed_one_returns_to_its_default():
    def settings(**parameters):
        return dataclasses.replace(SETTINGS, parameters={"two-lane": parameters})

    state = guards.SteerState(active="two-lane", since_at_s=START_S)
    async with steered(state=state, settings=settings(threshold_s=2.5)) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        loop.settings = settings(threshold_s=3.0)
        await decide(loop, engines, START_S + 2, control_double.calm())
        assert [engine.parameters["threshold_s"] for engine in engines] == [3.0, 3.0]
        loop.settings = SETTINGS
        await decide(loop, engines, START_S + 3, control_double.calm())
        assert [engine.parameters["threshold_s"] for engine in engines] == [4.0, 4.0]


async def test_a_default_is_not_set_on_an_engine_that_does_not_report_the_parameter():
    async with steered(state=guards.SteerState(active="two-lane", since_at_s=START_S)) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        engines[0].parameters = {"fast_share": 0.75}  # an engine of an earlier version
        await decide(loop, engines, START_S + 2, control_double.calm())
        assert [engine.parameters_set_to for engine in engines] == [[{}], [{}]]


async def test_a_policy_that_only_the_gateways_know_is_tried_on_the_engines():
    async with steered() as (loop, engines):
        chosen = steering_loop.Override(policy="of-tomorrow", reason="set by hand")
        _, failed = await decide(loop, engines, START_S + 1, override=chosen)
        assert failed.keys() == {engine.address for engine in engines}
        assert "INVALID_ARGUMENT: unknown policy 'of-tomorrow'" in failed[engines[0].address]


async def test_a_proposal_that_one_engine_does_not_know_is_taken_back_everywhere_and_not_repeated():
    async with steered(3) as (loop, engines):
        engines[1].unknown = {"two-lane"}
        await decide(loop, engines, START_S + 1)
        _, failed = await decide(loop, engines, START_S + 100, control_double.blocked())
        assert [engine.policy for engine in engines] == ["two-lane", "urgency", "two-lane"]
        assert failed == {engines[1].address: "INVALID_ARGUMENT: unknown policy 'two-lane'"}
        assert loop.not_following() == failed
        outcome, failed = await decide(loop, engines, START_S + 101)
        assert (outcome.verdict.kind, outcome.verdict.policy) == (guards.Kind.ROLLBACK, "urgency")
        assert outcome.verdict.reason == (
            f"rollback: two-lane is not known everywhere: {engines[1].address} answers "
            "INVALID_ARGUMENT: unknown policy 'two-lane'"
        )
        assert [engine.policy for engine in engines] == ["urgency"] * 3
        assert (failed, loop.not_following()) == ({}, {})
        outcome, _ = await decide(loop, engines, START_S + 200, control_double.blocked())
        assert outcome.verdict.kind is guards.Kind.KEEP


async def test_an_engine_that_did_not_follow_the_earlier_policy_either_prevents_no_switch():
    async with steered(3) as (loop, engines):
        engines[1].unknown = {"two-lane", "urgency"}
        await decide(loop, engines, START_S + 1)
        await decide(loop, engines, START_S + 100, control_double.blocked())
        outcome, _ = await decide(loop, engines, START_S + 101)
        assert outcome.verdict.kind is guards.Kind.KEEP
        assert [engine.policy for engine in engines] == ["two-lane", "fcfs", "two-lane"]
        assert list(loop.not_following()) == [engines[1].address]


async def test_a_policy_that_a_person_set_stays_where_it_is_known():
    async with steered() as (loop, engines):
        engines[1].unknown = {"two-lane"}
        chosen = steering_loop.Override(policy="two-lane", reason="set by hand")
        await decide(loop, engines, START_S + 1)
        for second in (2, 3):
            outcome, _ = await decide(loop, engines, START_S + second, override=chosen)
        assert outcome.state.active == "two-lane"
        assert [engine.policy for engine in engines] == ["two-lane", "urgency"]
        assert list(loop.not_following()) == [engines[1].address]


async def test_an_engine_that_rejects_a_policy_is_reported_and_tried_again():
    async with steered() as (loop, engines):
        engines[0].rejects = True
        _, failed = await decide(loop, engines, START_S + 1)
        assert failed == {engines[0].address: "UNAVAILABLE: not now"}
        engines[0].rejects = False
        _, failed = await decide(loop, engines, START_S + 2)
        assert failed == {}
        assert engines[0].set_to == ["urgency"]


async def test_an_engine_with_unreadable_answers_is_reported_and_does_not_affect_the_others(caplog):
    caplog.set_level(logging.DEBUG, logger="tidegate_control.control_connections")
    async with steered() as (loop, engines):
        rubbish, healthy = engines
        await loop.engines.retarget([healthy.address])
        rubbish.babbles = True
        await loop.engines.retarget([engine.address for engine in engines])
        _, failed = await decide(loop, [healthy], START_S + 1)
        assert failed == {rubbish.address: "its answer cannot be read"}
        assert [engine.set_to for engine in engines] == [[], ["urgency"]]
        await until(lambda: loop.engines.silent() == {rubbish.address})
        said = [record for record in caplog.records if record.name == "tidegate_control.control_connections"]
        assert [record.levelname for record in said[:2]] == ["WARNING", "DEBUG"]
        assert said[0].message == f"engine {rubbish.address} does not report: its answer cannot be read"
        rubbish.babbles = False
        _, failed = await decide(loop, engines, START_S + 2)
        assert failed == {}
        assert [engine.set_to for engine in engines] == [["urgency"], ["urgency"]]


@pytest.mark.parametrize(
    "absurd",
    [
        pytest.param(control_pb2.QosReport(tenants=[control_pb2.TenantQos(weight=math.nan)]), id="nan"),
        pytest.param(control_pb2.QosReport(tenants=[control_pb2.TenantQos(weight=math.inf)]), id="weight"),
        pytest.param(control_pb2.QosReport(tenants=[control_pb2.TenantQos(tenant="t")]), id="weightless"),
        pytest.param(control_pb2.QosReport(service=control_pb2.Histogram(counts=[0] * 60 + [1])), id="buckets"),
    ],
)
async def test_a_report_with_impossible_numbers_is_ignored(absurd):
    async with steered() as (loop, engines):
        engines[0].report = absurd
        await loop.engines.retarget([engines[1].address])
        await loop.engines.retarget([engine.address for engine in engines])
        await until(lambda: loop.engines.silent() == {engines[0].address})
        outcome, failed = await decide(loop, engines[1:], START_S + 1)
        assert (outcome.verdict.policy, failed) == ("urgency", {})


async def test_a_defect_in_a_stream_is_logged_once_with_a_traceback_and_the_stream_opens_again(caplog):
    caplog.set_level(logging.DEBUG, logger="tidegate_control.control_connections")
    engines = control_connections.EngineConnections(pace=control_connections.ReportPace("soon", "soon"))
    try:
        await engines.retarget(["127.0.0.1:1"])
        await until(lambda: len(caplog.records) >= 2)
    finally:
        await engines.close()
    assert [record.levelname for record in caplog.records[:2]] == ["ERROR", "DEBUG"]
    assert caplog.records[0].exc_info[0] is TypeError


async def test_the_previous_policy_returns_after_an_override():
    before = guards.SteerState(
        active="edf", since_at_s=START_S - 500, strikes={"urgency": 1}, banned_until_at_s={"urgency": START_S + 99}
    )
    async with steered(state=before) as (loop, engines):
        await decide(loop, engines, START_S + 1)
        chosen = steering_loop.Override(policy="priority", reason="set by hand")
        outcome, _ = await decide(loop, engines, START_S + 2, override=chosen)
        assert (outcome.verdict.kind, outcome.verdict.reason) == (guards.Kind.OVERRIDE, "set by hand")
        assert engines[0].policy == "priority"
        outcome, _ = await decide(loop, engines, START_S + 3)
        assert outcome.verdict.policy == "edf"
        assert engines[0].policy == "edf"
        assert outcome.state.strikes == {"urgency": 1}
        assert outcome.state.banned_until_at_s == {"urgency": START_S + 99}


async def test_the_start_policy_follows_an_override_when_the_previous_policy_is_no_longer_allowed():
    before = guards.SteerState(active="edf", since_at_s=START_S - 500, strikes={"two-lane": 2}, returns=3)
    async with steered(state=before) as (loop, engines):
        await decide(
            loop, engines, START_S + 1, override=steering_loop.Override(policy="priority", reason="set by hand")
        )
        loop.settings = dataclasses.replace(SETTINGS, allow=("urgency", "fcfs"))
        outcome, _ = await decide(loop, engines, START_S + 2)
        assert (outcome.verdict.policy, outcome.verdict.reason) == ("urgency", "edf is not allowed")
        assert (outcome.state.strikes, outcome.state.returns) == ({"two-lane": 2}, 3)


async def test_a_successor_continues_from_the_persisted_state():
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        outcome, _ = await decide(loop, engines, START_S + 100, control_double.blocked())
        addresses = [engine.address for engine in engines]
        successor = steering_driver.SteeringDriver(outcome.state, SETTINGS, now=START_S + 105)
        try:
            await successor.engines.retarget(addresses)
            later, _ = await decide(successor, engines, START_S + 130, control_double.worse())
            assert later.verdict.kind is guards.Kind.ROLLBACK
        finally:
            await successor.engines.close()


@pytest.mark.parametrize("gone", [0, 1])
async def test_a_removed_engine_does_not_count_as_silent(gone):
    async with steered() as (loop, engines):
        await decide(loop, engines, START_S + 1)
        left = engines[1 - gone]
        await loop.engines.retarget([left.address])
        outcome, _ = await decide(loop, [left], START_S + 2)
        assert outcome.verdict.kind is guards.Kind.KEEP


async def test_the_answer_of_a_model_is_proposed_at_the_next_decision():
    settings = dataclasses.replace(SETTINGS, selector=llm_choice.LlmChoice())
    asked = []

    async def ask(messages, allow):
        asked.append((messages, allow))
        return llm_choice.Answer(policy="edf")

    async with steered(settings=settings) as (loop, engines):
        loop.ask = ask
        await decide(loop, engines, START_S + 1)
        assert not asked, "no call waits"
        await decide(loop, engines, START_S + 59.9, control_double.blocked())
        await until(lambda: asked)
        outcome, _ = await decide(loop, engines, START_S + 60.2, control_double.blocked())
        assert (outcome.verdict.policy, outcome.verdict.reason) == ("edf", "llm: the model chose it")
        assert asked[0][1] == settings.allow


async def test_a_model_that_hangs_delays_no_decision_and_the_rules_decide():
    settings = dataclasses.replace(SETTINGS, selector=llm_choice.LlmChoice())
    asked = []

    async def ask(messages, allow):
        asked.append(messages)
        await asyncio.Event().wait()

    async with steered(settings=settings) as (loop, engines):
        loop.ask = ask
        await decide(loop, engines, START_S + 1)
        await decide(loop, engines, START_S + 59.9, control_double.blocked())
        await until(lambda: asked)
        outcome, _ = await decide(loop, engines, START_S + 60.2, control_double.blocked())
        assert outcome.verdict.policy == "two-lane"
        assert outcome.verdict.reason.endswith(f"(by the rules, because {llm_choice.SILENT})")
        await loop.close()
