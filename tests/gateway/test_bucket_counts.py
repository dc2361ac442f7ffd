"""Our histogram says what the one of prometheus_client says."""

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics

from tidegate_gateway.observe import bucket_counts

BOUNDS = (0.005, 0.1, 1, 2.5)
values = st.floats(-1, 5) | st.sampled_from(BOUNDS)


@given(st.lists(st.tuples(st.sampled_from(["one", "other"]), values), max_size=30))
@settings(max_examples=50)
def test_the_text_is_that_of_prometheus_client(observed: list[tuple[str, float]]) -> None:
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    own = bucket_counts.Histogram("m", "What it is.", ["kind"], buckets=BOUNDS, registry=ours)
    reference = prometheus_client.Histogram("m", "What it is.", ["kind"], buckets=BOUNDS, registry=theirs)
    for kind, value in observed:
        own.labels(kind).observe(value)
        reference.labels(kind).observe(value)
    assert exposition.generate_latest(ours) == exposition.generate_latest(theirs)
    assert openmetrics.generate_latest(ours) == openmetrics.generate_latest(theirs)


def test_a_histogram_without_labels_is_there_before_its_first_observation() -> None:
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    bucket_counts.Histogram("m", "M.", buckets=BOUNDS, registry=ours).labels()
    prometheus_client.Histogram("m", "M.", buckets=BOUNDS, registry=theirs)
    assert exposition.generate_latest(ours) == exposition.generate_latest(theirs)


def test_names_are_used_once_and_labels_are_complete() -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    histogram = bucket_counts.Histogram("m", "M.", ["kind"], buckets=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        bucket_counts.Histogram("m", "M.", buckets=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="kind"):
        histogram.labels()
