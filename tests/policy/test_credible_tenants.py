"""One engine of several makes no pool look unfair, and a pool that is unfair is seen to be so."""

import dataclasses

import pytest

from tidegate_policy.qos import Histogram, Qos, TenantService
from tidegate_policy.steer import credible_tenants, guards, steering_loop

SETTINGS = steering_loop.Settings(
    allow=("wfq", "two-lane"), interval_s=30.0, guards=guards.GuardSettings(dwell_s=60.0, window_s=20.0)
)
CALM = Qos(
    window_s=10.0,
    arrived=30,
    finished=30,
    waiting=20,
    ttft=Histogram(counts=(0,) * 22 + (30,)),
    service=Histogram(counts=(0,) * 22 + (30,)),
)


def serving(tenants: dict[str, TenantService], **changes: object) -> Qos:
    return dataclasses.replace(CALM, tenants=tenants, **changes)  # type: ignore[arg-type]


def fair(names: int) -> Qos:
    return serving({f"t{n}": TenantService(served_tokens=100, waiting=2) for n in range(names)})


def decided(liar: Qos, honest: Qos, engines: int = 16) -> guards.Verdict:
    loop = steering_loop.SteeringLoop(guards.SteerState(active="fcfs", since_at_s=-100.0), SETTINGS, now=0.0)
    reports = {**{f"e{n}": [honest] for n in range(engines - 1)}, "liar": [liar]}
    for now in (10.0, 20.0):
        assert loop.observe(now, reports, silent=()).verdict.kind is guards.Kind.KEEP
    return loop.observe(30.0, reports, silent=()).verdict


LIES = {
    "all tokens of one tenant": serving({"t0": TenantService(served_tokens=10**12, waiting=2)}),
    "four times the tokens": serving({"t0": TenantService(served_tokens=4000, waiting=2)}),
    "tenants that wait for ever": serving({f"ghost{n}": TenantService(waiting=5) for n in range(100)}),
    "a heavy tenant": serving({"t0": TenantService(weight=1000.0, served_tokens=100, waiting=2)}),
    "a light tenant": serving({"t0": TenantService(weight=0.001, served_tokens=100, waiting=2)}),
}


@pytest.mark.parametrize("engines", [3, 4, 16])
@pytest.mark.parametrize("lie", LIES)
def test_what_one_engine_claims_about_tenants_makes_no_pool_unfair(lie: str, engines: int) -> None:
    for tenants in (2, 10, 50):
        verdict = decided(LIES[lie], fair(tenants), engines)
        assert verdict.kind is guards.Kind.KEEP, verdict.reason


@pytest.mark.parametrize("engines", [2, 3, 16])
def test_an_unfair_pool_is_seen_whatever_one_engine_claims(engines: int) -> None:
    unfair = serving(
        {"ant": TenantService(served_tokens=900, waiting=5), "bee": TenantService(served_tokens=100, waiting=5)}
    )
    assert decided(unfair, unfair, engines).policy == "wfq"
    if engines > 3:
        generous = serving({"bee": TenantService(served_tokens=10**9)})
        verdict = decided(generous, unfair, engines)
        assert verdict.policy == "wfq", "tokens that the other tenant did not get do not hide it"


def test_the_weight_of_a_tenant_is_the_one_in_the_middle() -> None:
    record = credible_tenants.TenantRecord()
    honest = [serving({"ant": TenantService(weight=5.0, served_tokens=10, waiting=1)})]
    liar = [serving({"ant": TenantService(weight=1000.0, served_tokens=10, waiting=1)})]
    record.add({"a": honest, "b": honest, "liar": liar}, {})
    assert record.together()["ant"].weight == 5.0


def test_works_that_one_engine_claims_cause_no_lanes() -> None:
    """The calls of the pool wait and are alike; one engine claims works of an hour beside short ones."""
    blocked = dataclasses.replace(CALM, blocked=15)
    for hours, short in ((1, 29), (15, 15), (120, 0)):
        spread = (0,) * 15 + (short,) + (0,) * 27 + (hours,)
        lie = dataclasses.replace(blocked, arrived=120, finished=120, service=Histogram(counts=spread))
        verdict = decided(lie, blocked)
        assert verdict.kind is guards.Kind.KEEP, verdict.reason
    mixed = Histogram(counts=(0,) * 15 + (25,) + (0,) * 15 + (5,))
    really = dataclasses.replace(blocked, service=mixed)
    assert decided(really, really).policy == "two-lane"


def test_calls_that_one_engine_claims_to_have_waited_cause_no_lanes() -> None:
    mixed = dataclasses.replace(CALM, service=Histogram(counts=(0,) * 15 + (25,) + (0,) * 15 + (5,)))
    lie = dataclasses.replace(mixed, arrived=140, finished=140, ttft=Histogram(counts=(0,) * 22 + (140,)), blocked=140)
    verdict = decided(lie, mixed)
    assert verdict.kind is guards.Kind.KEEP, verdict.reason
