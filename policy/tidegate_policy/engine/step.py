"""The values of one engine step: the limits, the facts of a step, and the plan of the next.

The driver measures, `engine_core` completes the facts, regulators shape the plan, and the driver carries the plan out.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_policy import immutable
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed


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


@immutable.value(frozen=True, slots=True, kw_only=True)
class EndedCall:
    """A call that left the engine."""

    call: Call
    output_tokens: int
    finished: bool
    """False = aborted or failed."""


@immutable.value(frozen=True, slots=True, kw_only=True)
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


@immutable.value(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step may do."""

    max_running: int
    """Bound of the calls that run together. It preempts no call that already runs."""
    max_step_tokens: int
    """Bound of the tokens of the step."""
    max_starts: int | None = None
    """Bound of the waiting calls that start in this step; None = no bound."""
    max_call_tokens: int | None = None
    """Bound of the tokens that one call computes in this step; None = no bound."""
    preempt: tuple[CallId, ...] = ()
    """Running calls that yield their place and their memory before this step. Ids that do not run are ignored."""
    paused: frozenset[CallId] = frozenset()
    """Running calls that compute nothing in this step and keep their memory."""

    def at_most(
        self,
        *,
        running: int = sys.maxsize,
        step_tokens: int = sys.maxsize,
        starts: int = sys.maxsize,
        call_tokens: int = sys.maxsize,
    ) -> "StepPlan":
        """The plan with no greater bounds than these."""
        present = sys.maxsize if self.max_starts is None else self.max_starts
        of_call = sys.maxsize if self.max_call_tokens is None else self.max_call_tokens
        within = self.max_running <= running and self.max_step_tokens <= step_tokens
        if within and present <= starts and of_call <= call_tokens:
            return self
        return StepPlan(
            max_running=min(self.max_running, running),
            max_step_tokens=min(self.max_step_tokens, step_tokens),
            max_starts=starts if starts < present else self.max_starts,
            max_call_tokens=call_tokens if call_tokens < of_call else self.max_call_tokens,
            preempt=self.preempt,
            paused=self.paused,
        )
