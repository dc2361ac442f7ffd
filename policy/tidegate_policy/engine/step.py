"""The facts of one engine step, and the plan of the next.

The driver measures, `engine_core` completes the facts, regulators shape the plan, and the driver carries the plan out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_policy.model import CallId
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step of the engine, and the engine just after it."""

    now: float
    step_s: float
    """Seconds that the step took; 0 when it computed nothing."""
    computed: Mapping[CallId, Computed]
    """The tokens that the step computed, by call."""
    running: tuple[CallId, ...]
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    preempted: tuple[CallId, ...]
    """Calls that were preempted since the facts before."""
    ended: tuple[CallId, ...]
    """Calls that ended since the facts before."""
    limits: EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step may do."""

    max_running: int
    """Bound of the calls that run together. It preempts no call that already runs."""
    max_step_tokens: int
    """Bound of the tokens of the step."""
    max_starts: int | None = None
    """Bound of the waiting calls that start in this one step; None = no bound."""
    preempt: tuple[CallId, ...] = ()
    """Running calls that must yield before this one step. Ids of calls that do not run are ignored."""
    keep: frozenset[CallId] = frozenset()
    """Calls whose KV blocks stay in memory when they end, until a later plan no longer names them."""
