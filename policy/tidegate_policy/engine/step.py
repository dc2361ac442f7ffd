"""The values of one engine step: the limits, the calls that run, the facts of a step, and the plan of the next.

The driver measures, `engine_core` completes the facts, regulators shape the plan, and the driver carries the plan out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed, QueuedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits with which the engine was started. A plan stays within them."""

    max_running: int
    """Calls that may run together."""
    max_step_tokens: int
    """Tokens of one step."""
    tokens_per_sequence: int = 1
    """Tokens that a decoding call needs in a step: one, and one for each speculative draft."""
    start_tokens: int = 1
    """Tokens that must be free in a step so that any waiting call can start. With chunked prefill this is one token, or
    one cache block where prefill must end at a block; without chunked prefill it is the longest possible prompt."""
    kv_tokens: int = 1_000_000
    """Tokens that the KV cache holds."""


class RunningCall(NamedTuple):
    """A call that runs, as it is now.

    It is a tuple because an engine with regulators makes one for each running call in each step."""

    call: Call
    cost: CostModel
    """The present estimate of the engine's costs."""
    kv_tokens: int
    """Its tokens in the KV cache."""
    uncached_tokens: int
    """Tokens of its prompt (and of its output, after a preemption) that must still be computed before it decodes; 0 =
    it decodes."""
    output_tokens: int
    """Output tokens that it has delivered."""
    first_at_s: float | None
    """The instant of its first output token; None = none yet."""
    protected: bool
    """It was preempted before and has delivered no token since, so another preemption would repeat lost work."""

    @property
    def decodes(self) -> bool:
        return self.uncached_tokens == 0

    @property
    def output_left(self) -> int:
        """Output tokens that are expected to follow."""
        return self.call.output_left(self.output_tokens)

    @property
    def item(self) -> QueuedRequest:
        """The call with the work that is left now. It is computed when it is asked for, because few regulators do."""
        service_s = self.cost.remaining_seconds(
            self.call, output_tokens=self.output_tokens, uncached_tokens=self.uncached_tokens
        )
        return QueuedRequest(call=self.call, service_s=service_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCall:
    """A call that left the engine."""

    call: Call
    output_tokens: int
    finished: bool
    """False = aborted or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step of the engine that has ended."""

    now: float
    step_s: float
    """Seconds that the step took; 0 when it computed nothing."""
    computed: Mapping[CallId, Computed]
    """The tokens that the step computed, by call."""
    preempted: tuple[CallId, ...]
    """Calls that were preempted since the facts before."""
    ended: tuple[EndedCall, ...]
    """Calls that ended since the facts before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step may do."""

    max_running: int
    """Bound of the calls that run together. It preempts no call that already runs."""
    max_step_tokens: int
    """Bound of the tokens of the step."""
    max_starts: int | None = None
    """Bound of the waiting calls that start in this step; None = no bound."""
    preempt: tuple[CallId, ...] = ()
    """Running calls that yield their place and their memory before this step. Ids that do not run are ignored."""
    paused: frozenset[CallId] = frozenset()
    """Running calls that compute nothing in this step and keep their memory."""
