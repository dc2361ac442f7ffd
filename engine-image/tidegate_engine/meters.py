"""The engine's own Prometheus metrics, beside vLLM's.

The scheduler runs in the engine core process, vLLM's `/metrics` in the API server. `vllm_server` turns on
prometheus_client's multi-process mode, in which vLLM's endpoint collects the samples of both.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import prometheus_client

from tidegate_policy import window
from tidegate_policy.engine import engine_core
from tidegate_policy.engine.known_call import KnownCall

COST_ERROR_STEPS = 64
"""Steps that are learned between two updates of the cost model's error."""
NO_CLASS = "none"
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SCHEDULE_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TPOT_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Meter(Protocol):
    """The receiver of a scheduler's measurements."""

    def scheduled(self, seconds: float, preempted: int) -> None:
        """Deciding a step took `seconds` and preempted `preempted` running requests."""

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None:
        """A step took `seconds`; `tokens` holds the number of tokens of each of its requests."""

    def bad_label(self, label: str) -> None:
        """A request had a label without sense. `label` is one of the keys of `tidegate_policy.labels`, or `other`."""

    def served(self, now: float, known: KnownCall, finished: bool) -> None:
        """A call finished now, or was aborted."""

    def holds(self, held_bytes: float) -> None:
        """The KV cache holds `held_bytes` for sessions from now on."""

    def cost_error(self, *, mean: float, p95: float) -> None:
        """The relative errors of the latest predictions of step times."""

    def policy_failed(self, hook: str, times: int) -> None:
        """A hook of a policy or regulator raised `times` exceptions."""


class _Silent:
    def scheduled(self, seconds: float, preempted: int) -> None: ...

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None: ...

    def bad_label(self, label: str) -> None: ...

    def served(self, now: float, known: KnownCall, finished: bool) -> None: ...

    def holds(self, held_bytes: float) -> None: ...

    def cost_error(self, *, mean: float, p95: float) -> None: ...

    def policy_failed(self, hook: str, times: int) -> None: ...


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
            "tidegate_engine_preemptions_total", "Running calls that lost their KV cache to other calls."
        )
        self._bad_labels = prometheus_client.Counter(
            "tidegate_engine_bad_labels_total",
            "Labels of requests that had no sense or were out of bounds, by key; unknown keys are other.",
            ["label"],
        )
        self._calls = prometheus_client.Counter(
            "tidegate_engine_calls_total",
            "Calls that ended, by SLO class (none without one): met or missed their targets, no-target, aborted.",
            ["class", "outcome"],
        )
        self._ttft = prometheus_client.Histogram(
            "tidegate_engine_ttft_seconds",
            "Time from the arrival in the engine to the first token, of finished calls.",
            ["class"],
            buckets=TTFT_BOUNDS_S,
        )
        self._tpot = prometheus_client.Histogram(
            "tidegate_engine_tpot_seconds",
            "Mean time between the tokens of a finished call.",
            ["class"],
            buckets=TPOT_BOUNDS_S,
        )
        self._tenant_tokens = prometheus_client.Counter(
            "tidegate_engine_tenant_tokens_total", "Output tokens of the calls that ended, by tenant.", ["tenant"]
        )
        self._tenant_calls = prometheus_client.Counter(
            "tidegate_engine_tenant_calls_total",
            "Calls that ended, by tenant: met or missed their targets, no-target, aborted.",
            ["tenant", "outcome"],
        )
        self._held = prometheus_client.Gauge(
            "tidegate_engine_kv_held_bytes",
            "Bytes of the KV cache on each GPU that are held for sessions; a block that two sessions share counts twice.",
            ["action"],
            multiprocess_mode="livesum",
        ).labels("preserve")
        self._cost_error = prometheus_client.Gauge(
            "tidegate_engine_cost_error_ratio",
            "Relative error of the latest 256 predictions of step times: mean and p95.",
            ["statistic"],
            multiprocess_mode="livemax",
        )
        self._policy_failures = prometheus_client.Counter(
            "tidegate_engine_policy_failures_total", "Exceptions in the hooks of policies and regulators.", ["hook"]
        )
        self._class_names: set[str] = set()
        self._tenant_names: set[str] = set()

    def scheduled(self, seconds: float, preempted: int) -> None:
        self._schedule.observe(seconds)
        if preempted:
            self._preemptions.inc(preempted)

    def stepped(self, seconds: float, tokens: Iterable[int]) -> None:
        self._step[kind(tokens)].observe(seconds)

    def bad_label(self, label: str) -> None:
        self._bad_labels.labels(label).inc()

    def served(self, now: float, known: KnownCall, finished: bool) -> None:
        call = known.item.call
        slo_class = _label(call.slo_class or NO_CLASS, self._class_names, window.MAX_CLASSES)
        tenant = _label(call.tenant, self._tenant_names, window.MAX_TENANTS)
        self._tenant_tokens.labels(tenant).inc(known.output_tokens)
        if not finished or known.first_at_s is None:
            self._ended(slo_class, tenant, "aborted")
            return
        tpot_s = window.tpot(now, first_at_s=known.first_at_s, tokens=known.output_tokens)
        missed = window.missed_target(now, call, first_at_s=known.first_at_s, tpot_s=tpot_s, tokens=known.output_tokens)
        self._ended(slo_class, tenant, "no-target" if missed is None else "missed" if missed else "met")
        self._ttft.labels(slo_class).observe(known.first_at_s - call.arrived_at_s)
        if tpot_s is not None:
            self._tpot.labels(slo_class).observe(tpot_s)

    def _ended(self, slo_class: str, tenant: str, outcome: str) -> None:
        self._calls.labels(slo_class, outcome).inc()
        self._tenant_calls.labels(tenant, outcome).inc()

    def holds(self, held_bytes: float) -> None:
        self._held.set(held_bytes)

    def cost_error(self, *, mean: float, p95: float) -> None:
        self._cost_error.labels("mean").set(mean)
        self._cost_error.labels("p95").set(p95)

    def policy_failed(self, hook: str, times: int) -> None:
        self._policy_failures.labels(hook).inc(times)


@functools.cache
def prometheus() -> Prometheus:
    """The meter of this process, which all its schedulers share."""
    return Prometheus()


class CoreReader:
    """Reads the counts of one engine core and reports what has changed to a meter. It costs little while nothing has."""

    def __init__(self, core: engine_core.EngineCore, meter: Meter, *, kv_token_bytes: float) -> None:
        self._core = core
        self._meter = meter
        self._kv_token_bytes = kv_token_bytes
        self._held_tokens = 0
        self._learned_steps = 0
        self._failures: Counter[str] = Counter()

    def read(self) -> None:
        """Call it after each event that can change what is held, and after each step."""
        core = self._core
        if core.held_kv_tokens != self._held_tokens:
            self._held_tokens = core.held_kv_tokens
            self._meter.holds(self._held_tokens * self._kv_token_bytes)
        if core.step_cost.steps - self._learned_steps >= COST_ERROR_STEPS:
            self._learned_steps = core.step_cost.steps
            self._meter.cost_error(mean=core.step_cost.mean_error, p95=core.step_cost.p95_error)
        if core.failures.counts and core.failures.counts != self._failures:
            for hook, times in (core.failures.counts - self._failures).items():
                self._meter.policy_failed(hook, times)
            self._failures = core.failures.counts.copy()


def kv_token_bytes(kv_cache_config: Any, block_tokens: int) -> float:
    """Bytes of one token in vLLM's KV cache on one GPU. All tensors of vLLM's configuration lie in one allocation, and each
    of them names its size."""
    size = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
    return float(size / kv_cache_config.num_blocks / block_tokens)


def _label(name: str, known: set[str], limit: int) -> str:
    """`name`, or `other` if it is new and `limit` names are known."""
    label = window.bounded(name, known, limit)
    known.add(label)
    return label


def kind(tokens: Iterable[int]) -> str:
    """`decode` if every request got one token, `prefill` if no request did, else `mixed`. A last prompt chunk of one token
    counts as decode, because it costs as much as a decode."""
    single = {count == 1 for count in tokens}
    return "mixed" if len(single) == 2 else "decode" if True in single else "prefill"
