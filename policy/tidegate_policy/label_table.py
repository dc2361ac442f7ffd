"""The one table of the labels that an engine reads: key, kind, bounds, default and meaning.

`labels` writes and reads by this table. `docs/labels.md` is made from it.
"""

from enum import StrEnum

from tidegate_policy import immutable
from tidegate_policy.model import DEFAULT_URGENCY, LEAST_URGENT, MOST_URGENT

MAX_TEXT = 256
"""Characters of a text that are read."""
MOST_OVERDUE_S = 600.0
"""A call counts as at most this late: a greater lead would put it before all calls that are really late."""
MAX_AHEAD_S = 1e9
LEAST_TPOT_S = 0.001
"""No target of a time per output token is shorter."""


class Kind(StrEnum):
    """How a value is read."""

    TEXT = "text"
    NUMBER = "number"
    WHOLE = "whole number"
    """The digits behind the point of a number are dropped."""
    DURATION = "milliseconds"
    AHEAD = "milliseconds from now"
    """A negative value is in the past."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Label:
    """One label."""

    key: str
    kind: Kind = Kind.TEXT
    low: float = 0.0
    high: float = 0.0
    """The least and the greatest value that is believed, in the unit of the label. Texts have none."""
    default: str
    """What the engine assumes without the label."""
    meaning: str


def _seconds(key: str, low_s: float, high_s: float, *, default: str, meaning: str, kind: Kind = Kind.DURATION) -> Label:
    return Label(key=key, kind=kind, low=low_s * 1000, high=high_s * 1000, default=default, meaning=meaning)


LABELS = (
    Label(key="tg.tenant", default="the tenant without a name", meaning="the tenant, between which policies share"),
    Label(
        key="tg.weight", kind=Kind.NUMBER, low=1e-3, high=1e3, default="1", meaning="the weight of the tenant among tenants"
    ),
    Label(
        key="tg.yields", kind=Kind.WHOLE, low=0, high=1, default="0",
        meaning="1 = the tenant sends too much, so the prompt is computed in small parts and behind the prompts of others",
    ),
    Label(
        key="tg.owed", kind=Kind.WHOLE, low=0, high=1, default="0",
        meaning="1 = others have places that are due to the tenant, so they yield memory, places and steps to the call",
    ),
    Label(
        key="tg.ahead", kind=Kind.WHOLE, low=0, high=1, default="0",
        meaning="1 = the prompt is short and the tenant keeps to its part, so long prompts of others yield steps to it",
    ),
    Label(key="tg.class", default="no class", meaning="the service class, by which reports count"),
    Label(
        key="tg.urgency", kind=Kind.WHOLE, low=MOST_URGENT, high=LEAST_URGENT,
        default=f"{DEFAULT_URGENCY}, and the `priority` of the request orders calls without this label",
        meaning="the level of urgency; 0 is the most urgent",
    ),
    _seconds(
        "tg.budget_ms", -MAX_AHEAD_S, MAX_AHEAD_S, kind=Kind.AHEAD, default="no due instant",
        meaning="the time until the call should finish, which deadline policies compare",
    ),
    _seconds(
        "tg.deadline_ms", -MAX_AHEAD_S, MAX_AHEAD_S, kind=Kind.AHEAD, default="no deadline",
        meaning="the time until the answer is worthless to the client",
    ),
    _seconds("tg.ttft_ms", 0.0, MAX_AHEAD_S, default="no target", meaning="the target of the time to the first token"),
    _seconds(
        "tg.tpot_ms", LEAST_TPOT_S, MAX_AHEAD_S, default="no target", meaning="the target of the time per output token"
    ),
    Label(
        key="tg.out_pred", kind=Kind.WHOLE, low=1, high=10_000_000,
        default="the mean of the calls that the engine has finished",
        meaning="the expected output tokens of a sequence; `max_tokens` bounds them further",
    ),
    Label(
        key="tg.out_upper", kind=Kind.WHOLE, low=1, high=10_000_000, default="unknown",
        meaning="the output tokens that few calls of this kind exceed",
    ),
    Label(key="tg.workflow", default="no workflow", meaning="the id of the workflow"),
    Label(key="tg.stage", default="no stage", meaning="the stage of the workflow"),
    _seconds(
        "tg.left_ms", 0.0, MAX_AHEAD_S, default="0", meaning="the time that the workflow is expected to take after the call"
    ),
    Label(key="tg.session", default="no session", meaning="the session, whose context may be held while a tool runs"),
    Label(key="tg.relquery", default="no group", meaning="the group of calls for which a client waits together"),
    Label(
        key="tg.relquery_size", kind=Kind.WHOLE, low=1, high=100_000, default="unknown", meaning="the calls of this group"
    ),
    Label(key="tg.tool", default="no tool", meaning="the tool that the client probably runs after the call"),
    _seconds("tg.tool_ms", 0.0, 86_400.0, default="unknown", meaning="the time that this tool is expected to run"),
    Label(
        key="tg.tool_return", kind=Kind.WHOLE, low=1, high=1_000_000, default="unknown",
        meaning="the tokens that the answer of the tool is expected to add to the next prompt",
    ),
)  # fmt: skip
BY_KEY = {label.key: label for label in LABELS}
LEAST_WEIGHT, MOST_WEIGHT = BY_KEY["tg.weight"].low, BY_KEY["tg.weight"].high
