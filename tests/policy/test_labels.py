"""The engine reads exactly the labels that the gateway writes."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import labels
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
    ttft_s=SECONDS,
    tpot_s=SECONDS,
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
            assert abs((right - there) - (left - here)) < 0.001


KEYS = st.sampled_from(
    [
        "tg.urgency",
        "tg.budget_ms",
        "tg.out_pred",
        "tg.tenant",
        "tg.weight",
        "tg.relquery",
        "tg.relquery_size",
        "tg.tool",
        "tg.tool_ms",
        "tg.tool_return",
    ]
)
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


def test_a_client_that_sends_no_labels_gets_the_defaults() -> None:
    call = read(5.0, {})
    assert (call.urgency, call.due_at_s, call.output_predicted, call.weight) == (2, None, 500, 1.0)
