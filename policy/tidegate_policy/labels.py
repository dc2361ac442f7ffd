"""The labels that travel with a call into its engine: flat `tg.*` keys, with one table for writer and reader.

The gateway writes them into `vllm_xargs`; the engine plugin and the simulators read them. Clocks do not cross processes,
so an instant travels as a duration from "now". A missing key has a default; an unknown key or a senseless value is
ignored. A plain vLLM client that sends no labels is served fairly. The gateway strips labels that its clients send.
"""

import math
from collections.abc import Mapping

from tidegate_policy.model import DEFAULT_URGENCY, LEAST_URGENT, MOST_URGENT, Call, CallId, WorkflowId

Label = str | int | float
PREFIX = "tg."
MAX_TEXT = 256


def write(now: float, call: Call) -> dict[str, Label]:
    """The labels of a call that leaves for an engine at `now`."""
    labels: dict[str, Label | None] = {
        "tg.tenant": call.tenant or None,
        "tg.weight": call.weight if call.weight != 1.0 else None,
        "tg.class": call.slo_class or None,
        "tg.urgency": call.urgency,
        "tg.budget_ms": _ms(call.due_at_s, now),
        "tg.deadline_ms": _ms(call.deadline_at_s, now),
        "tg.ttft_ms": _ms(call.ttft_s),
        "tg.tpot_ms": _ms(call.tpot_s),
        "tg.out_pred": call.output_predicted,
        "tg.out_upper": call.output_upper or None,
        "tg.workflow": call.workflow,
        "tg.stage": call.stage,
        "tg.left_ms": _ms(call.left_s) or None,
        "tg.session": call.session,
        "tg.relquery": call.group,
        "tg.relquery_size": call.group_size or None,
        "tg.tool": call.tool,
        "tg.tool_ms": _ms(call.tool_s),
        "tg.tool_return": call.tool_return_tokens or None,
    }
    return {key: value for key, value in labels.items() if value is not None}


def read(
    now: float,
    labels: Mapping[str, object],
    *,
    call_id: CallId,
    prompt_tokens: int,
    max_tokens: int,
) -> Call:
    """The call as the engine sees it. `max_tokens` stands in for the output length if the labels hold no prediction."""
    budget_s, deadline_s = _seconds(labels, "tg.budget_ms"), _seconds(labels, "tg.deadline_ms")
    predicted = _number(labels, "tg.out_pred", 1, 10_000_000)
    urgency = _number(labels, "tg.urgency", MOST_URGENT, LEAST_URGENT)
    weight = _number(labels, "tg.weight", 1e-3, 1e3)
    workflow = _text(labels, "tg.workflow")
    return Call(
        id=call_id,
        arrived_at_s=now,
        prompt_tokens=prompt_tokens,
        output_predicted=min(int(predicted), max_tokens) if predicted is not None else max_tokens,
        output_upper=int(_number(labels, "tg.out_upper", 1, 10_000_000) or 0),
        tenant=_text(labels, "tg.tenant") or "",
        slo_class=_text(labels, "tg.class") or "",
        weight=1.0 if weight is None else weight,
        urgency=DEFAULT_URGENCY if urgency is None else int(urgency),
        ttft_s=_seconds(labels, "tg.ttft_ms"),
        tpot_s=_seconds(labels, "tg.tpot_ms"),
        due_at_s=None if budget_s is None else now + budget_s,
        deadline_at_s=None if deadline_s is None else now + deadline_s,
        left_s=_seconds(labels, "tg.left_ms") or 0.0,
        workflow=WorkflowId(workflow) if workflow else None,
        stage=_text(labels, "tg.stage"),
        session=_text(labels, "tg.session"),
        group=_text(labels, "tg.relquery"),
        group_size=int(_number(labels, "tg.relquery_size", 1, 10_000_000) or 0),
        tool=_text(labels, "tg.tool"),
        tool_s=_duration(labels, "tg.tool_ms"),
        tool_return_tokens=int(_number(labels, "tg.tool_return", 1, 10_000_000) or 0),
    )


def _ms(instant_or_duration_s: float | None, now: float = 0.0) -> int | None:
    return None if instant_or_duration_s is None else round((instant_or_duration_s - now) * 1000)


def _seconds(labels: Mapping[str, object], key: str) -> float | None:
    value = _number(labels, key, -1e12, 1e12)
    return None if value is None else value / 1000


def _duration(labels: Mapping[str, object], key: str) -> float | None:
    value = _number(labels, key, 0, 1e12)
    return None if value is None else value / 1000


def _number(labels: Mapping[str, object], key: str, low: float, high: float) -> float | None:
    value = labels.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def _text(labels: Mapping[str, object], key: str) -> str | None:
    value = labels.get(key)
    return value[:MAX_TEXT] if isinstance(value, str) and value else None
