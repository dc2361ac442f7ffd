"""What the engine core knows of one call, from its arrival to its end."""

from dataclasses import dataclass

from tidegate_policy.model import Call
from tidegate_policy.policies import QueuedRequest


@dataclass(slots=True, eq=False)
class KnownCall:
    """A call in the engine. `item.service_s` is the work at its arrival or at its last preemption.

    `kv_tokens` and `decodes` are those of the last snapshot that listed the running calls."""

    item: QueuedRequest
    prompt_tokens: int = 0
    """Prompt tokens that steps computed for it so far."""
    output_tokens: int = 0
    first_at_s: float | None = None
    """The instant of its first output token; None = none yet."""
    preempted_at_output: int = -1
    """Its output tokens at its last preemption; -1 = it was never preempted."""
    kv_tokens: int = 0
    """Its tokens in the KV cache."""
    decodes: bool = False
    """Its prompt is computed, and so is its output after a preemption. True until KV is lost or the prompt grows."""
    end_rank: float | None = None
    """Its rank once no work is left, under a policy with `rank_falls`; None = not computed yet."""

    @property
    def call(self) -> Call:
        return self.item.call

    @property
    def uncached_tokens(self) -> int:
        """Tokens of its prompt (and of its output, after a preemption) that must still be computed before it decodes; 0 =
        it decodes."""
        return 0 if self.decodes else max(self.item.call.prompt_tokens + self.output_tokens - self.kv_tokens, 0)

    @property
    def output_left(self) -> int:
        """Output tokens that are expected to follow."""
        return self.item.call.output_left(self.output_tokens)

    @property
    def protected(self) -> bool:
        """It was preempted before and has delivered no token since, so another preemption would repeat lost work."""
        return self.preempted_at_output >= self.output_tokens

    def see(self, kv_tokens: int) -> None:
        """The call runs with `kv_tokens` tokens in the KV cache."""
        self.kv_tokens = kv_tokens
        if not self.decodes:
            # The last token of a decoding call is computed by the step that produces the next one.
            last = 1 if self.output_tokens else 0
            self.decodes = self.item.call.prompt_tokens + self.output_tokens - kv_tokens <= last
