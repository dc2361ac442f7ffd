"""The values that every decision reads: calls, backlogs, workflows, decisions.

All instants are monotonic seconds on the clock of the process that holds the value. Only durations travel between
processes. This module knows nothing of HTTP, vLLM or Kubernetes. `cost` turns a call into seconds; `policies` order
calls.
"""

from dataclasses import field
from enum import StrEnum
from typing import NewType

from tidegate_policy import immutable

CallId = NewType("CallId", str)
EngineId = NewType("EngineId", str)
WorkflowId = NewType("WorkflowId", str)

MOST_URGENT = 0
LEAST_URGENT = 4
DEFAULT_URGENCY = 2

PATIENCE_S = 600.0
"""A call without a deadline competes as if it were due this many seconds after its arrival."""


class DropReason(StrEnum):
    """Why a call was shed. The set is closed: each reason has one HTTP status, one gRPC code and one sentence."""

    SATURATED = "saturated"
    TTL_EXPIRED = "ttl-expired"
    DEADLINE_UNREACHABLE = "deadline-unreachable"
    TENANT_LIMIT = "tenant-limit"
    DRAINING = "draining"
    NO_ENGINES = "no-engines"
    EVICTED = "evicted"
    STORE_UNAVAILABLE = "store-unavailable"


@immutable.value(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call as the schedulers see it: sizes, promises, and the calls that it belongs to, never its text."""

    id: CallId
    arrived_at_s: float
    """The instant at which the process that holds this value received the call."""
    prompt_tokens: int
    """Tokens of all its prompts."""
    output_predicted: int
    """Expected output tokens of each sequence: the point estimate from which costs are computed."""
    output_upper: int = 0
    """Tokens of a sequence that few calls of its kind exceed; 0 = unknown. Engines receive it; no policy reads it."""
    sequences: int = 1
    """Sequences that an engine runs for it side by side: `n` times its prompts."""
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    weight: float = 1.0
    """Fair share of the tenant relative to the others."""
    yields: bool = False
    """Its tenant floods the pool, or its prompt is long and its tenant sends more than its part, so an engine computes the
    prompt in small parts and behind the prompts of others."""
    owed: bool = False
    """Its tenant keeps to its bound while another one has more than its own, or to its part while another one floods the
    pool, or has little of full engines. It goes first, and others yield memory and places to it, and steps unless it
    yields itself: then it starts at once, and its prompt is computed behind those of others."""
    ahead: bool = False
    """Its prompt is short, its tenant keeps to its part, and engines compute long prompts of others. It goes first in its
    lane, and others yield steps to it."""
    urgency: int = DEFAULT_URGENCY
    """0 (most urgent) to 4, within the tenant's entitlement."""
    client_priority: float = 0.0
    """The number by which a client without labels orders its calls in one engine; the lowest goes first."""
    client_arrived_s: float = 0.0
    """The instant of arrival on the clock of the engine's own server. It orders calls of one `client_priority`."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    due_at_s: float | None = None
    """The instant by which the call should finish: the earlier of its stage's share and its own deadline (HexGen eq 5)."""
    deadline_at_s: float | None = None
    """The instant after which the answer is worthless to the client: the call's own deadline or its workflow's."""
    left_s: float = 0.0
    """Seconds of work expected in the workflow after this call. It travels to engines, where `llf` reads it."""
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
    blocks: tuple[int, ...] = ()
    """The chained hashes of the leading blocks of the prompt: each stands for its block and all before it."""
    block_tokens: float = 0.0
    """Tokens of one of these blocks, estimated where the gateway counts bytes."""

    @property
    def turn(self) -> int:
        """The calls of the least turn go first, whatever the policy."""
        return int(self.yields) - 2 * self.goes_first

    @property
    def goes_first(self) -> bool:
        """Whether it goes before the calls of others, and their prompts yield steps to it."""
        return self.owed or self.ahead

    def output_left(self, output_tokens: int) -> int:
        """Output tokens that are expected to follow after `output_tokens`: at least one. A call beyond its prediction is
        expected to stop half way to the upper bound."""
        if output_tokens < self.output_predicted:
            return self.output_predicted - output_tokens
        return max((self.output_upper - output_tokens) // 2, 1)

    @property
    def due_or_patience_at_s(self) -> float:
        """The instant that deadline policies compare: `due_at_s`, else arrival plus `PATIENCE_S`. A call that is due before
        its arrival counts as at most `PATIENCE_S` late, so that no false instant passes all other calls."""
        return self.arrived_at_s + PATIENCE_S if self.due_at_s is None else self.bounded_at_s(self.due_at_s)

    def bounded_at_s(self, due_at_s: float) -> float:
        """A due instant of the call, at most `PATIENCE_S` before its arrival."""
        return max(due_at_s, self.arrived_at_s - PATIENCE_S)


@immutable.value(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Work that was sent to an engine and has not been done, in integers, so that it returns to exactly zero."""

    calls: int = 0
    """Sequences: a call counts once for each of its sequences, because each takes a place in the batch."""
    work_us: int = 0
    """Microseconds of work that batching cannot share: prefill, decode for each sequence, and KV reads."""
    output_tokens: int = 0
    """Output tokens that are still expected. Each step of the batch also costs the engine's fixed step time."""

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


@immutable.value(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A call in one particular scheduler, with the work that the scheduler predicts for it."""

    call: Call
    service_s: float
    """Predicted seconds of work from here to the last token, on this engine (or the mean engine, in the gateway)."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class StageState:
    """A stage of a workflow as `budget` reads it."""

    name: str
    after: tuple[str, ...] = ()
    mean_s: float = 1.0
    """Seconds of one pass of the stage, averaged over the live engines. The slowest parallel call counts."""
    passes: int = 1
    """Passes that may still run, including the pass that is next or running."""
    done: bool = False


@immutable.value(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A workflow's deadline and its stages."""

    id: WorkflowId
    deadline_at_s: float
    """The instant by which the last stage must have finished."""
    stages: tuple[StageState, ...] = ()


@immutable.value(frozen=True, slots=True, kw_only=True)
class Decision:
    """The engine of a call, and the predictions at the moment of the decision."""

    engine: EngineId
    rule: str
    queue_s: float
    """Predicted seconds until the engine has finished its backlog."""
    service_s: float
    """Predicted seconds of the call itself on that engine (HexGen eq 2)."""
    shared_s: float
    """Predicted seconds by which the other calls on the engine delay it: their work that batching cannot share."""
    slack_s: float | None
    """Seconds between the predicted finish and `due_at_s`. Negative = a predicted miss; None = no deadline."""
    scores: dict[EngineId, float] = field(default_factory=dict)
