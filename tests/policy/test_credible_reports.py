"""One engine whose numbers are wrong does not steer a pool, and is named."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_policy import policies, qos
from tidegate_policy.steer import credible_reports, emergency, guards, rules, steering_loop


def report(calls: int = 100, **changes: object) -> qos.Qos:
    tally = qos.Tally()
    for _ in range(min(calls, 1000)):
        tally.add(0.1)
    honest = qos.Qos(
        arrived=calls, finished=calls, waiting=5, with_target=calls, ttft=tally.freeze(), service=tally.freeze()
    )
    return dataclasses.replace(honest, **changes)  # type: ignore[arg-type]


def pool(liar: qos.Qos) -> dict[str, qos.Qos]:
    return {**{f"e{number}": report() for number in range(15)}, "liar": liar}


def loop() -> steering_loop.SteeringLoop:
    settings = steering_loop.Settings(
        allow=tuple(policies.POLICIES), interval_s=10.0, guards=guards.GuardSettings(dwell_s=1)
    )
    return steering_loop.SteeringLoop(None, settings, now=0.0)


def observed_all(reports: dict[str, qos.Qos]) -> steering_loop.Outcome:
    return loop().observe(100.0, {name: [each] for name, each in reports.items()}, silent=())


def observed(liar: qos.Qos) -> steering_loop.Outcome:
    return observed_all(pool(liar))


def test_a_million_preemptions_of_one_engine_of_sixteen_cause_no_bypass_and_name_it() -> None:
    outcome = observed(report(preemptions=10**9))
    assert outcome.verdict.kind is guards.Kind.KEEP
    assert outcome.outliers == {"liar": "it reports 1000000000 preemptions for 100 finished calls"}


def test_preemptions_of_all_engines_still_cause_a_bypass() -> None:
    reports = {f"e{number}": report(preemptions=700) for number in range(16)}
    together = qos.across(credible_reports.believed(reports).reports.values())
    proposed = emergency.found(together, reports.values())
    assert proposed is not None
    assert proposed.emergency


@pytest.mark.parametrize("engines", [2, 3, 8, 16, 32])
@pytest.mark.parametrize("calls", [20, 36, 100])
def test_no_single_engine_of_several_causes_a_bypass(engines: int, calls: int) -> None:
    honest = {f"e{number}": report(calls) for number in range(engines - 1)}
    for lie in (
        report(0, arrived=10**9, preemptions=10**10),
        report(10**9, preemptions=10**10),
        report(calls, waiting=260, preemptions=2200),
        report(calls, preemptions=7 * calls),
    ):
        outcome = observed_all({**honest, "liar": lie})
        assert outcome.verdict.kind is not guards.Kind.BYPASS
        assert list(outcome.outliers) in ([], ["liar"])
        if lie.preemptions > 16 * lie.finished:
            assert list(outcome.outliers) == ["liar"]


def test_the_window_of_one_engine_with_a_wrong_clock_does_not_count() -> None:
    fine = report(100, missed=1, waiting=5, window_s=10.0)
    for hour in (3600.0, 1e-6):
        steered = loop()
        for now in range(10, 100, 10):
            reports = {f"e{number}": [fine] for number in range(9)} | {"liar": [report(0, window_s=hour, waiting=0)]}
            outcome = steered.observe(float(now), reports, silent=())
        assert steered.state.reason == "start"
        assert outcome.window is not None
        assert qos.across(outcome.window.values()).window_s == 10.0


def test_attainment_stays_between_zero_and_one_whatever_an_engine_claims() -> None:
    outcome = observed(report(with_target=100, missed=2**31))
    assert outcome.window is not None
    assert 0.9 < 1 - qos.across(outcome.window.values()).miss_ratio < 1.0
    assert "liar" in outcome.outliers


def test_an_engine_that_claims_all_calls_counts_for_a_few_of_the_others() -> None:
    believed = credible_reports.believed(pool(report(10**9, missed=10**9)))
    assert believed.outliers == {"liar": "it reports 1000000005 calls, and the other engines 1575 together"}
    together = qos.across(believed.reports.values())
    assert together.with_target < 2200


@pytest.mark.parametrize("field", ["ttft", "tpot", "service"])
def test_an_engine_that_claims_many_durations_counts_for_a_few_of_the_others(field: str) -> None:
    long = qos.Histogram(counts=(0,) * 30 + (10**12,))
    believed = credible_reports.believed(pool(dataclasses.replace(report(), **{field: long})))
    assert list(believed.outliers) == ["liar"]
    assert getattr(qos.across(believed.reports.values()), field).count < 2200


def test_one_engine_that_serves_an_almost_idle_pool_is_believed() -> None:
    idle = qos.Qos()
    reports = {"busy": report(150, missed=100), "a": idle, "b": idle, "c": idle}
    believed = credible_reports.believed(reports)
    assert believed.reports == reports
    assert not believed.outliers


def test_a_tenant_or_class_of_an_engine_has_no_more_targets_than_the_engine() -> None:
    absurd = qos.Targets(with_target=10**9, missed=10**9)
    liar = report(tenants={"t": qos.TenantService(with_target=10**9, missed=10**9)}, classes={"c": absurd})
    assert credible_reports.possible(liar).tenants["t"].targets == qos.Targets(with_target=100, missed=100)
    assert credible_reports.possible(liar).classes["c"] == qos.Targets(with_target=100, missed=100)
    assert credible_reports.possible(report()) == report()


def test_each_call_has_at_most_one_work_one_time_per_token_and_one_verdict_about_its_targets() -> None:
    many = qos.Histogram(counts=(0, 500, 500))
    claimed = report(arrived=100, finished=50, with_target=900, missed=900, service=many, tpot=many)
    believed = credible_reports.possible(claimed)
    assert (believed.service.count, believed.tpot.count) == (100, 50)
    assert (believed.with_target, believed.missed) == (50, 50)
    told = credible_reports.believed({"liar": claimed}).outliers
    assert told == {"liar": "it reports 900 targets of 50 calls"}


numbers = st.integers(0, 2**63)


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.builds(
            qos.Qos,
            window_s=st.floats(-1e300, 1e300),
            arrived=numbers,
            finished=numbers,
            waiting=numbers,
            preemptions=numbers,
            with_target=numbers,
            missed=numbers,
            blocked=numbers,
            **dict.fromkeys(
                ("ttft", "tpot", "service"), st.builds(qos.Histogram, counts=st.lists(numbers, max_size=9).map(tuple))
            ),
        ),
        max_size=6,
    )
)
def test_whatever_engines_report_the_ratios_are_ratios(reports: list[qos.Qos]) -> None:
    believed = credible_reports.believed({str(number): each for number, each in enumerate(reports)})
    together = qos.across(believed.reports.values())
    assert 0 <= together.miss_ratio <= 1
    assert 0 <= together.block_ratio <= 1.001
    proposed = rules.Rules().propose(together, "edf", frozenset(policies.POLICIES))
    assert proposed is None or proposed.policy in policies.POLICIES
