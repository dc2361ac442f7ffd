"""What happened to one call? The record that its admission, placement and relay write, and that everything else reads.

Metrics, spans, the log line, the list of recent decisions and learning read this record only. Instants are seconds on the
gateway's clock. None says that the call did not get that far.
"""

from dataclasses import dataclass

from tidegate_policy import gateway_core
from tidegate_policy.model import Call, Decision, EngineId


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One call from its arrival to its end."""

    # Written when the request has been parsed.
    arrived_at_s: float
    operation: str
    """The endpoint's `gen_ai.operation.name`."""
    model: str
    stream: bool
    slo_class: str = ""
    tenant: str = ""

    # Written by admission.
    has_target: bool = False
    """Something was promised for the call: a first token, a pace, an end, or the end of its workflow."""
    admitted_at_s: float | None = None
    call: Call | None = None

    # Written by placement.
    sent_at_s: float | None = None
    """When the call left for its last engine."""
    dispatch_s: float | None = None
    """Seconds from arrival to a place at an engine, for a call that did not have to wait: the cost of the gateway
    itself."""
    engine: EngineId | None = None
    decision: Decision | None = None
    attempts: int = 0

    # Written by the relay.
    first_token_at_s: float | None = None
    """The first token of a stream, or the whole answer."""
    finished_at_s: float | None = None
    """The last token."""
    prompt_tokens: int | None = None
    """As the engine counted them, within what the request can have."""
    output_tokens: int | None = None
    tokens: int = 0
    """Generated tokens: the engine's count, or the events of the stream until the engine has counted."""
    tool: str | None = None
    """The name of the tool that the answer invokes; "" = none, None = not known."""
    outcome: str = "cancelled"
    """ok, cancelled, rejected (the engine's 4xx) or the code of an error."""

    # Written at the end.
    ended_at_s: float | None = None
    shed: bool = False
    """The gateway refused the call for lack of room or time."""
    failure: str | None = None
    """The code of the error that the client got instead of an answer, or in the middle of it."""

    @property
    def queue_s(self) -> float:
        """Seconds that the call waited in the gateway."""
        return 0.0 if self.sent_at_s is None else self.sent_at_s - self.arrived_at_s

    @property
    def slack_s(self) -> float | None:
        """Seconds to spare as predicted when the call was sent; None without a deadline."""
        return None if self.decision is None else self.decision.slack_s

    def result(self, *, ok: bool, rejected: bool = False) -> gateway_core.CallResult:
        """The call's end as the gateway core learns from it."""
        return gateway_core.CallResult(
            ok=ok,
            rejected=rejected,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finished_at_s=self.finished_at_s,
            streamed=self.stream,
            tool=self.tool,
        )
