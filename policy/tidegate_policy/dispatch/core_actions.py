"""What the dispatcher tells its driver to do with a call."""

from tidegate_policy import immutable
from tidegate_policy.model import Call, Decision, DropReason


@immutable.value(frozen=True, slots=True, kw_only=True)
class Send:
    """Send the call to the engine."""

    call: Call
    decision: Decision
    attempt: int
    cached_tokens: int = 0
    """Tokens of the prompt that the engine is believed to hold."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Shed:
    """Answer the call with the reason for which it is not served."""

    call: Call
    reason: DropReason
    retry_after_s: float
    """Seconds after which a new attempt makes sense; at least one."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The call is not tried again; answer it with the failure of its last engine."""

    call: Call


Action = Send | Shed | GiveUp
