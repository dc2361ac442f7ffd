"""What the engine core knows of one call, from its arrival to its end."""

from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.engine.step import RunningCall
from tidegate_policy.policies import QueuedRequest


@dataclass(slots=True)
class KnownCall:
    """A call in the engine. `item.service_s` is the work at its arrival or at its last preemption."""

    item: QueuedRequest
    prompt_tokens: int = 0
    """Prompt tokens that steps computed for it so far."""
    output_tokens: int = 0
    first_at_s: float | None = None
    preempted_at_output: int = -1
    """Its output tokens at its last preemption; -1 = it was never preempted."""

    def as_running(self, cost: CostModel, kv_tokens: int) -> RunningCall:
        """The call as it runs with `kv_tokens` tokens in the KV cache."""
        call = self.item.call
        # The last token of a decoding call is computed by the step that produces the next one.
        uncached = call.prompt_tokens + self.output_tokens - kv_tokens
        if self.output_tokens and uncached <= 1:
            uncached = 0
        return RunningCall(
            call,
            cost,
            kv_tokens,
            max(uncached, 0),
            self.output_tokens,
            self.first_at_s,
            self.preempted_at_output >= self.output_tokens,
        )
