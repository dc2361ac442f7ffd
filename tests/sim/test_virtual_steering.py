"""Steering in virtual time does what the driver does over EngineControl: it sets bypasses, and heeds unknown policies."""

import types
from collections.abc import Mapping
from typing import Any, cast

from tidegate_policy import policies
from tidegate_policy.model import EngineId
from tidegate_policy.qos import Histogram, Qos
from tidegate_policy.steer import guards, steering_loop
from tidegate_sim import virtual_steering

TIMES = Histogram(counts=(0,) * 22 + (30,))
CALM = Qos(window_s=10.0, arrived=30, finished=30, with_target=30, ttft=TIMES, service=TIMES)
OVERLOAD = Qos(
    window_s=10.0, arrived=30, finished=30, waiting=200, with_target=30, missed=20, ttft=TIMES, service=TIMES
)
THRASHING = Qos(window_s=10.0, arrived=30, finished=30, waiting=50, preemptions=200, ttft=TIMES, service=TIMES)


class Engine:
    """An engine that reports what it is told to, and keeps what is set."""

    def __init__(self, unknown: frozenset[str] = frozenset()) -> None:
        self.window = CALM
        self.unknown = unknown
        self.set_to: list[tuple[str, bool]] = []

    def watch(self) -> Any:
        return types.SimpleNamespace(cut=lambda: types.SimpleNamespace(window=self.window))

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float], *, bypass: bool = False) -> None:
        if name in self.unknown:
            raise policies.UnknownPolicy(f"unknown policy {name!r}")
        self.set_to.append((name, bypass))


def steered(*engines: Engine) -> virtual_steering.VirtualSteering:
    settings = steering_loop.Settings(
        allow=("urgency", "edf", "sjf", "two-lane"), interval_s=30.0, guards=guards.GuardSettings()
    )
    named = {EngineId(str(number)): engine for number, engine in enumerate(engines)}
    core = types.SimpleNamespace(on_policy=lambda now, policy: None)
    return virtual_steering.VirtualSteering(cast("Any", core), cast("Any", named), settings, start="urgency")


def run(
    loop: virtual_steering.VirtualSteering, engines: tuple[Engine, ...], window: Qos, since: int, until: int
) -> None:
    for now in range(since, until, 10):
        for engine in engines:
            engine.window = window
        loop.observe(float(now))


def test_an_emergency_sets_the_bypass_and_its_end_lifts_it() -> None:
    engines = (Engine(), Engine())
    loop = steered(*engines)
    run(loop, engines, THRASHING, 10, 20)
    run(loop, engines, CALM, 20, 120)
    for engine in engines:
        assert engine.set_to == [("urgency", False), ("fcfs", True), ("urgency", False)]


def test_a_policy_that_one_engine_does_not_know_is_taken_back_everywhere() -> None:
    engines = (Engine(), Engine(frozenset({"sjf"})))
    loop = steered(*engines)
    run(loop, engines, OVERLOAD, 10, 50)
    assert [policy for _, policy, _ in loop.switches] == ["sjf", "urgency"]
    assert loop.switches[1][2] == "rollback: sjf is not known everywhere: 1 answers unknown policy 'sjf'"
    assert [engine.set_to[-1] for engine in engines] == [("urgency", False)] * 2
