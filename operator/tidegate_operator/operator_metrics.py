"""The operator's own Prometheus metrics (docs/metrics.md). Names are contracts.

Counts are kept here. Engines, conditions and queues are read when Prometheus asks: only the operator that holds the Lease
knows pools, so no two operators report the same pool. Series of a pool have the pool's own namespace in the label
`namespace`; the scrape configuration must keep it (`honorLabels`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import core, exposition, registry

from tidegate_operator import workqueue
from tidegate_operator.spec import Json
from tidegate_policy import qos
from tidegate_policy.steer import guards

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

WORK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
RULE_NAME = re.compile(r"[a-z][a-z -]{0,31}(?=:)")
"""The name of the steering rule, with which the reason of a switch begins."""
MOST_REASONS = 100

Key = tuple[str, str]
"""Namespace and name of a pool."""


class OperatorMetrics:
    """The metrics of one operator process."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        p = "tidegate_operator_"
        self.active = prometheus_client.Gauge(
            p + "active", "1 while this process holds the Lease and acts.", registry=self.registry
        )
        self._work = prometheus_client.Histogram(
            p + "work_seconds",
            "Time of one attempt to reconcile or to steer a pool, by workqueue.",
            ["queue"],
            buckets=WORK_S,
            registry=self.registry,
        )
        self._errors = prometheus_client.Counter(
            p + "work_errors", "Attempts that raised an error, by workqueue.", ["queue"], registry=self.registry
        )
        self._depth = prometheus_client.Gauge(
            p + "queue_depth", "Pools that are due and wait for a worker.", ["queue"], registry=self.registry
        )
        self._age = prometheus_client.Gauge(
            p + "queue_age_seconds", "Time since the first waiting pool was due.", ["queue"], registry=self.registry
        )
        self._decisions = prometheus_client.Counter(
            p + "decisions",
            "Decisions of the steering loops: keep, switch, rollback, bypass or override.",
            ["namespace", "pool", "decision"],
            registry=self.registry,
        )
        self._switches = prometheus_client.Counter(
            p + "policy_switches",
            "Switches of the scheduling policy, by the rule that proposed them, or rollback, bypass or override.",
            ["namespace", "pool", "from", "to", "reason"],
            registry=self.registry,
        )
        self._effect = prometheus_client.Gauge(
            p + "policy_effect_met_ratio",
            "Share of the targets that were met in the trial of the last switch to a policy.",
            ["namespace", "pool", "policy"],
            registry=self.registry,
        )
        self._decided: set[Key] = set()
        self._reasons: set[str] = set()
        self._queues: dict[str, Callable[[], workqueue.Reading]] = {}

    def add_queue(self, name: str, read: Callable[[], workqueue.Reading]) -> Callable[[float, bool], None]:
        """Adds a workqueue, whose state `read` tells; returns the receiver of its attempts: seconds, and whether the
        attempt failed."""
        work, errors = self._work.labels(name), self._errors.labels(name)
        self._queues[name] = read

        def attempted(seconds: float, failed: bool) -> None:
            work.observe(seconds)
            if failed:
                errors.inc()

        return attempted

    def add_pools(self, bodies: Callable[[], Iterable[Json]], silent: Callable[[], Mapping[Key, int]]) -> None:
        """Adds the pools: the ServingPools, and the number of silent engines of each pool that is steered."""
        self.registry.register(_Pools(bodies, silent))

    def decided(self, key: Key, before: str, verdict: guards.Verdict) -> None:
        """The steering loop of a pool decided; `before` is the policy until then."""
        if key not in self._decided:  # so that the first switch is an increase
            self._decided.add(key)
            for kind in guards.Kind:
                self._decisions.labels(*key, kind.value)
        self._decisions.labels(*key, verdict.kind.value).inc()
        if verdict.kind is not guards.Kind.KEEP and verdict.policy != before:
            self._switches.labels(*key, before, verdict.policy, self._reason(verdict)).inc()

    def judged(self, key: Key, policy: str, trial: qos.Qos) -> None:
        """The effect of the last switch of a pool, to `policy`, is known. Without targets it has no measure here."""
        if trial.with_target:
            self._effect.labels(*key, policy).set(1 - trial.miss_ratio)

    def forget(self, key: Key) -> None:
        """Removes the counts of a pool that does not exist any more."""
        self._decided.discard(key)
        for metric in (self._decisions, self._switches, self._effect):
            for sample in next(iter(metric.collect())).samples:
                if (sample.labels["namespace"], sample.labels["pool"]) == key:
                    metric.remove(*(sample.labels[name] for name in metric._labelnames))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        for name, read in self._queues.items():
            seen = read()
            self._depth.labels(name).set(seen.depth)
            self._age.labels(name).set(seen.age_s)
        encode, content_type = exposition.choose_encoder(accept)
        return encode(self.registry), content_type

    def _reason(self, verdict: guards.Verdict) -> str:
        if verdict.kind is not guards.Kind.SWITCH:
            return verdict.kind.value
        named = RULE_NAME.match(verdict.reason)
        reason = named.group() if named else "other"
        if reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
            return "other"
        self._reasons.add(reason)
        return reason


class _Pools(registry.Collector):
    """Reads the pools at each scrape."""

    def __init__(self, bodies: Callable[[], Iterable[Json]], silent: Callable[[], Mapping[Key, int]]) -> None:
        self._bodies = bodies
        self._silent = silent

    def describe(self) -> Iterable[core.Metric]:
        return self._families()

    def collect(self) -> Iterator[core.Metric]:
        desired, ready, silent, conditions = families = self._families()
        for body in self._bodies():
            status = body.get("status", {})
            key = (body["metadata"]["namespace"], body["metadata"]["name"])
            for item in status.get("nodePools", ()):
                if "desired" in item:
                    desired.add_metric([*key, item["name"]], item["desired"])
                    ready.add_metric([*key, item["name"]], item.get("ready", 0))
            for item in status.get("conditions", ()):
                conditions.add_metric([*key, item["type"]], item["status"] == "True")
        for key, count in self._silent().items():
            silent.add_metric(key, count)
        yield from families

    def _families(self) -> Sequence[core.GaugeMetricFamily]:
        p, of_pool = "tidegate_operator_", ["namespace", "pool"]
        gauge = core.GaugeMetricFamily
        return (
            gauge(p + "engines_desired", "Engines that should run.", labels=[*of_pool, "node_pool"]),
            gauge(p + "engines_ready", "Engines that are ready.", labels=[*of_pool, "node_pool"]),
            gauge(p + "engines_silent", "Ready engines that do not report to the operator.", labels=of_pool),
            gauge(p + "pool_condition", "1 while the condition of the pool is True.", labels=[*of_pool, "condition"]),
        )
