"""What the gateway tells of itself: Prometheus metrics, with bounded labels, in base units.

Names are contracts (`docs/`); every label that a client can choose is capped, and what exceeds the cap is `other`. One
registry for each gateway, so that two of them in one process do not mix.
"""

import collections

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from tidegate_gateway.lifecycle.relay import Serving
from tidegate_policy import dispatcher

MOST_LABELS = 100
"""Distinct client-chosen values of one label."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2, 4, 10)
ATTAINMENT_CALLS = 200
"""Calls of a class that its attainment is measured over."""


class Telemetry:
    """The metrics, and how a finished call moves them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        p = "tidegate_"
        self.requests = Counter(p + "requests", "Calls by how they ended.", ["outcome", "class"], registry=registry)
        self.ttft = Histogram(
            p + "request_ttft_seconds", "Arrival to first token.", ["class"], buckets=SECONDS, registry=registry
        )
        self.tpot = Histogram(
            p + "request_tpot_seconds", "Mean time between tokens.", ["class"], buckets=TOKEN_SECONDS, registry=registry
        )
        self.e2e = Histogram(
            p + "request_e2e_seconds", "Arrival to last token.", ["class"], buckets=SECONDS, registry=registry
        )
        self.queue_depth = Gauge(p + "queue_depth", "Calls that wait in the gateway.", ["class"], registry=registry)
        self.queue = Histogram(
            p + "queue_seconds", "Wait in the gateway.", ["class"], buckets=SECONDS, registry=registry
        )
        self.dispatch = Histogram(
            p + "dispatch_seconds",
            "From a request's last byte to its engine, for calls that did not wait.",
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
            registry=registry,
        )
        self.attainment = Gauge(
            p + "slo_attainment_ratio",
            f"Share of the last {ATTAINMENT_CALLS} calls that met their targets.",
            ["class"],
            registry=registry,
        )
        self.workflows = Counter(
            p + "workflow_deadline", "Ended workflows.", ["template", "outcome"], registry=registry
        )
        self.backlog = Gauge(
            p + "engine_backlog_seconds", "Predicted work, all gateways together.", ["engine"], registry=registry
        )
        self.prediction = Histogram(
            p + "prediction_error_ratio", "Observed over predicted.", ["kind"], buckets=RATIOS, registry=registry
        )
        self.alpha = Gauge(p + "alpha", "Weight of speed against load in dispatch.", registry=registry)
        self.policy = Gauge(p + "policy_info", "The active order.", ["policy"], registry=registry)
        self.switches = Counter(p + "policy_switches", "Order changes.", ["from", "to", "reason"], registry=registry)
        self.shed = Counter(p + "shed", "Calls refused.", ["reason"], registry=registry)
        self.retries = Counter(p + "retries", "Calls that another engine was tried for.", registry=registry)
        self.engine_up = Gauge(p + "engine_up", "1 while calls may go there.", ["engine"], registry=registry)
        self.unrecorded = Gauge(
            p + "workflow_unrecorded", "Finished stages that the store does not know yet.", registry=registry
        )
        self._seen: dict[str, set[str]] = collections.defaultdict(set)
        self._met: dict[str, collections.deque[bool]] = {}

    def label(self, kind: str, value: str) -> str:
        """`value`, or `other` once too many values of this kind were seen."""
        seen = self._seen[kind]
        if value in seen or len(seen) < MOST_LABELS:
            seen.add(value)
            return value
        return "other"

    def on_served(self, served: Serving) -> None:
        """A call left."""
        call = served.job.call
        slo_class = self.label("class", call.slo_class or "none")
        self.requests.labels(served.outcome, slo_class).inc()
        if served.sent_s is not None:
            self.queue.labels(slo_class).observe(served.queue_s)
        if served.dispatch_s is not None:
            self.dispatch.observe(served.dispatch_s)
        met = served.outcome == "ok"
        if served.outcome == "ok" and served.first_s is not None and served.finished_s is not None:
            met = self._on_answer(served, slo_class, served.first_s, served.finished_s)
        if served.outcome not in ("cancelled", "rejected"):
            window = self._met.setdefault(slo_class, collections.deque(maxlen=ATTAINMENT_CALLS))
            window.append(met)
            self.attainment.labels(slo_class).set(sum(window) / len(window))

    def _on_answer(self, served: Serving, slo_class: str, first_s: float, finished_s: float) -> bool:
        """Times of a complete answer; whether it met the targets that it had."""
        call, meter = served.job.call, served.reply.meter
        e2e_s = finished_s - call.arrival_s
        self.e2e.labels(slo_class).observe(e2e_s)
        late = call.due_s is not None and finished_s > call.due_s
        if served.job.ask.stream:
            ttft_s = first_s - call.arrival_s
            tpot_s = (finished_s - first_s) / max(meter.generated / call.sequences - 1, 1)
            self.ttft.labels(slo_class).observe(ttft_s)
            self.tpot.labels(slo_class).observe(tpot_s)
            late |= call.ttft_s is not None and ttft_s > call.ttft_s
            late |= call.tpot_s is not None and tpot_s > call.tpot_s
        if served.decision is not None and served.sent_s is not None:
            predicted_s = served.decision.queue_s + served.decision.service_s
            self.prediction.labels("time").observe((finished_s - served.sent_s) / max(predicted_s, 1e-6))
            self.prediction.labels("output").observe(meter.generated / (call.output_predicted * call.sequences))
        return not late

    def on_workflow(self, template: str, outcome: str) -> None:
        """A workflow ended: met, late, cancelled or expired."""
        self.workflows.labels(self.label("template", template or "none"), outcome).inc()

    def on_policy(self, before: str, after: str, reason: str) -> None:
        self.policy.clear()
        self.policy.labels(after).set(1)
        if before != after:
            self.switches.labels(before, after, self.label("reason", reason)).inc()

    def observe(self, core: dispatcher.Dispatcher) -> None:
        """Refreshes what is read rather than counted; called before a scrape."""
        waiting = collections.Counter(self.label("class", call.slo_class or "none") for call in core.waiting_calls())
        self.queue_depth.clear()
        for slo_class in self._seen["class"]:
            self.queue_depth.labels(slo_class).set(waiting[slo_class])
        self.backlog.clear()
        self.engine_up.clear()
        for state in core.engines():
            backlog = core.own_backlog(state.id) + state.others
            self.backlog.labels(state.id).set(state.cost.backlog_seconds(backlog))
            self.engine_up.labels(state.id).set(state.accepting)
        self.alpha.set(core.dispatch.alpha)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        encode, content_type = exposition.choose_encoder(accept)
        return encode(self.registry), content_type
