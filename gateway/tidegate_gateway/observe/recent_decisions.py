"""Which decisions were made last? A short list for people, filled from call records."""

import collections
from collections.abc import Iterator

from tidegate_gateway.observe import call_record
from tidegate_policy import immutable
from tidegate_policy.model import CallId, Decision

REMEMBERED = 50


@immutable.value(frozen=True, slots=True, kw_only=True)
class RecentDecision:
    """One call that was sent to an engine."""

    call: CallId
    sent_at_s: float
    tenant: str
    slo_class: str
    attempt: int
    queue_s: float
    """Seconds that it had waited in the gateway."""
    decision: Decision


class RecentDecisions:
    """The last decisions, oldest first."""

    def __init__(self) -> None:
        self._decisions: collections.deque[RecentDecision] = collections.deque(maxlen=REMEMBERED)

    def __iter__(self) -> Iterator[RecentDecision]:
        return iter(self._decisions)

    def __reversed__(self) -> Iterator[RecentDecision]:
        return reversed(self._decisions)

    def remember(self, record: call_record.CallRecord) -> None:
        """The call of this record was just sent."""
        if record.call is None or record.decision is None or record.sent_at_s is None:
            return
        self._decisions.append(
            RecentDecision(
                call=record.call.id,
                sent_at_s=record.sent_at_s,
                tenant=record.call.tenant,
                slo_class=record.call.slo_class,
                attempt=record.attempts,
                queue_s=record.queue_s,
                decision=record.decision,
            )
        )
