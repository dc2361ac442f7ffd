"""Summaries merge, and the recorder counts each call once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import qos, window
from tidegate_policy.model import Call, CallId

DURATIONS = st.lists(st.floats(0, 20_000), max_size=50)


def histogram(seconds: list[float]) -> qos.Histogram:
    tally = qos.Tally()
    for each in seconds:
        tally.add(each)
    return tally.freeze()


@given(DURATIONS, DURATIONS)
def test_merging_histograms_is_recording_both(a: list[float], b: list[float]) -> None:
    merged = histogram(a) + histogram(b)
    assert merged.counts == histogram(a + b).counts
    assert merged.sum_s == pytest.approx(sum(a) + sum(b))


@given(st.lists(st.floats(0.002, 3000), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_right_to_within_its_bucket(seconds: list[float], q: float) -> None:
    exact = sorted(seconds)[max(round(q * len(seconds)) - 1, 0)]
    below, above = sorted(seconds)[0] / 1.42, sorted(seconds)[-1] * 1.42
    assert below <= histogram(seconds).quantile_s(q) <= above
    if len(set(seconds)) == 1:
        assert exact / 1.42 <= histogram(seconds).quantile_s(q) <= exact * 1.42


def test_nothing_is_the_neutral_element() -> None:
    one = qos.Qos(window_s=2.0, arrived=3, waiting=4, tenants={"a": qos.TenantService(served_tokens=1)})
    assert qos.across([one]) == one
    assert qos.over_time([one]) == one


def test_across_engines_levels_add_up_and_over_time_the_newest_counts() -> None:
    old, new = qos.Qos(window_s=1.0, arrived=5, waiting=7), qos.Qos(window_s=1.0, arrived=6, waiting=2)
    both = qos.across([old, new])
    assert (both.waiting, both.arrived, both.window_s, both.engines) == (9, 11, 1.0, 2)
    later = qos.over_time([old, new])
    assert (later.waiting, later.arrived, later.window_s, later.engines) == (2, 11, 2.0, 1)


def call(name: str, tenant: str = "t", **targets: float) -> Call:
    return Call(
        id=CallId(name),
        arrived_at_s=0.0,
        prompt_tokens=5,
        output_predicted=5,
        tenant=tenant,
        **targets,  # type: ignore[arg-type]
    )


def test_the_recorder_tells_the_story_of_a_call() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=1.0), 0.1)
    record.on_tokens(0.5, CallId("a"), 1)
    record.on_tokens(1.5, CallId("a"), 10)
    record.on_end(1.5, CallId("a"), finished=True)
    seen = record.cut(2.0, running=0, waiting=0, kv_usage=0.25)
    assert (seen.arrived, seen.finished, seen.with_target, seen.missed, seen.blocked) == (1, 1, 1, 0, 1)
    assert (seen.ttft.sum_s, seen.tpot.sum_s, seen.window_s) == (0.5, 0.1, 2.0)
    assert seen.tenants["t"].served_tokens == 11


def test_a_missed_deadline_counts_once_however_many_targets_were_missed() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=0.1, due_at_s=0.2), 0.1)
    record.on_tokens(1.0, CallId("a"), 1)
    record.on_end(1.0, CallId("a"), finished=True)
    assert record.cut(2.0, running=0, waiting=0, kv_usage=0).missed == 1


def test_an_aborted_call_is_no_result() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=0.1), 0.1)
    record.on_end(1.0, CallId("a"), finished=False)
    seen = record.cut(2.0, running=0, waiting=0, kv_usage=0)
    assert (seen.arrived, seen.finished, seen.with_target) == (1, 0, 0)


def test_a_tenant_that_only_waits_is_seen_waiting() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", tenant="starved"), 0.1)
    record.cut(1.0, running=0, waiting=1, kv_usage=0)
    assert record.cut(2.0, running=0, waiting=1, kv_usage=0).tenants["starved"].waiting == 1


def test_tenants_are_bounded() -> None:
    record = window.Recorder(0.0)
    for index in range(500):
        record.on_arrival(call(str(index), tenant=f"t{index}"), 0.1)
    tenants = record.cut(1.0, running=0, waiting=500, kv_usage=0).tenants
    assert len(tenants) == window.MAX_TENANTS + 1
    assert tenants[window.OTHER].waiting == 500 - window.MAX_TENANTS
