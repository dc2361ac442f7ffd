"""Alerts about the causes of trouble: full queues, silent engines, a lost store, certificates, policies, the operator.

Series of gateways and engines have the labels `namespace` and `pool` from the scrape configuration, those of the operator
from the operator. A counter that begins with its first event shows no increase for it, so `_changed` also compares values.
The counters of the operator begin at 0: those of queues at its start, those of decisions before the first one of a pool.
"""

import rule_model

OF_POOL = "pool {{ $labels.namespace }}/{{ $labels.pool }}"
FULL = "saturated|ttl-expired|evicted|deadline-unreachable"
"""Reasons of shed calls that more engines, or fewer calls, would remedy."""
LONG_WAIT_S = 30
DAYS_LEFT = 14
START_MIN = 30
"""Time for which the engines of a pool that had none may start."""
SWITCHES = 4
BEHIND_S = 60


def _changed(counter: str) -> str:
    """The series of a counter that grew in the last 15 minutes, or whose value differs from that of 15 to 30 minutes ago.

    The first sample of a series may already be the whole count of a burst, of which `increase` shows nothing. Then there is
    no earlier value. An old count that cannot be read for up to 15 minutes has the same value as before; after a longer
    time it counts as new, for 15 minutes and no longer. The values are looked for in the whole 15 minutes, so a failed
    scrape changes nothing, and a fault of a process that then ends is told as long. A process that restarts in its pod and
    reaches exactly its old count within 15 minutes looks like one that was not read for a time, and is not told.
    """
    now, before = f"last_over_time({counter}[15m])", f"last_over_time({counter}[15m] offset 15m)"
    return f"(increase({counter}[15m]) > 0 or ({now} unless {now} == {before}))"


def _latest(condition: str) -> str:
    """When `condition`, an expression with the labels of pools, last held within the time of a start, by pool."""
    return f"max_over_time(timestamp({condition})[{START_MIN}m:1m])"


TAKES_CALLS = "count by (namespace, pool) (tidegate_engine_up == 1)"
WITH_ENGINE = _latest(TAKES_CALLS)
AT_ZERO = _latest("sum by (namespace, pool) (tidegate_operator_engines_desired) == 0")


def groups() -> tuple[rule_model.Group, ...]:
    return (
        rule_model.Group(name="tidegate-pools", rules=POOLS),
        rule_model.Group(name="tidegate-faults", rules=FAULTS),
        rule_model.Group(name="tidegate-operator", rules=OPERATOR),
    )


POOLS = (
    rule_model.Alert(
        name="TidegateSaturated",
        # Of a pool that has admitted no call yet there is no series of requests.
        expr=f'sum by (namespace, pool) (rate(tidegate_shed_total{{reason=~"{FULL}"}}[10m]))'
        " / ((sum by (namespace, pool) (rate(tidegate_requests_total[10m]))"
        " or 0 * sum by (namespace, pool) (rate(tidegate_shed_total[10m])))"
        " + sum by (namespace, pool) (rate(tidegate_shed_total[10m]))) > 0.05",
        severity="warning",
        lasts="5m",
        summary="Calls are shed because the engines are full.",
        description=f"The {OF_POOL} sheds {{{{ $value | humanizePercentage }}}} of its calls for lack of room or time.",
    ),
    rule_model.Alert(
        name="TidegateQueueOld",
        expr=f"max by (namespace, pool, class) (tidegate_queue_oldest_seconds) > {LONG_WAIT_S}"
        " unless tidegate:slo_call_error:ratio_rate30m <= tidegate:slo_call_budget:ratio",
        severity="warning",
        lasts="10m",
        summary="Calls of class {{ $labels.class }} wait long.",
        description=f"The oldest waiting call of class {{{{ $labels.class }}}} of the {OF_POOL} has waited for "
        "{{ $value | humanizeDuration }}, and the class does not meet its objective or has no targets.",
    ),
    rule_model.Alert(
        name="TidegateNoEngines",
        expr="count by (namespace, pool) (tidegate_policy_info)"
        f" unless {TAKES_CALLS}"
        f" unless ({AT_ZERO} unless {AT_ZERO} < {WITH_ENGINE})",
        severity="critical",
        lasts="2m",
        summary="No engine takes calls.",
        description=f"No gateway of the {OF_POOL} has an engine that takes calls, so all calls fail.",
    ),
    rule_model.Alert(
        name="TidegateEngineDown",
        expr="max by (namespace, pool, engine) (tidegate_engine_up) == 0",
        severity="warning",
        lasts="15m",
        summary="Engine {{ $labels.engine }} takes no calls.",
        description=f"No gateway of the {OF_POOL} sends calls to the engine {{{{ $labels.engine }}}}.",
    ),
    rule_model.Alert(
        name="TidegateEnginesSilent",
        expr="max by (namespace, pool) (tidegate_operator_engines_silent) > 0",
        severity="warning",
        lasts="5m",
        summary="Engines do not report to the operator.",
        description=f"{{{{ $value }}}} ready engines of the {OF_POOL} do not report to the operator.",
    ),
    rule_model.Alert(
        name="TidegateEnginesMissing",
        expr="sum by (namespace, pool, node_pool) (tidegate_operator_engines_desired)"
        " - sum by (namespace, pool, node_pool) (tidegate_operator_engines_ready) > 0",
        severity="warning",
        lasts="30m",
        summary="Node pool {{ $labels.node_pool }} has fewer engines than desired.",
        description=f"{{{{ $value }}}} engines of {{{{ $labels.node_pool }}}} of the {OF_POOL} are not ready.",
    ),
    rule_model.Alert(
        name="TidegateStoreLost",
        expr="min by (namespace, pool) (tidegate_store_up) == 0",
        severity="critical",
        lasts="2m",
        summary="A gateway does not reach its store.",
        description=f"A gateway of the {OF_POOL} does not reach its store. Workflows are shed; single calls are served.",
    ),
    rule_model.Alert(
        name="TidegateEndsUnrecorded",
        expr="sum by (namespace, pool) (tidegate_workflow_unrecorded) > 0",
        severity="warning",
        lasts="15m",
        summary="Ends of calls are not in the store.",
        description=f"The store does not know {{{{ $value }}}} ends of calls of workflows of the {OF_POOL}.",
    ),
    rule_model.Alert(
        name="TidegateCertificateExpires",
        expr="min by (namespace, pool) (tidegate_certificate_expiry_timestamp_seconds > 0) - time()"
        f" < {DAYS_LEFT} * 86400",
        severity="warning",
        lasts="1h",
        summary="The certificate of the gateways expires.",
        description=f"The certificate of the client ports of the {OF_POOL} expires in {{{{ $value | humanizeDuration }}}}.",
    ),
    rule_model.Alert(
        name="TidegatePolicyFlaps",
        expr="sum by (namespace, pool)"
        f' (increase(tidegate_operator_decisions_total{{decision=~"switch|rollback|bypass"}}[1h])) > {SWITCHES - 0.5}',
        severity="warning",
        summary="The scheduling policy changes often.",
        description=f"The policy of the {OF_POOL} changed about {{{{ $value | humanize }}}} times in an hour.",
    ),
    rule_model.Alert(
        name="TidegateNotScraped",
        expr='up{pool!=""} == 0',
        severity="warning",
        lasts="15m",
        summary="Prometheus cannot read {{ $labels.instance }}.",
        description=f"The metrics of {{{{ $labels.instance }}}} of the {OF_POOL} cannot be read, so its alerts are blind.",
    ),
)
FAULTS = (
    rule_model.Alert(
        name="TidegateGatewayFault",
        expr=f"sum by (namespace, pool, loop) {_changed('tidegate_background_errors_total')} > 0",
        severity="warning",
        summary="A background loop of a gateway raises exceptions.",
        description=f"The loop {{{{ $labels.loop }}}} of the gateways of the {OF_POOL} raises exceptions; it goes on.",
    ),
    rule_model.Alert(
        name="TidegatePolicyFault",
        expr=f"sum by (namespace, pool, hook) {_changed('tidegate_engine_policy_failures_total')} > 0",
        severity="warning",
        summary="A policy or regulator raises exceptions.",
        description=f"The hook {{{{ $labels.hook }}}} raises exceptions in engines of the {OF_POOL}.",
    ),
)
OPERATOR = (
    rule_model.Alert(
        name="TidegatePoolDegraded",
        expr='max by (namespace, pool) (tidegate_operator_pool_condition{condition="Degraded"}) == 1',
        severity="warning",
        lasts="15m",
        summary="A pool needs a person.",
        description=f"The {OF_POOL} has the condition Degraded; `kubectl describe spool` shows the reason.",
    ),
    rule_model.Alert(
        name="TidegateOperatorIdle",
        expr="max by (namespace, job) (tidegate_operator_active) == 0",
        severity="warning",
        lasts="5m",
        summary="No operator holds the Lease.",
        description="Operators run in {{ $labels.namespace }} and none acts. Pools serve; changes and steering stop.",
    ),
    rule_model.Alert(
        name="TidegateOperatorAbsent",
        # A crash-looping operator is active now and then, so one that is active counts from half of the last 10 minutes on.
        expr='count(count by (namespace, pool) (tidegate_policy_info{pool!=""}))'
        " unless on () count_over_time((max(tidegate_operator_active) == 1)[10m:1m]) >= 5",
        severity="warning",
        lasts="5m",
        summary="No operator is seen to act.",
        description="Prometheus reads {{ $value }} pools and, for most of 10 minutes, no operator that acts. Pools serve; "
        "changes and steering stop.",
    ),
    rule_model.Alert(
        name="TidegateOperatorErrors",
        expr="sum by (job, queue) (increase(tidegate_operator_work_errors_total[15m])) > 5",
        severity="warning",
        lasts="10m",
        summary="The operator's work fails.",
        description="Attempts of the queue {{ $labels.queue }} failed {{ $value | humanize }} times in 15 minutes.",
    ),
    rule_model.Alert(
        name="TidegateOperatorBehind",
        expr=f"max by (job, queue) (tidegate_operator_queue_age_seconds) > {BEHIND_S}",
        severity="warning",
        lasts="5m",
        summary="The operator is behind.",
        description="A pool has waited for {{ $value | humanizeDuration }} in the queue {{ $labels.queue }}.",
    ),
)
