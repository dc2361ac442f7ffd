"""The engine reads exactly the labels that the gateway writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import label_table, labels
from tidegate_policy.model import Call, CallId, WorkflowId

SECONDS = st.none() | st.integers(-100_000, 10_000_000).map(lambda ms: ms / 1000)
TEXT = st.none() | st.text(min_size=1, max_size=40)
CALLS = st.builds(
    Call,
    id=st.just(CallId("c")),
    arrived_at_s=st.just(0.0),
    prompt_tokens=st.just(7),
    output_predicted=st.integers(1, 500),
    output_upper=st.integers(0, 500),
    tenant=st.text(max_size=40),
    urgency=st.integers(0, 4),
    weight=st.floats(0.001, 1000),
    yields=st.booleans(),
    owed=st.booleans(),
    ttft_s=st.none() | st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    tpot_s=st.none() | st.integers(1, 10_000_000).map(lambda ms: ms / 1000),
    due_at_s=SECONDS,
    deadline_at_s=SECONDS,
    workflow=TEXT.map(lambda text: None if text is None else WorkflowId(text)),
    stage=TEXT,
    session=TEXT,
    group=TEXT,
    group_size=st.integers(0, 10_000),
    tool=TEXT,
    tool_s=st.none() | st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    tool_return_tokens=st.integers(0, 100_000),
)
SAME = (
    "output_predicted",
    "output_upper",
    "tenant",
    "urgency",
    "yields",
    "owed",
    "workflow",
    "stage",
    "session",
    "group",
    "group_size",
    "tool",
    "tool_s",
    "tool_return_tokens",
    "ttft_s",
    "tpot_s",
)


def read(now: float, table: dict[str, object]) -> Call:
    return labels.read(now, table, call_id=CallId("c"), prompt_tokens=7, max_tokens=500)


@given(CALLS, st.floats(-1e5, 1e5), st.floats(-1e5, 1e5))
def test_a_call_survives_the_journey_between_two_clocks(call: Call, here: float, there: float) -> None:
    arrived = read(there, dict(labels.write(here, call)))
    for name in SAME:
        assert getattr(arrived, name) == getattr(call, name)
    for name in ("due_at_s", "deadline_at_s"):
        left, right = getattr(call, name), getattr(arrived, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert abs((right - there) - max(left - here, -label_table.MOST_OVERDUE_S)) < 0.001


KEYS = st.sampled_from(sorted(label_table.BY_KEY))
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.dictionaries(KEYS, VALUES))
def test_senseless_labels_are_ignored(table: dict[str, object]) -> None:
    call = read(5.0, table)
    assert 0 <= call.urgency <= 4
    assert 1 <= call.output_predicted <= 500
    assert call.weight > 0
    assert call.group_size >= 0
    assert call.tool_s is None or call.tool_s >= 0
    assert call.tool_return_tokens >= 0
    assert call.left_s >= 0
    assert call.ttft_s is None or call.ttft_s >= 0
    assert call.tpot_s is None or call.tpot_s > 0


def test_a_client_that_sends_no_labels_gets_the_defaults() -> None:
    call = read(5.0, {})
    assert (call.urgency, call.due_at_s, call.output_predicted, call.weight) == (2, None, 500, 1.0)


def reported(table: dict[str, object]) -> tuple[Call, list[str]]:
    bad: list[str] = []
    call = labels.read(
        5.0, table, call_id=CallId("c"), prompt_tokens=7, max_tokens=500, output_prior=60, on_bad=bad.append
    )
    return call, bad


HOSTILE: list[tuple[str, object, str, object]] = [
    ("tg.urgency", -1, "urgency", 2),
    ("tg.urgency", True, "urgency", 2),
    ("tg.urgency", float("nan"), "urgency", 2),
    ("tg.urgency", {"level": 0}, "urgency", 2),
    ("tg.urgency", [0], "urgency", 2),
    ("tg.budget_ms", -(10**12) + 1, "due_at_s", 5.0 - label_table.MOST_OVERDUE_S),
    ("tg.budget_ms", float("-inf"), "due_at_s", None),
    ("tg.budget_ms", "-1e400", "due_at_s", None),
    ("tg.budget_ms", 10**400, "due_at_s", None),
    ("tg.budget_ms", "9" * 10_000_000, "due_at_s", None),
    ("tg.deadline_ms", "soon", "deadline_at_s", None),
    ("tg.out_pred", 0, "output_predicted", 60),
    ("tg.out_pred", -3, "output_predicted", 60),
    ("tg.out_upper", 1e300, "output_upper", 0),
    ("tg.weight", 1e9, "weight", 1.0),
    ("tg.weight", 0, "weight", 1.0),
    ("tg.relquery_size", 1_000_000, "group_size", 0),
    ("tg.relquery", ["a"], "group", None),
    ("tg.session", "s" * 100_000, "session", "s" * label_table.MAX_TEXT),
    ("tg.tenant", {"a": {"b": {}}}, "tenant", ""),
    ("tg.tool_return", 10_485_760, "tool_return_tokens", 0),
    ("tg.tool_ms", 10**15, "tool_s", None),
    ("tg.left_ms", -5, "left_s", 0.0),
    ("tg.ttft_ms", -1, "ttft_s", None),
    ("tg.tpot_ms", -1, "tpot_s", None),
    ("tg.tpot_ms", 0, "tpot_s", None),
]


@pytest.mark.parametrize(("key", "value", "field", "expected"), HOSTILE)
def test_a_hostile_label_gets_its_default_or_its_bound_and_is_reported(
    key: str, value: object, field: str, expected: object
) -> None:
    call, bad = reported({key: value, "tg.class": "c"})
    assert getattr(call, field) == expected
    assert bad == [key]
    assert call.slo_class == "c", "the other labels count"


BOUNDS = [
    (label.key, value)
    for label in label_table.LABELS
    if label.kind is not label_table.Kind.TEXT
    for value in (label.low, label.high)
]


@pytest.mark.parametrize(("key", "bound"), BOUNDS)
def test_a_label_is_believed_up_to_the_bounds_of_the_table(key: str, bound: float) -> None:
    label = label_table.BY_KEY[key]
    beyond = bound + max(abs(bound) / 1000, 1) * (1 if bound == label.high else -1)
    call, bad = reported({key: beyond})
    assert (call, bad) == (reported({})[0], [key])
    reachable = max(bound, -label_table.MOST_OVERDUE_S * 1000) if label.kind is label_table.Kind.AHEAD else bound
    assert reported({key: reachable})[1] == []


@pytest.mark.parametrize("label", label_table.LABELS, ids=lambda label: label.key)
def test_each_label_of_the_table_is_read(label: label_table.Label) -> None:
    value = "x" if label.kind is label_table.Kind.TEXT else label.low + (label.high - label.low) * 0.75
    assert reported({label.key: value}) == (reported({label.key: str(value)})[0], [])
    changed = {"tg.out_pred": 1, "tg.yields": 1, "tg.owed": 1, "tg.ahead": 1}.get(label.key, value)
    assert reported({label.key: changed})[0] != reported({})[0]


def test_the_gateway_writes_the_labels_of_the_table() -> None:
    call = Call(
        id=CallId("c"), arrived_at_s=0.0, prompt_tokens=7, output_predicted=9, tenant="t", urgency=0, weight=3.0,
        yields=True, owed=True, ahead=True, due_at_s=-20.0, deadline_at_s=90.0, ttft_s=1.0, tpot_s=1e-9,
        workflow=WorkflowId("w"), stage="s", session="x", group="g", group_size=50, tool="t", tool_s=3.0,
        tool_return_tokens=100, left_s=2.0, output_upper=30, slo_class="c",
    )  # fmt: skip
    written = dict(labels.write(0.0, call))
    assert list(written) == list(label_table.BY_KEY)
    assert reported(written)[1] == []


def test_an_unknown_label_is_reported_under_one_name_and_foreign_keys_are_not_ours() -> None:
    _, bad = reported({"tg.magic": 1, "tg." + "x" * 10_000: 2, "kv_transfer_params": {"tg.a": 1}, "tg.urgency": 1})
    assert bad == ["other", "other"]


def test_a_call_without_a_prediction_has_the_engines_prior_and_never_more_than_its_own_bound() -> None:
    assert reported({})[0].output_predicted == 60
    short = labels.read(0.0, {}, call_id=CallId("c"), prompt_tokens=7, max_tokens=8, output_prior=60)
    assert short.output_predicted == 8
    assert reported({"tg.out_pred": 400})[0].output_predicted == 400


def test_an_urgency_wins_over_the_priority_of_a_plain_client() -> None:
    plain = labels.read(0.0, {}, call_id=CallId("c"), prompt_tokens=7, max_tokens=8, client_priority=-4.0)
    assert (plain.urgency, plain.client_priority) == (2, -4.0)
    table = {"tg.urgency": 3}
    labelled = labels.read(0.0, table, call_id=CallId("c"), prompt_tokens=7, max_tokens=8, client_priority=-4.0)
    assert (labelled.urgency, labelled.client_priority) == (3, 0.0)
