"""The dashboards: one of a pool, one of the operator. `docs/dashboards.md` shows them."""

import slo_rules
from dashboard_model import Annotation, Dashboard, Panel, Query, Variable

RANGE = "$__rate_interval"
IN_POOL = 'namespace="$namespace",pool="$pool"'


def _rate(counter: str, by: str, matcher: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{{{IN_POOL}{matcher}}}[{RANGE}]))"


def _quantile(histogram: str, by: str, quantile: float = 0.95, matcher: str = "") -> str:
    return f"histogram_quantile({quantile}, {_rate(histogram + '_bucket', by + ', le', matcher)})"


def _max(gauge: str, by: str, matcher: str = "") -> str:
    return f"max by ({by}) ({gauge}{{{IN_POOL}{matcher}}})"


def _sum(gauge: str, by: str) -> str:
    return f"sum by ({by}) ({gauge}{{{IN_POOL}}})"


def _left(of: slo_rules.Indicator, window: str) -> str:
    return f"1 - {of.ratio(window)}{{{IN_POOL}}} / {of.budget_name}{{{IN_POOL}}}"


_CALLS, _WORKFLOWS = slo_rules.CALLS, slo_rules.WORKFLOWS
POOL = Dashboard(
    uid="tidegate-pool",
    title="Tidegate / Pool",
    variables=(
        Variable(name="namespace", query="label_values(tidegate_policy_info, namespace)"),
        Variable(name="pool", query='label_values(tidegate_policy_info{namespace="$namespace"}, pool)'),
    ),
    annotations=(
        Annotation(
            name="Switches of the policy",
            expr=f"max by (policy) (tidegate_policy_info{{{IN_POOL}}})"
            f" unless max by (policy) (tidegate_policy_info{{{IN_POOL}}} offset 1m)",
            title="{{policy}}",
        ),
    ),
    rows=(
        (
            "Service level objectives",
            (
                Panel(
                    title="Targets met, 5 min",
                    meaning="The share of the calls with a target that met it, and the objective of each class.",
                    queries=(
                        Query(expr=f"1 - {_CALLS.ratio('5m')}{{{IN_POOL}}}", legend="{{class}}"),
                        Query(
                            expr=_max("tidegate_slo_objective_ratio", "class")
                            + f" and on (class) {_CALLS.calls('5m')}{{{IN_POOL}}}",
                            legend="{{class}} objective",
                        ),
                    ),
                    unit="percentunit",
                    width=10,
                ),
                Panel(
                    title="Error budget left, 3 days",
                    meaning="1: no target was missed. 0: as many as the objective allows. Negative: more.",
                    queries=(Query(expr=_left(_CALLS, "3d"), legend="{{class}}"),),
                    unit="percentunit",
                    kind="stat",
                    width=6,
                ),
                Panel(
                    title="Targets missed",
                    meaning="Calls that missed their target, per second: late, shed or failed.",
                    queries=(
                        Query(
                            expr=_rate("tidegate_slo_calls_total", "class, outcome", ',outcome!="met"'),
                            legend="{{class}} {{outcome}}",
                        ),
                    ),
                    stacked=True,
                ),
            ),
        ),
        (
            "Calls",
            (
                Panel(
                    title="Calls by outcome",
                    meaning="Admitted calls that ended, per second.",
                    queries=(Query(expr=_rate("tidegate_requests_total", "outcome"), legend="{{outcome}}"),),
                    stacked=True,
                    width=6,
                ),
                Panel(
                    title="Time to the first token, p95",
                    meaning="Of streamed calls, from their arrival at the gateway.",
                    queries=(Query(expr=_quantile("tidegate_request_ttft_seconds", "class"), legend="{{class}}"),),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Time between tokens, p95",
                    meaning="The mean of each streamed call.",
                    queries=(Query(expr=_quantile("tidegate_request_tpot_seconds", "class"), legend="{{class}}"),),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Time to the last token, p95",
                    meaning="From the arrival at the gateway.",
                    queries=(Query(expr=_quantile("tidegate_request_e2e_seconds", "class"), legend="{{class}}"),),
                    unit="s",
                    width=6,
                ),
            ),
        ),
        (
            "Queues",
            (
                Panel(
                    title="Waiting calls by class",
                    meaning="In all gateways.",
                    queries=(Query(expr=_sum("tidegate_queue_depth", "class"), legend="{{class}}"),),
                    stacked=True,
                    width=6,
                ),
                Panel(
                    title="Waiting calls by lane",
                    meaning="The parts of the queue among which the policy divides the starts.",
                    queries=(Query(expr=_sum("tidegate_queue_lane_depth", "lane"), legend="{{lane}}"),),
                    stacked=True,
                    width=6,
                ),
                Panel(
                    title="Age of the oldest waiting call",
                    meaning="Since its arrival.",
                    queries=(Query(expr=_max("tidegate_queue_oldest_seconds", "class"), legend="{{class}}"),),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Shed calls",
                    meaning="Per second, by x-tidegate-reason.",
                    queries=(Query(expr=_rate("tidegate_shed_total", "reason"), legend="{{reason}}"),),
                    stacked=True,
                    width=6,
                ),
            ),
        ),
        (
            "Policy",
            (
                Panel(
                    title="Active policy",
                    meaning="By the gateways. The vertical lines of all panels are its switches.",
                    queries=(Query(expr=_max("tidegate_policy_info", "policy"), legend="{{policy}}"),),
                    kind="state-timeline",
                    width=12,
                ),
                Panel(
                    title="Observed over predicted, median",
                    meaning="1: predictions are right. Far from 1 for `time`: a cost profile does not fit its card.",
                    queries=(Query(expr=_quantile("tidegate_prediction_error_ratio", "kind", 0.5), legend="{{kind}}"),),
                    width=6,
                ),
                Panel(
                    title="Store",
                    meaning="1 while every gateway reaches the store, and ends of calls that the store does not know yet.",
                    queries=(
                        Query(expr=f"min(tidegate_store_up{{{IN_POOL}}})", legend="up"),
                        Query(expr=f"sum(tidegate_workflow_unrecorded{{{IN_POOL}}})", legend="unrecorded ends"),
                    ),
                    width=6,
                ),
            ),
        ),
        (
            "Engines",
            (
                Panel(
                    title="Engines that take calls",
                    meaning="As the gateways see them.",
                    queries=(
                        Query(expr=f"sum(max by (engine) (tidegate_engine_up{{{IN_POOL}}}))", legend="take calls"),
                        Query(expr=f"count(max by (engine) (tidegate_engine_up{{{IN_POOL}}}))", legend="known"),
                    ),
                    width=6,
                ),
                Panel(
                    title="Backlog",
                    meaning="Predicted seconds until the engine has done all that was sent to it.",
                    queries=(Query(expr=_max("tidegate_engine_backlog_seconds", "engine"), legend="{{engine}}"),),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Running and waiting in engines",
                    meaning="Sequences, as vLLM reports them.",
                    queries=(
                        Query(expr=_sum("vllm:num_requests_running", "node_pool"), legend="{{node_pool}} running"),
                        Query(expr=_sum("vllm:num_requests_waiting", "node_pool"), legend="{{node_pool}} waiting"),
                    ),
                    width=6,
                ),
                Panel(
                    title="KV cache",
                    meaning="The fullest engine of each node pool.",
                    queries=(Query(expr=_max("vllm:kv_cache_usage_perc", "node_pool"), legend="{{node_pool}}"),),
                    unit="percentunit",
                    width=6,
                ),
                Panel(
                    title="Step of a real engine, p95",
                    meaning="Simulated engines have no steps.",
                    queries=(
                        Query(
                            expr=_quantile("tidegate_engine_step_seconds", "node_pool, kind"),
                            legend="{{node_pool}} {{kind}}",
                        ),
                    ),
                    unit="s",
                    width=12,
                ),
                Panel(
                    title="Preemptions",
                    meaning="Running calls that lost their KV cache, per second.",
                    queries=(
                        Query(expr=_rate("tidegate_engine_preemptions_total", "node_pool"), legend="{{node_pool}}"),
                    ),
                    width=12,
                ),
            ),
        ),
        (
            "Tenants and workflows",
            (
                Panel(
                    title="Targets met by tenant",
                    meaning="The ten tenants that met the smallest share.",
                    queries=(
                        Query(
                            expr="bottomk(10, ("
                            + _rate("tidegate_tenant_slo_calls_total", "tenant", ',outcome="met"')
                            + " or 0 * "
                            + _rate("tidegate_tenant_slo_calls_total", "tenant")
                            + ") / ("
                            + _rate("tidegate_tenant_slo_calls_total", "tenant")
                            + " > 0))",
                            legend="{{tenant}}",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Workflows by outcome",
                    meaning="Ended workflows, per second.",
                    queries=(
                        Query(
                            expr=_rate("tidegate_workflow_deadline_total", "template, outcome"),
                            legend="{{template}} {{outcome}}",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    title="Workflow deadlines missed, 5 min",
                    meaning="The share of workflows that were late, failed or expired.",
                    queries=(Query(expr=f"{_WORKFLOWS.ratio('5m')}{{{IN_POOL}}}", legend="{{template}}"),),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
OPERATOR = Dashboard(
    uid="tidegate-operator",
    title="Tidegate / Operator",
    variables=(),
    annotations=(
        Annotation(
            name="Switches of policies",
            expr="sum by (namespace, pool, to, reason) (increase(tidegate_operator_policy_switches_total[1m])) > 0",
            title="{{namespace}}/{{pool}}: {{to}} ({{reason}})",
        ),
    ),
    rows=(
        (
            "Pools",
            (
                Panel(
                    title="Operators that act",
                    meaning="One holds the Lease.",
                    queries=(Query(expr="sum(tidegate_operator_active)", legend="active"),),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    title="Pools by condition",
                    meaning="Pools of which the condition is True.",
                    queries=(
                        Query(expr="sum by (condition) (tidegate_operator_pool_condition)", legend="{{condition}}"),
                    ),
                    width=10,
                ),
                Panel(
                    title="Pools that need a person",
                    meaning="Degraded is True.",
                    queries=(
                        Query(
                            expr='max by (namespace, pool) (tidegate_operator_pool_condition{condition="Degraded"})',
                            legend="{{namespace}}/{{pool}}",
                        ),
                    ),
                    kind="state-timeline",
                    width=10,
                ),
                Panel(
                    title="Engines desired and ready",
                    meaning="Of all pools.",
                    queries=(
                        Query(
                            expr="sum by (namespace, pool) (tidegate_operator_engines_desired)",
                            legend="{{namespace}}/{{pool}} desired",
                        ),
                        Query(
                            expr="sum by (namespace, pool) (tidegate_operator_engines_ready)",
                            legend="{{namespace}}/{{pool}} ready",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    title="Silent engines",
                    meaning="Ready engines that do not report to the operator.",
                    queries=(Query(expr="tidegate_operator_engines_silent", legend="{{namespace}}/{{pool}}"),),
                    width=12,
                ),
            ),
        ),
        (
            "Steering",
            (
                Panel(
                    title="Decisions",
                    meaning="Per second, of all steering loops.",
                    queries=(
                        Query(
                            expr=f"sum by (decision) (rate(tidegate_operator_decisions_total[{RANGE}]))",
                            legend="{{decision}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    title="Switches in an hour, by reason",
                    meaning="The steering rule that proposed the switch, or rollback, bypass or override.",
                    queries=(
                        Query(
                            expr="clamp_min(sum by (namespace, pool, reason) (tidegate_operator_policy_switches_total)"
                            " - (sum by (namespace, pool, reason)"
                            " (tidegate_operator_policy_switches_total offset 1h) or 0 * "
                            "sum by (namespace, pool, reason) (tidegate_operator_policy_switches_total)), 0)",
                            legend="{{namespace}}/{{pool}} {{reason}}",
                        ),
                    ),
                    stacked=True,
                    width=12,
                ),
            ),
        ),
        (
            "Work",
            (
                Panel(
                    title="Time of an attempt, p95",
                    meaning="To reconcile or to steer one pool.",
                    queries=(
                        Query(
                            expr="histogram_quantile(0.95, sum by (queue, le)"
                            f" (rate(tidegate_operator_work_seconds_bucket[{RANGE}])))",
                            legend="{{queue}}",
                        ),
                    ),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Attempts and errors",
                    meaning="Per second.",
                    queries=(
                        Query(
                            expr=f"sum by (queue) (rate(tidegate_operator_work_seconds_count[{RANGE}]))",
                            legend="{{queue}}",
                        ),
                        Query(
                            expr=f"sum by (queue) (rate(tidegate_operator_work_errors_total[{RANGE}]))",
                            legend="{{queue}} errors",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    title="Pools that wait for a worker",
                    meaning="They are due and no worker has them.",
                    queries=(Query(expr="sum by (queue) (tidegate_operator_queue_depth)", legend="{{queue}}"),),
                    width=6,
                ),
                Panel(
                    title="Age of the first of them",
                    meaning="Since it was due.",
                    queries=(Query(expr="max by (queue) (tidegate_operator_queue_age_seconds)", legend="{{queue}}"),),
                    unit="s",
                    width=6,
                ),
            ),
        ),
    ),
)
ALL = (POOL, OPERATOR)
