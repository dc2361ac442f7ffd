"""The labels that travel with a call into its engine: flat `tg.*` keys, with one table for writer and reader.

The gateway writes them into `vllm_xargs`; the engine plugin and the simulators read them. Clocks do not cross processes,
so an instant travels as a duration from "now". `label_table` has the kind, the bounds and the default of each key. An
unknown key is ignored. A value without sense, or beyond the bounds of its key, has the default of its key or is cut to the
bound; the reader reports its key. A plain vLLM client that sends no labels is served fairly. The gateway strips labels
that its clients send.
"""

import math
from collections.abc import Callable, Mapping

from tidegate_policy import label_table
from tidegate_policy.model import DEFAULT_URGENCY, Call, CallId, WorkflowId

Label = str | int | float
PREFIX = "tg."
OTHER = "other"
"""The name under which unknown keys are reported."""
_NUMERAL = 32
"""Characters of the longest text that is read as a number."""
MOST_MS = 2.0**53
"""A longer time would not keep its value in JSON."""


def write(now: float, call: Call) -> dict[str, Label]:
    """The labels of a call that leaves for an engine at `now`."""
    labels: dict[str, Label | None] = {
        "tg.tenant": call.tenant or None,
        "tg.weight": call.weight if call.weight != 1.0 else None,
        "tg.yields": 1 if call.yields else None,
        "tg.owed": 1 if call.owed else None,
        "tg.ahead": 1 if call.ahead else None,
        "tg.class": call.slo_class or None,
        "tg.urgency": call.urgency,
        "tg.budget_ms": _ms(call.due_at_s, now),
        "tg.deadline_ms": _ms(call.deadline_at_s, now),
        "tg.ttft_ms": _ms(call.ttft_s),
        "tg.tpot_ms": None if call.tpot_s is None else _ms(max(call.tpot_s, label_table.LEAST_TPOT_S)),
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
    output_prior: int | None = None,
    client_priority: float = 0.0,
    client_arrived_s: float = 0.0,
    on_bad: Callable[[str], object] | None = None,
) -> Call:
    """The call as the engine sees it.

    `output_prior` is the output length that the engine expects of a call without a prediction; `max_tokens` bounds it.
    `client_priority` orders calls without an urgency. `on_bad` receives the key of each label that is not taken as it is,
    and `OTHER` for an unknown key with our prefix."""
    reader = _Reader(labels, on_bad)
    budget_s, deadline_s = reader.ahead("tg.budget_ms"), reader.ahead("tg.deadline_ms")
    predicted = reader.number("tg.out_pred")
    urgency = reader.number("tg.urgency")
    weight = reader.number("tg.weight")
    workflow = reader.text("tg.workflow")
    expected = int(predicted) if predicted is not None else output_prior
    call = Call(
        id=call_id,
        arrived_at_s=now,
        prompt_tokens=prompt_tokens,
        output_predicted=max_tokens if expected is None else max(min(expected, max_tokens), 1),
        output_upper=int(reader.number("tg.out_upper") or 0),
        tenant=reader.text("tg.tenant") or "",
        slo_class=reader.text("tg.class") or "",
        weight=1.0 if weight is None else weight,
        yields=reader.number("tg.yields") == 1,
        owed=reader.number("tg.owed") == 1,
        ahead=reader.number("tg.ahead") == 1,
        urgency=DEFAULT_URGENCY if urgency is None else int(urgency),
        client_priority=client_priority if urgency is None else 0.0,
        client_arrived_s=client_arrived_s,
        ttft_s=reader.seconds("tg.ttft_ms"),
        tpot_s=reader.seconds("tg.tpot_ms"),
        due_at_s=None if budget_s is None else now + budget_s,
        deadline_at_s=None if deadline_s is None else now + deadline_s,
        left_s=reader.seconds("tg.left_ms") or 0.0,
        workflow=WorkflowId(workflow) if workflow else None,
        stage=reader.text("tg.stage"),
        session=reader.text("tg.session"),
        group=reader.text("tg.relquery"),
        group_size=int(reader.number("tg.relquery_size") or 0),
        tool=reader.text("tg.tool"),
        tool_s=reader.seconds("tg.tool_ms"),
        tool_return_tokens=int(reader.number("tg.tool_return") or 0),
    )
    reader.report_unknown()
    return call


class _Reader:
    """The labels of one call, and the keys that were read."""

    def __init__(self, labels: Mapping[str, object], on_bad: Callable[[str], object] | None) -> None:
        self._labels = labels
        self._on_bad = on_bad
        self._left = {key for key in labels if isinstance(key, str) and key.startswith(PREFIX)} if labels else None

    def report_unknown(self) -> None:
        if self._left and self._on_bad is not None:
            for _ in self._left:
                self._on_bad(OTHER)

    def number(self, key: str) -> float | None:
        """The value; None if the key is absent, or its value is no number within the bounds of the key."""
        value = self._take(key)
        if value is None:
            return None
        number, label = _number(value), label_table.BY_KEY[key]
        if number is None or not label.low <= number <= label.high:
            self._bad(key)
            return None
        return number

    def seconds(self, key: str) -> float | None:
        """A duration that travels in milliseconds."""
        value = self.number(key)
        return None if value is None else value / 1000

    def ahead(self, key: str) -> float | None:
        """Seconds from now to an instant, which is at most `MOST_OVERDUE_S` ago."""
        value = self.seconds(key)
        if value is not None and value < -label_table.MOST_OVERDUE_S:
            self._bad(key)
            return -label_table.MOST_OVERDUE_S
        return value

    def text(self, key: str) -> str | None:
        """The text, cut to `label_table.MAX_TEXT` characters; None if the key is absent or its value is no text."""
        value = self._take(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            self._bad(key)
            return None
        if len(value) > label_table.MAX_TEXT:
            self._bad(key)
        return value[: label_table.MAX_TEXT]

    def _take(self, key: str) -> object:
        if self._left is None:
            return None
        self._left.discard(key)
        return self._labels.get(key)

    def _bad(self, key: str) -> None:
        if self._on_bad is not None:
            self._on_bad(key)


def _number(value: object) -> float | None:
    """The value as a finite number; None if it is none. A text that could cost much to read is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and len(value) > _NUMERAL:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _ms(instant_or_duration_s: float | None, now: float = 0.0) -> int | None:
    if instant_or_duration_s is None:
        return None
    return round(min(max((instant_or_duration_s - now) * 1000, -MOST_MS), MOST_MS))
