"""Steering of a pool on the real API server: pods turn ready there, and each stands for an engine on loopback."""

import asyncio
import contextlib
import datetime
import json

import pytest

import control_double
import operator_doubles
from tidegate_operator import error_budget, pool_secret, pool_steering, reconcile, spec, steering_status
from tidegate_policy.steer import guards, steering_loop
from tidegate_proto.v1 import control_pb2

START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
TOKEN = "a-token-of-the-pool"
NODE_POOLS = [{"name": "fast"}, {"name": "slow"}]
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
    """A pool whose two pods are ready; yields its two engines and a function that creates its steering."""
    body = operator_doubles.pool(nodePools=NODE_POOLS, policy={**QUICK, **policy})
    kubectl("create", "-f", "-", body=body)
    await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
    kubectl("wait", "deployment", "--all", "--for=condition=Available", "--timeout=120s")
    engines = {"fast": control_double.FakeEngine(), "slow": control_double.FakeEngine()}
    for engine in engines.values():
        engine.report = control_double.calm()
        await engine.start()
    made = []

    def steering(clock, admin=None, api=cluster):
        def locate(pod):
            ready = pool_steering.ready_address(pod)
            return ready and engines[pod["metadata"]["labels"]["tidegate.dev/node-pool"]].address

        gateways = admin or operator_doubles.FakeAdmin()
        made.append(
            pool_steering.PoolSteering(api, rules, reads=api, admin_of=lambda *_: gateways, clock=clock, locate=locate)
        )
        return made[-1]

    try:
        yield engines, steering
    finally:
        for one in made:
            await one.close()
        for engine in engines.values():
            await engine.stop()


async def observe(steering, namespace, clock, engines, seconds, report=None):
    """One observation after `seconds`, with a report from every engine that the pool's driver is connected to. Between
    observations the engines do not report."""
    steered = steering._known.get((namespace, "chat"))
    connections = steered and steered.driver.engines
    connected = connections.take_reports().keys() if connections else ()
    for engine in engines.values():
        engine.report, engine.mute = report or engine.report, False
    if connections:
        await until(lambda: connections.reported() == connected)
    for engine in engines.values():
        engine.mute = True
    clock.advance(seconds)
    return await steering.steer((namespace, "chat"))


def watched(engines):
    """Names of the engines with an open stream of reports."""
    return [name for name, engine in engines.items() if engine.periods]


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


def scale_to_nothing(kubectl, *names):
    for name in names:
        kubectl("scale", f"deployment/chat-engine-{name}", "--replicas=0")
        kubectl("wait", "pod", "-l", f"tidegate.dev/node-pool={name}", "--for=delete", "--timeout=120s")


def respecify(kubectl, **policy):
    kubectl("replace", "-f", "-", body=operator_doubles.pool(nodePools=NODE_POOLS, policy={**QUICK, **policy}))


def status(kubectl):
    return json.loads(kubectl("get", "spool/chat", "-o", "json"))["status"]


def condition(kubectl, kind):
    (one,) = [item for item in status(kubectl)["conditions"] if item["type"] == kind]
    return one


async def test_a_switch_reaches_the_engines_the_status_and_the_events(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        assert await observe(steering, namespace, clock, engines, 0) == 1.0
        assert status(kubectl)["activePolicy"]["name"] == "urgency"
        await observe(steering, namespace, clock, engines, 100)
        assert condition(kubectl, "PolicyStable")["status"] == "True"
        await observe(steering, namespace, clock, engines, 1, control_double.blocked())
        assert [engine.set_to for engine in engines.values()] == [["urgency", "two-lane"]] * 2
        found = status(kubectl)
        assert found["activePolicy"]["name"] == "two-lane"
        assert found["activePolicy"]["since"] == "2026-01-02T03:05:46.000000Z"
        assert "waited longer than twice" in found["activePolicy"]["reason"]
        assert condition(kubectl, "PolicyStable")["reason"] == "Switched"
        assert condition(kubectl, "Progressing")["status"] in ("True", "False")  # the other writer's part stays
        assert 0 < float(found["sloAttainment"]) < 1
        assert {item["name"]: item["desired"] for item in found["nodePools"]} == {"fast": 1, "slow": 1}
        assert "PolicySwitched" in kubectl("events", "--for", "servingpool/chat")


async def test_the_status_shows_the_error_budget_that_is_left_of_each_class(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        classes = [{"name": "chat", "ttft": "1s", "objective": "97.5"}, {"name": "batch", "deadline": "10m"}]
        kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"classes": classes}}))
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        steering = make(clock, admin)
        admin.counted = {"chat": error_budget.Counts(90, 100), "none": error_budget.Counts(0, 5)}
        await observe(steering, namespace, clock, engines, 0)
        await observe(steering, namespace, clock, engines, 1)
        assert "classes" not in status(kubectl) or status(kubectl)["classes"] == []
        admin.counted = {"chat": error_budget.Counts(189, 200)}
        await observe(steering, namespace, clock, engines, 1)
        shown = {"objective": "97.5", "window": "1h", "sloAttainment": "0.99", "errorBudgetLeft": "0.6"}
        assert status(kubectl)["classes"] == [{"name": "chat", **shown}]
        await observe(make(clock, admin), namespace, clock, engines, 0)  # another operator has not measured yet
        assert status(kubectl)["classes"] == [{"name": "chat", **shown}]


async def test_a_rollback_is_a_warning_event(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        await observe(steering, namespace, clock, engines, 100)
        await observe(steering, namespace, clock, engines, 1, control_double.blocked())
        await observe(steering, namespace, clock, engines, 30, control_double.worse())
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]
        assert "Warning" in kubectl("events", "--for", "servingpool/chat")
        assert "PolicyRolledBack" in kubectl("events", "--for", "servingpool/chat")


async def test_a_successor_continues_with_the_memory_in_the_status(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        first = make(clock)
        await observe(first, namespace, clock, engines, 0)
        await observe(first, namespace, clock, engines, 100)
        await observe(first, namespace, clock, engines, 1, control_double.blocked())
        await first.close()
        second = make(clock)
        await observe(second, namespace, clock, engines, 1)
        await observe(second, namespace, clock, engines, 30, control_double.worse())
        assert status(kubectl)["activePolicy"]["name"] == "urgency"  # it knew what the switch had to be compared with


async def test_a_persisted_decision_is_put_in_force_by_the_next_operator(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        first = make(clock)
        await observe(first, namespace, clock, engines, 0)
        for engine in engines.values():
            engine.rejects = True  # as if the operator died just before it set the policy
        await observe(first, namespace, clock, engines, 100)
        await observe(first, namespace, clock, engines, 1, control_double.blocked())
        assert status(kubectl)["activePolicy"]["name"] == "two-lane"
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]
        await first.close()
        for engine in engines.values():
            engine.rejects = False
        await observe(make(clock), namespace, clock, engines, 1)
        assert [engine.policy for engine in engines.values()] == ["two-lane", "two-lane"]


async def test_no_engine_gets_a_policy_that_the_status_does_not_name_when_the_operator_dies(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        for after in range(2):
            mortal = make(clock, api=operator_doubles.MortalCluster(cluster, after=after))
            with pytest.raises(operator_doubles.Died):  # noqa: PT012  # which look writes what is not the point
                await observe(mortal, namespace, clock, engines, 0)
                await observe(mortal, namespace, clock, engines, 100)
                await observe(mortal, namespace, clock, engines, 1, control_double.blocked())
            await mortal.close()
            assert {engine.policy for engine in engines.values()} <= {"fcfs", "urgency"}
            for engine in engines.values():
                engine.report = control_double.calm()


async def test_a_fixed_policy_is_kept_whatever_happens(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules, mode="fixed", name="edf") as (engines, make):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        await observe(steering, namespace, clock, engines, 100, control_double.blocked())
        assert [engine.set_to for engine in engines.values()] == [["edf"], ["edf"]]
        assert status(kubectl)["activePolicy"]["reason"] == "spec.policy.name"


async def test_the_status_shows_a_manual_override(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        admin.manual = steering_loop.Override(policy="priority", reason="set by hand")
        await observe(make(clock, admin), namespace, clock, engines, 0)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("priority", True, "set by hand")
        assert [engine.policy for engine in engines.values()] == ["priority", "priority"]


async def test_an_override_outlives_the_operator_while_no_gateway_answers_and_ends_at_its_end(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        first = make(clock, admin)
        await observe(first, namespace, clock, engines, 0)
        admin.manual = steering_loop.Override(policy="priority", reason="by me", ends_at_s=START.timestamp() + 600)
        await observe(first, namespace, clock, engines, 1)
        await first.close()
        second = make(clock, operator_doubles.FakeAdmin(has_answered=False))
        await observe(second, namespace, clock, engines, 1)
        await observe(second, namespace, clock, engines, 500)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("priority", True, "by me")
        await observe(second, namespace, clock, engines, 100)
        active = status(kubectl)["activePolicy"]
        assert (active["name"], active["override"], active["reason"]) == ("urgency", False, "the override has ended")
        assert [engine.policy for engine in engines.values()] == ["urgency", "urgency"]


async def test_the_parameters_in_the_spec_reach_the_engines_and_a_removed_one_returns_to_its_default(
    cluster, kubectl, namespace, rules
):
    parameters = [{"policy": "two-lane", "name": "threshold_s", "value": "2.5"}]
    fixed = {"mode": "fixed", "name": "two-lane"}
    async with a_pool_with_engines(cluster, kubectl, namespace, rules, **fixed, parameters=parameters) as (
        engines,
        make,
    ):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        assert [engine.parameters for engine in engines.values()] == [{"threshold_s": 2.5, "fast_share": 0.75}] * 2
        respecify(kubectl, **fixed)
        await observe(steering, namespace, clock, engines, 1)
        assert [engine.parameters for engine in engines.values()] == [{"threshold_s": 4.0, "fast_share": 0.75}] * 2


@pytest.mark.parametrize("heard", [True, False])
async def test_a_policy_that_the_spec_no_longer_fixes_ends_whether_or_not_a_gateway_answers(
    cluster, kubectl, namespace, rules, heard
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules, mode="fixed", name="edf") as (engines, make):
        clock = Clock()
        await observe(make(clock), namespace, clock, engines, 0)
        respecify(kubectl)
        await observe(make(clock, operator_doubles.FakeAdmin(has_answered=heard)), namespace, clock, engines, 1)
        assert status(kubectl)["activePolicy"]["name"] == "urgency"


async def test_the_gateways_receive_the_policy_of_the_engines(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        steered = make(clock, admin)
        await observe(steered, namespace, clock, engines, 0)
        await observe(steered, namespace, clock, engines, 100)
        assert admin.received == ["urgency"]
        await observe(steered, namespace, clock, engines, 1, control_double.blocked())
        assert admin.received == ["urgency", "two-lane"]
        assert status(kubectl)["alpha"] == "0.2"


async def test_a_pool_without_ready_engines_waits(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "none", "replicas": 0}]))
    await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
    steering = pool_steering.PoolSteering(
        cluster, rules, reads=cluster, admin_of=lambda *_: operator_doubles.FakeAdmin(), clock=Clock()
    )
    assert await steering.steer((namespace, "chat")) == pool_steering.WAIT_S
    stable = condition(kubectl, "PolicyStable")
    assert (stable["status"], stable["reason"]) == ("False", "NoEngines")
    kubectl("delete", "spool/chat")
    assert await steering.steer((namespace, "chat")) is None


async def test_the_operator_disconnects_from_addresses_of_deleted_engines(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        assert watched(engines) == ["fast", "slow"]
        scale_to_nothing(kubectl, "fast", "slow")
        assert await observe(steering, namespace, clock, engines, 1) == pool_steering.WAIT_S
        await until(lambda: watched(engines) == [])


async def test_while_the_spec_is_invalid_the_engines_that_still_run_are_watched_and_keep_their_policy(
    cluster, kubectl, namespace, rules
):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        respecify(kubectl, mode="fixed", name="wfq")  # a policy of the schema that this operator does not know
        scale_to_nothing(kubectl, "fast")
        for _ in range(2):
            assert (
                await observe(steering, namespace, clock, engines, 100, control_double.blocked())
                == pool_steering.WAIT_S
            )
        assert watched(engines) == ["slow"]
        assert [engine.set_to for engine in engines.values()] == [["urgency"], ["urgency"]]
        respecify(kubectl, mode="fixed", name="edf")
        assert await observe(steering, namespace, clock, engines, 1) == 1.0
        assert [engine.set_to for engine in engines.values()] == [["urgency"], ["urgency", "edf"]]


@pytest.mark.parametrize("measured", [[], ["fast"], ["fast", "slow"]])
async def test_an_unchanged_status_is_not_written_again(cluster, kubectl, namespace, rules, measured):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, api = Clock(), operator_doubles.MortalCluster(cluster, after=100)
        for name, engine in engines.items():
            engine.report = control_double.calm() if name in measured else control_pb2.QosReport()
        steering = make(clock, api=api)
        await observe(steering, namespace, clock, engines, 0)
        await observe(steering, namespace, clock, engines, 100)
        for _ in range(2):  # the first records that the engines served
            await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
            kubectl("rollout", "status", "deployment/chat-engine-fast", "--timeout=120s")
            kubectl("rollout", "status", "deployment/chat-engine-slow", "--timeout=120s")
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        assert [item["name"] for item in status(kubectl)["nodePools"] if "sloAttainment" in item] == measured
        written = api.writes
        await observe(steering, namespace, clock, engines, 1)
        await reconcile.reconcile(api, namespace, "chat", rules=rules, now=START)
        assert api.writes == written


async def test_an_attainment_without_a_new_measurement_is_removed(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        await observe(steering, namespace, clock, engines, 0)
        await observe(steering, namespace, clock, engines, 100)
        assert status(kubectl)["sloAttainment"] == "1"
        await observe(steering, namespace, clock, engines, 1, control_pb2.QosReport())
        await observe(steering, namespace, clock, engines, 1)
        found = status(kubectl)
        assert "sloAttainment" not in found
        assert found["nodePools"] == [{"name": name, "desired": 1, "ready": 1} for name in ("fast", "slow")]


async def test_an_override_that_loses_its_end_is_stored_without_one(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        admin.manual = steering_loop.Override(policy="priority", reason="by me", ends_at_s=START.timestamp() + 600)
        steered = make(clock, admin)
        await observe(steered, namespace, clock, engines, 0)
        await observe(steered, namespace, clock, engines, 100)
        assert status(kubectl)["steering"]["ends_at_s"] == START.timestamp() + 600
        admin.manual = steering_loop.Override(policy="priority", reason="by me")
        await observe(steered, namespace, clock, engines, 1)
        assert "ends_at_s" not in status(kubectl)["steering"]


@pytest.mark.parametrize(("age_s", "stable"), [(60, "False"), (119, "False"), (120, "True")])
async def test_a_policy_with_a_doubled_dwell_is_stable_after_the_doubled_dwell(
    cluster, kubectl, namespace, rules, age_s, stable
):
    kubectl("create", "-f", "-", body=operator_doubles.pool(policy=QUICK))
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    state = guards.SteerState(active="edf", since_at_s=START.timestamp(), kind=guards.Kind.SWITCH, returns=1)
    kept = guards.Verdict(kind=guards.Kind.KEEP, policy="edf", reason="start")
    outcome = steering_loop.Outcome(state=state, verdict=kept, window=None)
    now, settings = START + datetime.timedelta(seconds=age_s), pool_steering.settings_of(pool.steering).guards
    stated = steering_status.of_steering({}, pool, outcome, settings, None, {}, now)
    found = {item["type"]: item["status"] for item in stated["conditions"]}
    assert found == {"PolicyStable": stable, "ReportsCredible": "True", "StoreReachable": "Unknown"}


async def test_a_pool_that_is_created_again_under_its_name_has_no_memory(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steered = make(clock)
        await observe(steered, namespace, clock, engines, 0)
        await observe(steered, namespace, clock, engines, 100)
        await observe(steered, namespace, clock, engines, 1, control_double.blocked())
        assert status(kubectl)["activePolicy"]["name"] == "two-lane"
        kubectl("delete", "spool/chat")
        kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=NODE_POOLS, policy=QUICK))
        kubectl("wait", "--for=delete", "deployments,replicasets,pods", "--all", "--timeout=120s")
        await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=START)
        kubectl("wait", "deployment", "--all", "--for=condition=Available", "--timeout=120s")
        await observe(steered, namespace, clock, engines, 1, control_double.calm())
        assert status(kubectl)["activePolicy"]["name"] == "urgency"


async def test_a_pool_whose_engines_are_all_silent_does_not_claim_a_policy(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steered = make(clock)
        await observe(steered, namespace, clock, engines, 0)
        for engine in engines.values():
            await engine.stop()
        driver = steered._known[namespace, "chat"].driver
        await until(lambda: len(driver.engines.silent()) == 2)
        await steered.steer((namespace, "chat"))
        stable = condition(kubectl, "PolicyStable")
        assert (stable["status"], stable["reason"]) == ("False", "EnginesSilent")
        assert "None of the 2 ready engines reports" in stable["message"]


async def test_the_status_names_the_engines_and_gateways_that_do_not_follow(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock, admin = Clock(), operator_doubles.FakeAdmin()
        engines["slow"].unknown, admin.others_have = {"urgency"}, {"10.0.0.9:8001": "sjf"}
        steering = make(clock, admin)
        for seconds in (0, 1):
            await observe(steering, namespace, clock, engines, seconds)
        engine = f"engine {engines['slow'].address}: INVALID_ARGUMENT: unknown policy 'urgency'"
        message = f"Not all parts serve by urgency: {engine}; gateway 10.0.0.9:8001 has sjf."
        found = condition(kubectl, "PolicyStable")
        assert [found[key] for key in ("status", "reason", "message")] == ["False", "NotFollowed", message]


async def test_engines_get_the_token_of_the_pool(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        token = await pool_secret.token(cluster, spec.parse(await cluster.pool(namespace, "chat"), rules.known))
        for engine in engines.values():
            engine.token = token
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        await until(lambda: len(watched(engines)) == 2)
        assert [engine.set_to for engine in engines.values()] == [["urgency"]] * 2


async def test_engines_that_reject_the_token_are_named_and_the_secret_is_read_again(cluster, kubectl, namespace, rules):
    async with a_pool_with_engines(cluster, kubectl, namespace, rules) as (engines, make):
        clock = Clock()
        steering = make(clock)
        await observe(steering, namespace, clock, engines, 0)
        await engines["fast"].stop()
        engines["fast"].token = TOKEN
        await engines["fast"].start()
        connections = steering._known[namespace, "chat"].driver.engines
        await until(connections.rejections)
        clock.advance(1)
        await steering.steer((namespace, "chat"))
        found = condition(kubectl, "PolicyStable")
        assert (found["status"], found["reason"]) == ("False", "TokenRejected")
        assert found["message"] == (
            f"1 engine rejects the token in the Secret chat-credentials, for example {engines['fast'].address}: "
            "UNAUTHENTICATED: the token of the call is not the token of this pool. Such an engine serves by the policy "
            "that it has, and reads its token when it starts."
        )
        kubectl("delete", "secret/chat-credentials")  # a person puts the right one in its place
        kubectl("create", "secret", "generic", "chat-credentials", f"--from-literal=token={TOKEN}")
        clock.advance(pool_steering.pool_driver.TOKEN_S)
        for engine in engines.values():
            engine.mute = False
        await steering.steer((namespace, "chat"))
        await until(lambda: len(watched(engines)) == 2)
        await until(lambda: len(steering._known[namespace, "chat"].driver.engines.reported()) == 2)
        clock.advance(100)
        await steering.steer((namespace, "chat"))
        assert condition(kubectl, "PolicyStable")["reason"] == "Settled"
