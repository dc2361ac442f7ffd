"""The nouns that every decision is made of.

All instants are monotonic seconds on the clock of the process that holds the value; between processes only durations
travel. Nothing here knows HTTP, vLLM or Kubernetes. `cost` turns these into seconds, `orders` into a sequence.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

CallId = NewType("CallId", str)
EngineId = NewType("EngineId", str)
WorkflowId = NewType("WorkflowId", str)

MOST_URGENT = 0
LEAST_URGENT = 4
DEFAULT_URGENCY = 2

PATIENCE_S = 600.0
"""Seconds after which a call without any deadline competes as if it were due: it goes last, but it ages."""


class DropReason(StrEnum):
    """Why a call left without an answer. A closed set: each has one HTTP status, one gRPC code and one sentence."""

    SATURATED = "saturated"
    TTL_EXPIRED = "ttl-expired"
    DEADLINE_UNREACHABLE = "deadline-unreachable"
    TENANT_LIMIT = "tenant-limit"
    DRAINING = "draining"
    NO_ENGINES = "no-engines"
    EVICTED = "evicted"
    STORE_UNAVAILABLE = "store-unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call as the schedulers see it: sizes, promises, and the calls that it belongs to, never its text."""

    id: CallId
    arrival_s: float
    """Instant at which the holder of this value received the call."""
    prompt_tokens: int
    """Tokens of all its prompts."""
    output_predicted: int
    """Tokens expected of each sequence; the point estimate that costs are computed with."""
    output_upper: int = 0
    """Tokens of a sequence that few calls of its kind exceed; 0 = unknown. Engines receive it; no policy reads it."""
    sequences: int = 1
    """Sequences that an engine runs for it side by side: `n` times its prompts."""
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    weight: float = 1.0
    """Fair share of the tenant relative to the others."""
    urgency: int = DEFAULT_URGENCY
    """0 (most urgent) to 4, already bounded by the tenant's entitlement."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    due_s: float | None = None
    """Instant by which this call should finish: the earlier of its stage budget and its own deadline (HexGen eq 5)."""
    deadline_s: float | None = None
    """Instant after which the answer is worthless to the client (its own or its workflow's deadline)."""
    left_s: float = 0.0
    """Seconds of work expected in the workflow after this call. It travels to engines; no policy reads it yet."""
    workflow: WorkflowId | None = None
    stage: str | None = None
    session: str | None = None
    group: str | None = None
    """The group of calls that its client waits for together (RelServe's relQuery)."""
    group_size: int = 0
    """Calls of the whole group; 0 = unknown."""
    tool: str | None = None
    """The tool that the client probably runs after this call, before the next call of the session."""
    tool_s: float | None = None
    """Seconds that this tool is expected to run."""
    tool_return_tokens: int = 0
    """Tokens that the tool's answer is expected to add to the next prompt; 0 = unknown."""
    prefix: tuple[tuple[int, int], ...] = ()
    """(hash, tokens) of the leading parts of the prompt that other prompts may share, in order."""

    @property
    def due_or_patience_s(self) -> float:
        """The instant that deadline policies compare: `due_s`, else arrival plus `PATIENCE_S`."""
        return self.arrival_s + PATIENCE_S if self.due_s is None else self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Work promised to an engine and not yet done, in integers so that it returns to exactly zero."""

    calls: int = 0
    """A call counts once for each of its sequences: each takes a place in the batch."""
    work_us: int = 0
    """Microseconds of work that batching cannot share: prefill, per-request decode and KV reads."""
    output_tokens: int = 0
    """Decode tokens still expected; each step of the batch also costs the engine's fixed step time."""

    def __add__(self, other: "Backlog") -> "Backlog":
        return Backlog(
            calls=self.calls + other.calls,
            work_us=self.work_us + other.work_us,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: "Backlog") -> "Backlog":
        return Backlog(
            calls=self.calls - other.calls,
            work_us=self.work_us - other.work_us,
            output_tokens=self.output_tokens - other.output_tokens,
        )

    def __bool__(self) -> bool:
        return bool(self.calls or self.work_us or self.output_tokens)


NO_BACKLOG = Backlog()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """A stage of a workflow as the budget sees it."""

    name: str
    after: tuple[str, ...] = ()
    mean_s: float = 1.0
    """Seconds one pass of the stage takes, averaged over the live engines; its slowest parallel member counts."""
    passes: int = 1
    """How often it may still run, the pass that is next or under way included."""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A workflow's promise and what is left of it."""

    id: WorkflowId
    arrival_s: float
    deadline_s: float
    """Instant by which the last stage must have finished."""
    stages: tuple[StageState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which engine got a call and what was known at that moment; logged, traced and tested."""

    engine: EngineId
    rule: str
    queue_s: float
    """Predicted seconds before the call's own work starts on that engine."""
    service_s: float
    """Predicted seconds of the call itself on that engine (HexGen eq 2)."""
    slack_s: float | None
    """Seconds between the predicted finish and `due_s`; negative = predicted miss; None = no deadline."""
    scores: dict[EngineId, float] = field(default_factory=dict)
