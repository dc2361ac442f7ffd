"""How do the messages of EngineControl correspond to the values of the program? Both directions, in one place.

A `to_` function makes a message and a `from_` function reads one. A message from another process may hold numbers that
no engine can have measured; the functions that read such numbers answer None for them.
"""

import math

from tidegate_policy import label_table, qos
from tidegate_policy.engine.engine_status import Controls, State, WatchReport
from tidegate_proto.v1 import control_pb2

MOST_REASON = 1000
"""Characters of a reason that an engine states; more are cut."""


def to_report(report: WatchReport) -> control_pb2.QosReport:
    """The message of one window."""
    window = report.window
    return control_pb2.QosReport(
        policy=report.policy,
        policy_parameters=report.policy_parameters,
        bypass=report.bypass,
        window_s=window.window_s,
        arrived=window.arrived,
        finished=window.finished,
        waiting=window.waiting,
        preemptions=window.preemptions,
        ttft=to_histogram(window.ttft),
        tpot=to_histogram(window.tpot),
        service=to_histogram(window.service),
        with_target=window.with_target,
        missed=window.missed,
        blocked=window.blocked,
        tenants=[
            control_pb2.TenantQos(
                tenant=name,
                weight=tenant.weight,
                served_tokens=tenant.served_tokens,
                waiting=tenant.waiting,
                with_target=tenant.with_target,
                missed=tenant.missed,
            )
            for name, tenant in window.tenants.items()
        ],
        classes=[
            control_pb2.ClassQos(slo_class=name, with_target=targets.with_target, missed=targets.missed)
            for name, targets in window.classes.items()
        ],
    )


def from_report(report: control_pb2.QosReport) -> WatchReport | None:
    """The window in a report; None when a number is not finite, a weight is none that a call can have, or a histogram has
    too many buckets."""
    histograms = (report.ttft, report.tpot, report.service)
    weights = [item.weight for item in report.tenants]
    if not math.isfinite(report.window_s) or not all(
        label_table.LEAST_WEIGHT <= weight <= label_table.MOST_WEIGHT for weight in weights
    ):
        return None
    if any(len(each.counts) > len(qos.BOUNDS_S) + 1 for each in histograms):
        return None
    window = qos.Qos(
        window_s=report.window_s,
        arrived=report.arrived,
        finished=report.finished,
        waiting=report.waiting,
        preemptions=report.preemptions,
        ttft=from_histogram(report.ttft),
        tpot=from_histogram(report.tpot),
        service=from_histogram(report.service),
        with_target=report.with_target,
        missed=report.missed,
        blocked=report.blocked,
        tenants={
            item.tenant: qos.TenantService(
                weight=item.weight,
                served_tokens=item.served_tokens,
                waiting=item.waiting,
                with_target=item.with_target,
                missed=item.missed,
            )
            for item in report.tenants
        },
        classes={
            item.slo_class: qos.Targets(with_target=item.with_target, missed=item.missed) for item in report.classes
        },
    )
    return WatchReport(
        policy=report.policy,
        policy_parameters=dict(report.policy_parameters),
        bypass=report.bypass,
        window=window,
    )


def to_histogram(histogram: qos.Histogram) -> control_pb2.Histogram:
    return control_pb2.Histogram(counts=histogram.counts)


def from_histogram(message: control_pb2.Histogram) -> qos.Histogram:
    return qos.Histogram(counts=tuple(message.counts))


def to_controls(controls: Controls) -> control_pb2.Controls:
    return control_pb2.Controls(max_running=controls.max_running, max_step_tokens=controls.max_step_tokens)


def from_controls(message: control_pb2.Controls) -> Controls:
    return Controls(max_running=message.max_running, max_step_tokens=message.max_step_tokens)


def to_state(state: State, *, engine_version: str) -> control_pb2.EngineState:
    return control_pb2.EngineState(
        policy=state.policy,
        policy_parameters=state.policy_parameters,
        policy_reason=state.policy_reason,
        policy_age_s=state.policy_age_s,
        bypass=state.bypass,
        controls=to_controls(state.controls),
        running=state.running,
        waiting=state.waiting,
        waiting_by_lane=state.waiting_by_lane,
        kv_usage=state.kv_usage,
        waiting_ids=state.waiting_ids,
        engine_version=engine_version,
        fallback_reason=state.fallback_reason,
        preemptions=state.preemptions,
        simulated_profile=state.simulated_profile,
    )


def from_state(message: control_pb2.EngineState) -> State | None:
    """The state of an engine; None when a number is not finite."""
    if not math.isfinite(message.policy_age_s) or not math.isfinite(message.kv_usage):
        return None
    return State(
        policy=message.policy,
        policy_parameters=dict(message.policy_parameters),
        policy_reason=message.policy_reason[:MOST_REASON],
        policy_age_s=message.policy_age_s,
        bypass=message.bypass,
        controls=from_controls(message.controls),
        running=message.running,
        waiting=message.waiting,
        waiting_by_lane=dict(message.waiting_by_lane),
        kv_usage=message.kv_usage,
        waiting_ids=tuple(message.waiting_ids),
        preemptions=message.preemptions,
        fallback_reason=message.fallback_reason[:MOST_REASON],
        simulated_profile=message.simulated_profile,
    )
