"""The Prometheus metrics of a gateway, with bounded labels, in base units.

Names are contracts (`docs/`); every label that a client can choose has a bounded number of values, and further values
are `other`. One registry for each gateway, so that two of them in one process do not mix.
"""

import collections
import contextlib
import functools
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, exposition

from tidegate_gateway.observe import bucket_counts, call_record, engine_service, recent_service
from tidegate_policy import gateway_core, window
from tidegate_policy.admit import entitlements
from tidegate_policy.model import Call

disable_created_metrics()  # type: ignore[no-untyped-call]
MOST_LABELS = 100
"""Distinct client-chosen values of one label."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2, 4, 10)
UNCOUNTED = ("cancelled", "rejected")
"""Outcomes for which the client is the cause. They neither meet nor miss a target."""
SLO_CALLS = (
    "Ended calls that had a target (of their class, their own, or their workflow's deadline): met, late, shed or failed. "
    "Calls that the client cancelled or that the engine rejected do not count. Without traffic there are no new counts, so "
    "ratios over a window make no false alarm."
)
UNNAMED = ("none", "other")
"""Labels of calls without a class of the settings."""
ATTAINMENT_CALLS = 200
"""Calls of a class that its attainment is measured over."""


class Metrics:
    """The metrics, and how the record of an ended call changes them."""

    def __init__(self, objectives: Mapping[str, float] = MappingProxyType({})) -> None:
        """`objectives` are the classes of the settings with their objectives in percent. The label of any other class is
        `other`."""
        self.service = recent_service.RecentService()
        self.engines = engine_service.EngineService()
        self.registry = registry = CollectorRegistry()
        p = "tidegate_"
        self.requests = Counter(
            p + "requests",
            "Admitted calls by outcome: ok, cancelled, rejected (by the engine), or a code of docs/http.md.",
            ["outcome", "class"],
            registry=registry,
        )
        self.ttft = bucket_counts.Histogram(
            p + "request_ttft_seconds",
            "Time from arrival to the first token, of streamed calls.",
            ["class"],
            buckets=SECONDS,
            registry=registry,
        )
        self.tpot = bucket_counts.Histogram(
            p + "request_tpot_seconds",
            "Mean time between tokens, of streamed calls.",
            ["class"],
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.e2e = bucket_counts.Histogram(
            p + "request_e2e_seconds",
            "Time from arrival to the last token.",
            ["class"],
            buckets=SECONDS,
            registry=registry,
        )
        self.queue_depth = Gauge(p + "queue_depth", "Calls waiting in the gateway.", ["class"], registry=registry)
        self.queue_lane_depth = Gauge(
            p + "queue_lane_depth",
            "Calls waiting in each lane of the queue. Calls that may not start yet are in none.",
            ["lane"],
            registry=registry,
        )
        self.queue_oldest = Gauge(
            p + "queue_oldest_seconds",
            "Time since the arrival of the call that has waited longest in the gateway.",
            ["class"],
            registry=registry,
        )
        self.queue = bucket_counts.Histogram(
            p + "queue_seconds",
            "Time that sent calls had waited in the gateway, as in x-tidegate-queue-ms.",
            ["class"],
            buckets=SECONDS,
            registry=registry,
        )
        self.dispatch = bucket_counts.Histogram(
            p + "dispatch_seconds",
            "Time from arrival to an engine, of calls that did not wait: the cost of the gateway itself.",
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
            registry=registry,
        ).labels()
        self.attainment = Gauge(
            p + "slo_attainment_ratio",
            f"Share of the last {ATTAINMENT_CALLS} calls that met their targets.",
            ["class"],
            registry=registry,
        )
        self.slo_calls = Counter(
            p + "slo_calls",
            SLO_CALLS,
            ["class", "outcome"],
            registry=registry,
        )
        self.objective = Gauge(
            p + "slo_objective_ratio",
            "Share of the calls with a target that should meet it: the objective of the class.",
            ["class"],
            registry=registry,
        )
        self.tenant_slo_calls = Counter(
            p + "tenant_slo_calls",
            SLO_CALLS,
            ["tenant", "outcome"],
            registry=registry,
        )
        self.workflows = Counter(
            p + "workflow_deadline",
            "Ended workflows: met, late, failed, cancelled or expired (docs/http.md).",
            ["template", "outcome"],
            registry=registry,
        )
        self.relquery_rows = Counter(
            p + "relquery_rows",
            "Rows of relQueries whose result this gateway recorded: completed or failed.",
            ["outcome"],
            registry=registry,
        )
        self.backlog = Gauge(
            p + "engine_backlog_seconds", "Predicted work of all gateways on the engine.", ["engine"], registry=registry
        )
        self.prediction = bucket_counts.Histogram(
            p + "prediction_error_ratio",
            "Observed over predicted time and output length.",
            ["kind"],
            buckets=RATIOS,
            registry=registry,
        )
        self.alpha = Gauge(
            p + "alpha",
            "Weight of speed against load, while the dispatch rule reads one.",
            ["rule"],
            registry=registry,
        )
        self.policy = Gauge(p + "policy_info", "The active scheduling policy.", ["policy"], registry=registry)
        self.switches = Counter(
            p + "policy_switches", "Switches of the scheduling policy.", ["from", "to", "reason"], registry=registry
        )
        self.shed = Counter(p + "shed", "Calls that were shed, by x-tidegate-reason.", ["reason"], registry=registry)
        self.ignored_fields = Counter(
            p + "ignored_fields",
            "Fields and headers of calls that only the gateway may set, and that it removed.",
            ["field"],
            registry=registry,
        )
        self.retries = Counter(p + "retries", "Attempts of calls after their first one.", registry=registry)
        self.engine_up = Gauge(p + "engine_up", "1 while calls may go to the engine.", ["engine"], registry=registry)
        self.unrecorded = Gauge(
            p + "workflow_unrecorded", "Ends of calls that the store does not know yet.", registry=registry
        )
        self.tasks = Gauge(p + "tasks", "Tasks of the gateway's event loop.", registry=registry)
        self.store_up = Gauge(p + "store_up", "1 while the store answers, or while no store is set.", registry=registry)
        self.store_losses = Counter(
            p + "store_losses", "Times that the store had lost writes which it had acknowledged.", registry=registry
        )
        self.store_lost_seconds = Counter(
            p + "store_lost_seconds", "Seconds whose acknowledged writes the store lost, at least.", registry=registry
        )
        self.certificate_expiry = Gauge(
            p + "certificate_expiry_timestamp_seconds",
            "When the certificate of the client ports expires, in seconds since 1970; 0 without TLS.",
            registry=registry,
        )
        self.background_errors = Counter(
            p + "background_errors",
            "Exceptions in background loops. The loop goes on, and the log shows the first exception of each kind.",
            ["loop"],
            registry=registry,
        )
        self._seen: dict[str, set[str]] = collections.defaultdict(set)
        self._by_class: dict[str, _ClassMetrics] = {}
        self.requests_of = _Children(self.requests)
        self.slo_calls_of = _Children(self.slo_calls)
        self._tenant_slo_calls_of = _Children(self.tenant_slo_calls)
        self.set_classes(objectives)

    @functools.cached_property
    def _time_error(self) -> bucket_counts.Buckets:
        return self.prediction.labels("time")

    @functools.cached_property
    def _output_error(self) -> bucket_counts.Buckets:
        return self.prediction.labels("output")

    def label(self, kind: str, value: str) -> str:
        """`value`, or `other` once too many values of this kind were seen."""
        seen = self._seen[kind]
        if value in seen or len(seen) < MOST_LABELS:
            seen.add(value)
            return value
        return "other"

    def known_label(self, kind: str, value: str) -> str:
        """The label that `value` has, or would get now; a look takes none of the places of labels."""
        seen = self._seen[kind]
        return value if value in seen or len(seen) < MOST_LABELS else "other"

    def set_classes(self, objectives: Mapping[str, float]) -> None:
        """Replaces the classes of the settings and their objectives in percent."""
        self._classes = frozenset(objectives)
        for name in self._by_class.keys() - {*objectives, *UNNAMED}:
            del self._by_class[name]
            with contextlib.suppress(KeyError):  # no call of the class has had a target
                self.attainment.remove(name)
        self.objective.clear()
        for name in (*objectives, *UNNAMED):
            self.objective.labels(name).set(objectives.get(name, entitlements.OBJECTIVE) / 100)

    def class_label(self, slo_class: str) -> str:
        """The name of a class of the settings, `none` for no class, or `other`."""
        if not slo_class:
            return "none"
        return slo_class if slo_class in self._classes else "other"

    def _of_class(self, slo_class: str) -> "_ClassMetrics":
        name = self.class_label(slo_class)
        found = self._by_class.get(name)
        if found is None:
            found = self._by_class[name] = _ClassMetrics(self, name)
        return found

    def on_call(self, record: call_record.CallRecord) -> None:
        """A call ended, admitted or not."""
        call = record.call
        if call is None:
            if record.shed:
                self._on_end(record, self._of_class(record.slo_class), met=False)
            return
        slo_class = self._of_class(call.slo_class)
        slo_class.count(record.outcome)
        if record.sent_at_s is not None:
            slo_class.queue.observe(record.queue_s)
        if record.dispatch_s is not None:
            self.dispatch.observe(record.dispatch_s)
        met = record.outcome == "ok"
        if met and record.first_token_at_s is not None and record.finished_at_s is not None:
            met = self._on_answer(record, call, slo_class, record.first_token_at_s, record.finished_at_s)
        if record.outcome not in UNCOUNTED:
            slo_class.attain(met=met)
        self._on_end(record, slo_class, met=met)

    def _on_end(self, record: call_record.CallRecord, slo_class: "_ClassMetrics", *, met: bool) -> None:
        """Counts the end of a call, and its outcome if it had a target."""
        tenant, outcome = self.label("tenant", record.tenant or "none"), _slo_outcome(record, met=met)
        if outcome is not None:
            slo_class.count_target(outcome)
            self._tenant_slo_calls_of[tenant, outcome].inc()
        self.engines.on_call(record, slo_class.name, outcome)
        finished_at_s = record.finished_at_s if record.outcome == "ok" else None
        self.service.add(
            record.arrived_at_s if record.ended_at_s is None else record.ended_at_s,
            slo_class.name,
            tenant,
            tokens=record.tokens,
            answer_s=None if finished_at_s is None else finished_at_s - record.arrived_at_s,
            outcome=outcome,
        )

    def _on_answer(
        self,
        record: call_record.CallRecord,
        call: Call,
        slo_class: "_ClassMetrics",
        first_at_s: float,
        finished_at_s: float,
    ) -> bool:
        """Counts the times of a whole answer; whether it met the targets that it had."""
        e2e_s = finished_at_s - record.arrived_at_s
        slo_class.e2e.observe(e2e_s)
        tokens = record.tokens / call.sequences
        late = call.due_at_s is not None and finished_at_s > call.due_at_s + window.further_s(call, tokens)
        if record.stream:
            ttft_s = first_at_s - record.arrived_at_s
            tpot_s = (finished_at_s - first_at_s) / max(tokens - 1, 1)
            slo_class.ttft.observe(ttft_s)
            slo_class.tpot.observe(tpot_s)
            late |= call.ttft_s is not None and ttft_s > call.ttft_s
            late |= call.tpot_s is not None and tpot_s > call.tpot_s
        if record.decision is not None and record.sent_at_s is not None:
            predicted_s = record.decision.queue_s + record.decision.service_s
            self._time_error.observe((finished_at_s - record.sent_at_s) / max(predicted_s, 1e-6))
            self._output_error.observe(record.tokens / (call.output_predicted * call.sequences))
        return not late

    def on_workflow(self, template: str, outcome: str) -> None:
        """A workflow ended: met, late, failed, cancelled or expired."""
        self.workflows.labels(self.label("template", template or "none"), outcome).inc()

    def on_policy(self, before: str, after: str, reason: str) -> None:
        self.policy.clear()
        self.policy.labels(after).set(1)
        if before != after:
            self.switches.labels(before, after, self.label("reason", reason)).inc()

    def on_lanes(self, waiting: Mapping[str, int]) -> None:
        """The waiting calls of each lane by its name. All count, also where there are more names than labels."""
        lanes: collections.Counter[str] = collections.Counter()
        for lane, calls in waiting.items():
            lanes[self.label("lane", lane)] += calls
        for lane in {*self._seen["lane"], *lanes}:
            self.queue_lane_depth.labels(lane).set(lanes[lane])

    def observe(self, now: float, core: gateway_core.GatewayCore, *, store_up: bool) -> None:
        """Refreshes the gauges that are read rather than counted; called before a scrape."""
        waiting: collections.Counter[str] = collections.Counter()
        for (slo_class, _), calls in core.dispatcher.waiting_by_class_and_tenant.items():
            waiting[self.class_label(slo_class)] += calls
        self.queue_depth.clear()
        for slo_class in {*self._by_class, *waiting}:
            self.queue_depth.labels(slo_class).set(waiting[slo_class])
        self.on_lanes(core.dispatcher.waiting_by_lane())
        oldest: dict[str, float] = {}
        for slo_class, since_s in core.dispatcher.waiting_since_s().items():
            label = self.class_label(slo_class)
            oldest[label] = max(now - since_s, oldest.get(label, 0.0))
        self.queue_oldest.clear()
        for slo_class in {*self._by_class, *waiting}:
            self.queue_oldest.labels(slo_class).set(oldest.get(slo_class, 0.0))
        self.backlog.clear()
        self.engine_up.clear()
        accepting = {engine.facts.id for engine in core.engines.accepting(now)}
        for engine in core.engines:
            self.backlog.labels(engine.facts.id).set(engine.cost.backlog_seconds(engine.backlog))
            self.engine_up.labels(engine.facts.id).set(engine.facts.id in accepting)
        if core.dispatcher.alpha is not None:
            self.alpha.labels(core.dispatcher.settings.rule).set(core.dispatcher.alpha)
        self.store_up.set(store_up)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        encode, content_type = exposition.choose_encoder(accept)
        return encode(self.registry), content_type

    def content_type(self, accept: str) -> str:
        """Of the text for a client that accepts this. There are few of them."""
        content_type: str = exposition.choose_encoder(accept)[1]
        return content_type


def _slo_outcome(record: call_record.CallRecord, *, met: bool) -> recent_service.Outcome | None:
    """The outcome of a call that had a target; None for a call without one, or whose end is the client's doing."""
    if not record.has_target:
        return None
    if record.call is not None and record.outcome in UNCOUNTED:
        return None
    if record.shed:
        return "shed"
    if met:
        return "met"
    return "late" if record.outcome == "ok" else "failed"


class _Children(dict[tuple[str, str], Counter]):
    """The counters of one metric by its two labels, each looked up once."""

    def __init__(self, metric: Counter) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, str]) -> Counter:
        child = self[labels] = self._metric.labels(*labels)
        return child


class _ClassMetrics:
    """The metrics of one class of calls, looked up once."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.name = name
        self._metrics = metrics
        self._met: collections.deque[bool] = collections.deque(maxlen=ATTAINMENT_CALLS)
        self._met_count = 0

    @functools.cached_property
    def queue(self) -> bucket_counts.Buckets:
        return self._metrics.queue.labels(self.name)

    @functools.cached_property
    def e2e(self) -> bucket_counts.Buckets:
        return self._metrics.e2e.labels(self.name)

    @functools.cached_property
    def ttft(self) -> bucket_counts.Buckets:
        return self._metrics.ttft.labels(self.name)

    @functools.cached_property
    def tpot(self) -> bucket_counts.Buckets:
        return self._metrics.tpot.labels(self.name)

    @functools.cached_property
    def attainment(self) -> Gauge:
        return self._metrics.attainment.labels(self.name)

    def count(self, outcome: str) -> None:
        """Counts a call with this outcome."""
        self._metrics.requests_of[outcome, self.name].inc()

    def count_target(self, outcome: str) -> None:
        """Counts a call that had a target."""
        self._metrics.slo_calls_of[self.name, outcome].inc()

    def attain(self, *, met: bool) -> None:
        """A call met its targets, or missed them."""
        met_calls = self._met
        if len(met_calls) == ATTAINMENT_CALLS:
            self._met_count -= met_calls[0]
        met_calls.append(met)
        self._met_count += met
        self.attainment.set(self._met_count / len(met_calls))
