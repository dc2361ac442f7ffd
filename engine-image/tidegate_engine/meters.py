"""The engine's own Prometheus metrics, beside vLLM's.

The scheduler runs in the engine core process, vLLM's `/metrics` in the API server. `vllm_server` turns on
prometheus_client's multi-process mode, in which vLLM's endpoint collects the samples of both.
"""

import functools
from collections.abc import Iterable
from typing import Protocol

import prometheus_client

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SCHEDULE_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)


class Meter(Protocol):
    """The receiver of a scheduler's measurements."""

    def scheduled(self, seconds: float, preempted: int) -> None:
        """Deciding a step took `seconds` and preempted `preempted` running requests."""

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None:
        """A step took `seconds`; `tokens` holds the number of tokens of each of its requests."""

    def bad_label(self, label: str) -> None:
        """A request had a label without sense. `label` is one of the keys of `tidegate_policy.labels`, or `other`."""


class _Silent:
    def scheduled(self, seconds: float, preempted: int) -> None: ...

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None: ...

    def bad_label(self, label: str) -> None: ...


SILENT: Meter = _Silent()


class Prometheus:
    """Names are contracts (docs: metrics). A process has one, because a metric can be registered only once."""

    def __init__(self) -> None:
        step = prometheus_client.Histogram(
            "tidegate_engine_step_seconds",
            "Time of an engine step by what it computed.",
            ["kind"],
            buckets=STEP_BOUNDS_S,
        )
        self._step = {kind: step.labels(kind) for kind in ("prefill", "decode", "mixed")}
        self._schedule = prometheus_client.Histogram(
            "tidegate_engine_schedule_seconds", "Time to decide a step.", buckets=SCHEDULE_BOUNDS_S
        )
        self._preemptions = prometheus_client.Counter(
            "tidegate_engine_preemptions_total", "Running requests that lost their KV cache to others."
        )
        self._bad_labels = prometheus_client.Counter(
            "tidegate_engine_bad_labels_total", "Labels of requests that were not taken as they are.", ["label"]
        )

    def scheduled(self, seconds: float, preempted: int) -> None:
        self._schedule.observe(seconds)
        if preempted:
            self._preemptions.inc(preempted)

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None:
        self._step[kind(tokens)].observe(seconds)

    def bad_label(self, label: str) -> None:
        self._bad_labels.labels(label).inc()


@functools.cache
def prometheus() -> Prometheus:
    """The meter of this process, which all its schedulers share."""
    return Prometheus()


def kind(tokens: Iterable[int]) -> str:
    """`decode` if every request got one token, `prefill` if no request did, else `mixed`. A last prompt chunk of one token
    counts as decode, because it costs as much as a decode."""
    single = {count == 1 for count in tokens}
    return "mixed" if len(single) == 2 else "decode" if True in single else "prefill"
