"""Summaries merge, and the recorder counts each call once."""

from collections import Counter

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
    merged = qos.across([qos.Qos(ttft=histogram(a)), qos.Qos(ttft=histogram(b))])
    assert merged.ttft.counts == histogram(a + b).counts


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


def call(name: str, tenant: str = "t", slo_class: str = "", **targets: float) -> Call:
    return Call(
        id=CallId(name),
        arrived_at_s=0.0,
        prompt_tokens=5,
        output_predicted=5,
        tenant=tenant,
        slo_class=slo_class,
        **targets,  # type: ignore[arg-type]
    )


def served(call_id: CallId) -> int:
    """The tokens of the calls that are in the engine when a window is cut."""
    return 0


def test_the_recorder_tells_the_story_of_a_call() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=1.0), 0.1)
    record.on_first_token(0.5, CallId("a"))
    record.on_end(1.5, CallId("a"), tokens=11, finished=True)
    seen = record.cut(2.0, waiting=0, tokens=served)
    assert (seen.arrived, seen.finished, seen.with_target, seen.missed, seen.blocked) == (1, 1, 1, 0, 1)
    assert (seen.ttft, seen.tpot, seen.window_s) == (histogram([0.5]), histogram([0.1]), 2.0)
    assert seen.tenants["t"].served_tokens == 11


def test_the_tokens_of_a_call_count_in_the_windows_in_which_they_came() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a"), 0.1)
    record.on_first_token(0.5, CallId("a"))
    windows = [record.cut(1.0, waiting=0, tokens={CallId("a"): 4}.__getitem__)]
    windows.append(record.cut(2.0, waiting=0, tokens={CallId("a"): 9}.__getitem__))
    record.on_end(2.5, CallId("a"), tokens=11, finished=True)
    windows.append(record.cut(3.0, waiting=0, tokens=served))
    assert [each.tenants["t"].served_tokens for each in windows] == [4, 5, 2]


def test_a_missed_deadline_counts_once_however_many_targets_were_missed() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=0.1, due_at_s=0.2), 0.1)
    record.on_first_token(1.0, CallId("a"))
    record.on_end(1.0, CallId("a"), tokens=1, finished=True)
    assert record.cut(2.0, waiting=0, tokens=served).missed == 1


def test_an_aborted_call_is_no_result() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", ttft_s=0.1), 0.1)
    record.on_end(1.0, CallId("a"), tokens=0, finished=False)
    seen = record.cut(2.0, waiting=0, tokens=served)
    assert (seen.arrived, seen.finished, seen.with_target) == (1, 0, 0)


def test_a_tenant_that_only_waits_is_seen_waiting() -> None:
    record = window.Recorder(0.0)
    record.on_arrival(call("a", tenant="starved"), 0.1)
    record.cut(1.0, waiting=1, tokens=served)
    assert record.cut(2.0, waiting=1, tokens=served).tenants["starved"].waiting == 1


def test_tenants_are_bounded() -> None:
    record = window.Recorder(0.0)
    for index in range(500):
        record.on_arrival(call(str(index), tenant=f"t{index}"), 0.1)
    tenants = record.cut(1.0, waiting=500, tokens=served).tenants
    assert len(tenants) == window.MAX_TENANTS + 1
    assert tenants[window.OTHER].waiting == 500 - window.MAX_TENANTS


def test_the_tenants_of_a_pool_are_bounded_and_those_that_are_known_still_count() -> None:
    one = qos.TenantService(weight=1.0, served_tokens=1)
    engines = [{f"{engine}-{i}": one for i in range(qos.MOST_TENANTS // 2)} for engine in range(3)]
    sums = qos.tenants_of([*engines, engines[0]], ())
    assert len(sums) == qos.MOST_TENANTS
    assert sums["0-0"].served_tokens == 2
    assert "2-0" not in sums


def test_the_targets_of_calls_are_counted_for_their_tenant_and_their_class() -> None:
    record = window.Recorder(0.0)
    for name, slo_class, ttft_s in (("a", "chat", 1.0), ("b", "chat", 0.1), ("c", "", 0.1)):
        record.on_arrival(call(name, slo_class=slo_class, ttft_s=ttft_s), 0.1)
        record.on_first_token(0.5, CallId(name))
        record.on_end(0.5, CallId(name), tokens=1, finished=True)
    seen = record.cut(1.0, waiting=0, tokens=served)
    assert seen.classes == {"chat": qos.Targets(with_target=2, missed=1), "": qos.Targets(with_target=1, missed=1)}
    assert seen.tenants["t"].targets == qos.Targets(with_target=3, missed=2)
    assert record.cut(2.0, waiting=0, tokens=served).classes == {}


def test_classes_are_bounded() -> None:
    record = window.Recorder(0.0)
    for index in range(500):
        record.on_arrival(call(str(index), slo_class=f"c{index}", ttft_s=1.0), 0.1)
        record.on_first_token(0.5, CallId(str(index)))
        record.on_end(0.5, CallId(str(index)), tokens=1, finished=True)
    classes = record.cut(1.0, waiting=0, tokens=served).classes
    assert len(classes) == window.MAX_CLASSES + 1
    assert classes[window.OTHER].with_target == 500 - window.MAX_CLASSES


def test_over_time_the_waiting_calls_of_a_tenant_are_those_of_the_newest_window() -> None:
    def seen(**waiting: int) -> qos.Qos:
        return qos.Qos(
            tenants={name: qos.TenantService(served_tokens=5, waiting=count) for name, count in waiting.items()}
        )

    later = qos.over_time([seen(a=7, b=3), seen(a=2)])
    assert {name: (each.served_tokens, each.waiting) for name, each in later.tenants.items()} == {
        "a": (10, 2),
        "b": (5, 0),
    }
    both = qos.across([seen(a=7, b=3), seen(a=2)])
    assert {name: each.waiting for name, each in both.tenants.items()} == {"a": 9, "b": 3}


COUNTS = st.integers(0, 50)
TARGETS = st.builds(qos.Targets, with_target=COUNTS, missed=COUNTS)
SERVICES = st.builds(
    qos.TenantService,
    weight=st.floats(0.01, 100),
    served_tokens=COUNTS,
    waiting=COUNTS,
    with_target=COUNTS,
    missed=COUNTS,
)
NAMES = st.sampled_from(("", "a", "b", "other"))
WINDOWS = st.builds(
    qos.Qos,
    arrived=COUNTS,
    waiting=COUNTS,
    with_target=COUNTS,
    ttft=DURATIONS.map(histogram),
    tenants=st.dictionaries(NAMES, SERVICES),
    classes=st.dictionaries(NAMES, TARGETS),
)


@given(st.lists(WINDOWS, min_size=1, max_size=6), st.integers(0, 6))
def test_windows_merge_in_any_grouping(windows: list[qos.Qos], cut: int) -> None:
    for merge in (qos.across, qos.over_time):
        parts = [merge(part) for part in (windows[:cut], windows[cut:]) if part]
        assert merge(parts) == merge(windows)


def test_the_fairness_index_counts_the_service_of_waiting_tenants_by_weight() -> None:
    def service(served: int, weight: float = 1.0, waiting: int = 1) -> qos.TenantService:
        return qos.TenantService(weight=weight, served_tokens=served, waiting=waiting)

    assert qos.Qos(tenants={"a": service(30, weight=3.0), "b": service(10)}).fairness == pytest.approx(1.0)
    assert qos.Qos(tenants={"a": service(40), "b": service(0)}).fairness == pytest.approx(0.5)
    assert qos.Qos(tenants={"a": service(40), "b": service(0, waiting=0)}).fairness is None
    assert qos.Qos(tenants={"a": service(0), "b": service(0)}).fairness is None


def test_tokens_that_nobody_predicted_do_not_make_a_call_late_while_it_keeps_its_targets() -> None:
    call = Call(
        id=CallId("long"),
        arrived_at_s=0.0,
        prompt_tokens=10,
        output_predicted=10,
        ttft_s=1.0,
        tpot_s=0.1,
        due_at_s=2.0,
    )
    missed = window.missed_target
    assert missed(3.0, call, first_at_s=0.5, tpot_s=0.08, tokens=30) is False
    assert missed(3.0, call, first_at_s=0.5, tpot_s=0.08, tokens=10) is True
    assert missed(4.5, call, first_at_s=0.5, tpot_s=0.08, tokens=30) is True
    assert missed(3.0, call, first_at_s=1.5, tpot_s=0.08, tokens=30) is True
    assert missed(3.0, call, first_at_s=0.5, tpot_s=0.12, tokens=30) is True


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "token", "token", "end", "abort", "cut"]),
            st.integers(0, 9),
            st.sampled_from("xyz"),
            st.sampled_from([1.0, 2.0]),
        ),
        max_size=60,
    )
)
def test_a_window_counts_what_its_calls_did_and_which_of_them_wait(history) -> None:
    """The recorder counts events; here each window is counted again from the calls themselves."""
    record = window.Recorder(0.0)
    open_calls: dict[CallId, Call] = {}
    tokens: dict[CallId, int] = {}
    served: Counter[str] = Counter()
    for number, (event, which, tenant, weight) in enumerate([*history, ("cut", 0, "", 1.0)]):
        call_id = list(open_calls)[which % len(open_calls)] if open_calls else None
        if event == "arrive":
            call_id = CallId(f"c{number}")
            open_calls[call_id] = Call(
                id=call_id, arrived_at_s=0.0, prompt_tokens=1, output_predicted=1, tenant=tenant, weight=weight
            )
            tokens[call_id] = 0
            record.on_arrival(open_calls[call_id], 1.0)
        elif event == "cut":
            found = record.cut(number + 1.0, waiting=0, tokens=tokens.__getitem__).tenants
            waiting = Counter(call.tenant for call_id, call in open_calls.items() if not tokens[call_id])
            assert {name: each.waiting for name, each in found.items() if each.waiting} == waiting
            assert {name: each.served_tokens for name, each in found.items() if each.served_tokens} == served
            served.clear()
        elif call_id is not None and event == "token":
            tokens[call_id] += 1
            served[open_calls[call_id].tenant] += 1
            if tokens[call_id] == 1:
                record.on_first_token(number, call_id)
        elif call_id is not None:
            del open_calls[call_id]
            record.on_end(number, call_id, tokens=tokens.pop(call_id), finished=event == "end")
