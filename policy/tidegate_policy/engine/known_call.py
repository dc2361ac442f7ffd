"""What the engine core knows of one call, from its arrival to its end."""

from dataclasses import dataclass

from tidegate_policy.model import Call
from tidegate_policy.policies import Computed, QueuedRequest, token_counts


@dataclass(slots=True, eq=False)
class KnownCall:
    """A call in the engine. `item.service_s` is the work at its arrival or at its last preemption.

    `kv_tokens` is as old as the last snapshot that looked at the call."""

    item: QueuedRequest
    tokens: token_counts.TokenCounts
    """The tokens of all calls of the engine."""
    first_at_s: float | None = None
    """The instant of its first output token; None = none yet."""
    preempted_at_output: int = -1
    """Its output tokens at its last preemption; -1 = it was never preempted."""
    kv_tokens: int = 0
    """Its tokens in the KV cache."""

    @property
    def call(self) -> Call:
        return self.item.call

    @property
    def computed(self) -> Computed:
        """The tokens that steps computed for it so far."""
        return self.tokens.of(self.item.call.id)

    @property
    def output_tokens(self) -> int:
        """Output tokens that it has delivered."""
        return self.tokens.outputs(self.item.call.id)

    @property
    def uncached_tokens(self) -> int:
        """Tokens of its prompt (and of its output, after a preemption) that must still be computed before it decodes; 0 =
        it decodes."""
        # The last token of a decoding call is computed by the step that produces the next one.
        output_tokens = self.output_tokens
        uncached = self.item.call.prompt_tokens + output_tokens - self.kv_tokens
        return 0 if uncached <= (1 if output_tokens else 0) else uncached

    @property
    def decodes(self) -> bool:
        return self.uncached_tokens == 0

    @property
    def output_left(self) -> int:
        """Output tokens that are expected to follow."""
        return self.item.call.output_left(self.output_tokens)

    @property
    def protected(self) -> bool:
        """It was preempted before and has delivered no token since, so another preemption would repeat lost work."""
        return self.preempted_at_output >= self.output_tokens
