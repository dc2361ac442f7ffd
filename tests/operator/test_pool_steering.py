"""Steering of a pool on the real API server: pods turn ready there, and each stands for an engine on loopback."""

import asyncio
import contextlib
import datetime
import json

import pytest

from tidegate_control import engine_double
from tidegate_operator import operator_doubles, pool_steering, reconcile, spec
from tidegate_policy.steer import guards, steering_loop
from tidegate_proto.v1 import control_pb2

START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
QUICK = {"interval": "1s", "dwell": "60s", "rollback": {"window": "20s"}}


class Clock:
    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += datetime.timedelta(seconds=seconds)


@contextlib.asynccontextmanager
async def a_pool_with_engines(cluster, kubectl, namespace, rules, **policy):
    """A pool whose two pods are ready; yields its two engines and a way to make a steering of it."""
    body = operator_doubles.pool(nodePools=[{"name": "fast"}, {"name": "slow"}], policy={**QUICK, **policy})
    kubectl("create", "-f", "-", body=body)
    await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
    kubectl("wait", "deployment", "--all", "--for=condition=Available", "--timeout=60s")
    engines = {"fast": engine_double.FakeEngine(), "slow": engine_double.FakeEngine()}
    for engine in engines.values():
        engine.report = engine_double.calm()
        await engine.start()
    made = []

    def steering(clock, admin=None, api=cluster):
        def locate(pod):
            ready = pool_steering.ready_address(pod)
            return ready and engines[pod["metadata"]["labels"]["tidegate.dev/node-pool"]].address

        told = admin or operator_doubles.FakeAdmin()
        made.append(
            pool_steering.PoolSteering(api, rules, reads=api, admin_of=lambda _pool: told, clock=clock, locate=locate)
        )
        return made[-1]

    try:
        yield engines, steering
    finally:
        for one in made:
            await one.close()
        for engine in engines.values():
            await engine.stop()


async def look(steering, namespace, clock, engines, seconds, report=None):
    """Time passes, engines report, and the pool is looked at. Between looks engines say nothing, however long it takes."""
    for engine in engines.values():
        engine.report, engine.mute = report or engine.report, False
    await asyncio.sleep(0.8)
    for engine in engines.values():
        engine.mute = True
    clock.advance(seconds)
    return await steering.steer((namespace, "chat"))


def watched(engines):
    """Names of the engines whose reports somebody takes."""
    return [name for name, engine in engines.items() if engine.periods]


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


def scale_to_nothing(kubectl, *names):
    for name in names:
        kubectl("scale", f"deployment/chat-engine-{name}", "--replicas=0")
        kubectl("wait", "pod", "-l", f"tidegate.dev/node-pool={name}", "--for=delete", "--timeout=60s")


def respecify(kubectl, **policy):
    body = operator_doubles.pool(nodePools=[{"name": "fast"}, {"name": "slow"}], policy={**QUICK, **policy})
    kubectl("replace", "-f", "-", body=body)


def status(kubectl):
    return json.loads(kubectl("get", "spool/chat", "-o", "json"))["status"]


def condition(kubectl, kind):
    (one,) = [item for item in status(kubectl)["conditions"] if item["type"] == kind]
    return one


async def test_a_switch_is_seen_on_the_engines_in_the_status_and_as_an_event(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        assert await look(steering, namespace, clock, engines, 0) == 1.0
        assert status(kubectl)["activePolicy"]["name"] == "urgency"
        await look(steering, namespace, clock, engines, 100)
        assert condition(kubectl, "PolicyStable")["status"] == "True"
        await look(steering, namespace, clock, engines, 1, engine_double.blocked())
        assert [engine.set_to for engine in engines.values()] == [["urgency", "two-lane"]] * 2
        found = status(kubectl)
        assert found["activePolicy"]["name"] == "two-lane"
        assert found["activePolicy"]["since"] == "2026-01-02T03:05:46.000000Z"
        assert "waited longer than twice" in found["activePolicy"]["reason"]
        assert condition(kubectl, "PolicyStable")["reason"] == "Switched"
        assert condition(kubectl, "Progressing")["status"] in ("True", "False")  # the other writer's part stays
        assert 0 < found["sloAttainment"] < 1
        assert {item["name"]: item["desired"] for item in found["nodePools"]} == {"fast": 1, "slow": 1}
        assert "PolicySwitched" in kubectl("events", "--for", "servingpool/chat")


async def test_a_rollback_is_a_warning(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await look(steering, namespace, clock, engines, 0)
        await look(steering, namespace, clock, engines, 100)
        await look(steering, namespace, clock, engines, 1, engine_double.blocked())
        await look(steering, namespace, clock, engines, 5, engine_double.worse())
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]
        assert "Warning" in kubectl("events", "--for", "servingpool/chat")
        assert "PolicyRolledBack" in kubectl("events", "--for", "servingpool/chat")


async def test_an_operator_that_takes_over_carries_on(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        first = make(clock)
        await look(first, namespace, clock, engines, 0)
        await look(first, namespace, clock, engines, 100)
        await look(first, namespace, clock, engines, 1, engine_double.blocked())
        await first.close()
        second = make(clock)
        await look(second, namespace, clock, engines, 1)
        await look(second, namespace, clock, engines, 5, engine_double.worse())
        assert status(kubectl)["activePolicy"]["name"] == "urgency"  # it knew what the switch had to be compared with


async def test_a_decision_that_was_written_down_is_put_in_force_by_the_next_operator(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        first = make(clock)
        await look(first, namespace, clock, engines, 0)
        for engine in engines.values():
            engine.rejects = True  # as if the operator had died just before it told them
        await look(first, namespace, clock, engines, 100)
        await look(first, namespace, clock, engines, 1, engine_double.blocked())
        assert status(kubectl)["activePolicy"]["name"] == "two-lane"
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]
        await first.close()
        for engine in engines.values():
            engine.rejects = False
        await look(make(clock), namespace, clock, engines, 1)
        assert [engine.policy for engine in engines.values()] == ["two-lane", "two-lane"]


async def test_dying_while_it_is_written_down_tells_no_engine_what_the_status_does_not_know(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        for after in range(2):
            mortal = make(clock, api=operator_doubles.MortalCluster(cluster, after=after))
            with pytest.raises(operator_doubles.Died):  # noqa: PT012  # which look writes what is not the point
                await look(mortal, namespace, clock, engines, 0)
                await look(mortal, namespace, clock, engines, 100)
                await look(mortal, namespace, clock, engines, 1, engine_double.blocked())
            await mortal.close()
            assert {engine.policy for engine in engines.values()} <= {"fcfs", "urgency"}
            for engine in engines.values():
                engine.report = engine_double.calm()


async def test_a_fixed_policy_is_kept_whatever_happens(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules, mode="fixed", name="edf") as (engines, make):
        clock = Clock()
        steering = make(clock)
        await look(steering, namespace, clock, engines, 0)
        await look(steering, namespace, clock, engines, 100, engine_double.blocked())
        assert [engine.set_to for engine in engines.values()] == [["edf"], ["edf"]]
        assert status(kubectl)["activePolicy"]["reason"] == "spec.policy.name"


async def test_a_manual_override_is_shown(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        admin.by_hand = steering_loop.Override(policy="priority", reason="set by hand")
        await look(make(clock, admin), namespace, clock, engines, 0)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("priority", True, "set by hand")
        assert [engine.policy for engine in engines.values()] == ["priority", "priority"]


async def test_an_override_outlives_the_operator_while_no_gateway_answers_and_ends_in_time(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        first = make(clock, admin)
        await look(first, namespace, clock, engines, 0)
        admin.by_hand = steering_loop.Override(policy="priority", reason="by me", ends_at_s=START.timestamp() + 600)
        await look(first, namespace, clock, engines, 1)
        await first.close()
        second = make(clock, operator_doubles.FakeAdmin(has_answered=False))
        await look(second, namespace, clock, engines, 1)
        await look(second, namespace, clock, engines, 500)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("priority", True, "by me")
        await look(second, namespace, clock, engines, 100)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("urgency", False, "the override has ended")
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]


@pytest.mark.parametrize("heard", [True, False])
async def test_a_policy_that_the_spec_fixes_no_more_ends_whether_or_not_a_gateway_answers(
    cluster, kubectl, namespace, rules, heard
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules, mode="fixed", name="edf") as (engines, make):
        clock = Clock()
        await look(make(clock), namespace, clock, engines, 0)
        body = operator_doubles.pool(nodePools=[{"name": "fast"}, {"name": "slow"}], policy=QUICK)
        kubectl("replace", "-f", "-", body=body)
        await look(make(clock, operator_doubles.FakeAdmin(has_answered=heard)), namespace, clock, engines, 1)
        assert status(kubectl)["activePolicy"]["name"] == "urgency"


async def test_the_gateways_are_told_what_the_engines_were_told(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        steered = make(clock, admin)
        await look(steered, namespace, clock, engines, 0)
        await look(steered, namespace, clock, engines, 100)
        assert admin.told == ["urgency"]
        await look(steered, namespace, clock, engines, 1, engine_double.blocked())
        assert admin.told == ["urgency", "two-lane"]
        assert status(kubectl)["alpha"] == 0.2


async def test_a_pool_without_ready_engines_waits(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "none", "replicas": 0}]))

    steering = pool_steering.PoolSteering(
        cluster, rules, reads=cluster, admin_of=lambda _pool: operator_doubles.FakeAdmin(), clock=Clock()
    )
    assert await steering.steer((namespace, "chat")) == pool_steering.WAIT_S
    kubectl("delete", "spool/chat")
    assert await steering.steer((namespace, "chat")) is None


async def test_addresses_that_no_engine_has_any_more_are_left(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await look(steering, namespace, clock, engines, 0)
        assert watched(engines) == ["fast", "slow"]
        scale_to_nothing(kubectl, "fast", "slow")
        assert await look(steering, namespace, clock, engines, 1) == pool_steering.WAIT_S
        await until(lambda: watched(engines) == [])


async def test_while_the_spec_is_invalid_the_engines_that_still_run_are_watched_and_keep_their_policy(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await look(steering, namespace, clock, engines, 0)
        respecify(kubectl, mode="fixed", name="unheard-of")
        scale_to_nothing(kubectl, "fast")
        for _ in range(2):
            assert await look(steering, namespace, clock, engines, 100, engine_double.blocked()) == pool_steering.WAIT_S
        assert watched(engines) == ["slow"]
        assert [engine.set_to for engine in engines.values()] == [["urgency"], ["urgency"]]
        respecify(kubectl, mode="fixed", name="edf")
        assert await look(steering, namespace, clock, engines, 1) == 1.0
        assert [engine.set_to for engine in engines.values()] == [["urgency"], ["urgency", "edf"]]


@pytest.mark.parametrize("measured", [[], ["fast"], ["fast", "slow"]])
async def test_a_status_that_says_so_already_is_not_written_again(cluster, kubectl, namespace, rules, measured):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, api = Clock(), operator_doubles.MortalCluster(cluster, after=100)
        for name, engine in engines.items():
            engine.report = engine_double.calm() if name in measured else control_pb2.QosReport()
        steering = make(clock, api=api)
        await look(steering, namespace, clock, engines, 0)
        await look(steering, namespace, clock, engines, 100)
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        assert [item["name"] for item in status(kubectl)["nodePools"] if "sloAttainment" in item] == measured
        written = api.writes
        await look(steering, namespace, clock, engines, 1)
        await reconcile.reconcile(api, namespace, "chat", rules=rules, now=START)
        assert api.writes == written


async def test_a_share_that_nobody_measures_any_more_goes(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        await look(steering, namespace, clock, engines, 0)
        await look(steering, namespace, clock, engines, 100)
        assert status(kubectl)["sloAttainment"] == 1
        await look(steering, namespace, clock, engines, 1, control_pb2.QosReport())
        await look(steering, namespace, clock, engines, 1)
        found = status(kubectl)
        assert "sloAttainment" not in found
        assert found["nodePools"] == [{"name": name, "desired": 1, "ready": 1} for name in ("fast", "slow")]


async def test_an_override_that_is_to_have_no_end_is_remembered_without_one(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        admin.by_hand = steering_loop.Override(policy="priority", reason="by me", ends_at_s=START.timestamp() + 600)
        steered = make(clock, admin)
        await look(steered, namespace, clock, engines, 0)
        await look(steered, namespace, clock, engines, 100)
        assert status(kubectl)["steering"]["ends_at_s"] == START.timestamp() + 600
        admin.by_hand = steering_loop.Override(policy="priority", reason="by me")
        await look(steered, namespace, clock, engines, 1)
        assert "ends_at_s" not in status(kubectl)["steering"]


@pytest.mark.parametrize(("age_s", "stable"), [(60, "False"), (119, "False"), (120, "True")])
async def test_a_policy_whose_dwell_was_doubled_is_stable_after_that(cluster, kubectl, namespace, rules, age_s, stable):
    kubectl("create", "-f", "-", body=operator_doubles.pool(policy=QUICK))
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    state = guards.SteerState(active="edf", since_at_s=START.timestamp(), kind=guards.Kind.SWITCH, returns=1)
    kept = guards.Verdict(kind=guards.Kind.KEEP, policy="edf", reason="start")
    outcome = steering_loop.Outcome(state=state, verdict=kept, window=None)
    now = START + datetime.timedelta(seconds=age_s)
    stated = pool_steering.of_steering({}, pool, outcome, None, {}, now)
    assert [(item["type"], item["status"]) for item in stated["conditions"]] == [("PolicyStable", stable)]


async def test_a_pool_that_is_made_again_under_its_name_starts_afresh(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steered = make(clock)
        await look(steered, namespace, clock, engines, 0)
        await look(steered, namespace, clock, engines, 100)
        await look(steered, namespace, clock, engines, 1, engine_double.blocked())
        assert status(kubectl)["activePolicy"]["name"] == "two-lane"
        kubectl("delete", "spool/chat")
        body = operator_doubles.pool(nodePools=[{"name": "fast"}, {"name": "slow"}], policy=QUICK)
        kubectl("create", "-f", "-", body=body)
        gone = [f"deployment/chat-{name}" for name in ("engine-fast", "engine-slow", "gateway")]
        kubectl("wait", "--for=delete", *gone, "--timeout=60s")
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        kubectl("wait", "deployment", "--all", "--for=condition=Available", "--timeout=60s")
        await look(steered, namespace, clock, engines, 1, engine_double.calm())
        assert status(kubectl)["activePolicy"]["name"] == "urgency"
