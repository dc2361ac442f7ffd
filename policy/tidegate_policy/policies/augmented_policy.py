"""`augmented`: the call that occupies the least KV memory over time goes first (AugServe 4.3).

Stage I values a call by its predictions when it arrives. Stage II values the next call of its session by what the tool
really returned and by what the prefix cache still holds. A session is one request in the paper, and each of its calls is a
request here, so the second stage is the value of the returning call. The treatment of the context while the tool runs is
not decided here (`engine/session_hold.py`); the value only assumes the treatment that wastes least.

Printed eq 26 adds the waiting time to a value of which the lowest goes first, so waiting would lower the priority. Here the
waiting time lowers the value. The value V, in seconds of the whole cache, is brought to `V / (V + reference_s)`, so that it
cannot outgrow the waiting time: a call stands `patience_s` times this number behind the instant at which it began to wait.
The instant is constant while the call waits, so waiting changes no key.

A running call was scheduled just now, so it has no waiting time: running calls rank among the victims by the value of the
work that is left of them. A preempted call waits by the same value, with the recomputation of its context added (eq 17).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import augmented_value, token_counts
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Computed,
    Key,
    Parameter,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
)
from tidegate_policy.tenant_memory import TenantMemory

MAX_SESSIONS = 4096
"""Sessions of all tenants whose context length is remembered between calls."""
PROBES_PER_EVENT = 8
MAX_TOOL_S = 86400.0


@dataclass(slots=True, eq=False)
class _Known:
    """A call from its arrival to its end; without a session and a tool, from its first start."""

    session: tuple[str, str] | None
    """Its tenant and its name."""
    prompt_tokens: int
    since_s: float
    """The instant at which the call was last scheduled, else its arrival (eq 26)."""
    total: int
    """Context tokens that the session built before this call, or this call before its last preemption."""
    others: int
    """Context tokens of the calls that ran when this call arrived."""
    cached: int = 0
    """Of these, the tokens that the prefix cache holds."""
    done: int = 0
    """Output tokens at the last preemption."""
    runs: bool = False


class Augmented(StaticPolicy):
    """The key is the instant at which the call began to wait, plus the seconds by which its value sets it back."""

    name = "augmented"
    PARAMETERS = (
        Parameter(
            name="patience_s",
            default=120.0,
            low=0.1,
            high=86400.0,
            unit="seconds",
            meaning="No call is set back by more than this, so a call that comes this much later cannot pass it.",
        ),
        Parameter(
            name="reference_s",
            default=0.1,
            low=1e-6,
            high=3600.0,
            unit="seconds of the whole cache",
            meaning="A call of this value is set back by half of the patience.",
        ),
        Parameter(
            name="swap_tokens",
            default=0.0,
            low=0.0,
            high=1e6,
            unit="tokens a step",
            meaning="KV that the engine can swap to the host in one step; 0 = the engine cannot swap.",
        ),
    )
    keys_change = True

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._patience_s = self.parameters["patience_s"]
        self._reference_s = self.parameters["reference_s"]
        self._swap_tokens = self.parameters["swap_tokens"]
        self._calls: dict[CallId, _Known] = {}
        self._sessions: TenantMemory[str, int] = TenantMemory(MAX_SESSIONS)
        """Context tokens of each session after its last call."""
        self._tokens = token_counts.TokenCounts()
        self._running_context = 0
        self._to_probe: list[CallId] = []
        """Calls that returned to their session, and whose cached context is not known yet."""

    def key(self, item: QueuedRequest) -> Key:
        return self._key(item, self.context.cost())

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        cost, calls = self.context.cost(), self._calls
        token_s, step_s, kv_tokens = augmented_value.prefill_token_s(cost), cost.step_s, cost.kv_tokens
        simple_value_s, patience_s, reference_s = augmented_value.simple_value_s, self._patience_s, self._reference_s
        keys: list[Key] = []
        for item in items:
            call = item.call
            if call.tool_s or call.id in calls:
                keys.append(self._key(item, cost))
                continue
            output = call.output_predicted * call.sequences
            value_s = simple_value_s(token_s, step_s, kv_tokens, call.prompt_tokens, output)
            keys.append((call.arrived_at_s + patience_s * value_s / (value_s + reference_s),))
        return keys

    def rank(self, item: QueuedRequest) -> Key:
        """The value of the work that is left of a call: its output, on the context that it has."""
        call, done = item.call, self._tokens.outputs(item.call.id)
        known, context = self._calls.get(call.id) or self._new(item), call.prompt_tokens + done
        return (self._value_s(call, self.context.cost(), known, total=context, cached=context, done=done),)

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        if item.call.session is None and not item.call.tool_s:
            return NONE_CHANGED  # its value reads nothing that is kept
        known = self._calls[item.call.id] = self._new(item)
        if known.total:
            self._to_probe.append(item.call.id)
        return self._probe() if self._to_probe else NONE_CHANGED

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        known = self._calls.get(item.call.id)
        if known is None:
            known = self._calls[item.call.id] = self._new(item)
        if not known.runs:
            known.runs = True
            self._running_context += known.prompt_tokens
        return NONE_CHANGED

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        self._tokens.add(computed)
        return self._probe() if self._to_probe else NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        known = self._stop(item.call.id)
        if known is not None:
            known.since_s = now
            known.done = self._tokens.outputs(item.call.id)
            known.total, known.cached = item.call.prompt_tokens + known.done, 0
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        known = self._stop(call_id)
        if known is None:
            return NONE_CHANGED
        del self._calls[call_id]
        output_tokens = self._tokens.outputs(call_id)
        self._tokens.forget(call_id)
        if known.session is not None and output_tokens:
            tenant, name = known.session
            self._sessions.put(tenant, name, known.prompt_tokens + output_tokens)
        return NONE_CHANGED

    def _new(self, item: QueuedRequest) -> _Known:
        call = item.call
        session = None if call.session is None else (call.tenant, call.session)
        total = 0 if session is None else min(self._sessions.get(session[0], session[1]) or 0, call.prompt_tokens)
        return _Known(session, call.prompt_tokens, call.arrived_at_s, total, self._running_context)

    def _stop(self, call_id: CallId) -> _Known | None:
        known = self._calls.get(call_id)
        if known is not None and known.runs:
            known.runs = False
            self._running_context -= known.prompt_tokens
        return known

    def _key(self, item: QueuedRequest, cost: CostModel) -> Key:
        known = self._calls.get(item.call.id) or self._new(item)
        cached = min(known.cached, known.total)
        value_s = self._value_s(item.call, cost, known, total=known.total, cached=cached, done=known.done)
        return (known.since_s + self._patience_s * value_s / (value_s + self._reference_s),)

    def _value_s(self, call: Call, cost: CostModel, known: _Known, *, total: int, cached: int, done: int) -> float:
        """Cache-seconds of a call that has delivered `done` output tokens, with `total` tokens of context before its next
        one, of which `cached` need not be computed again (eq 9-25)."""
        return augmented_value.value_s(
            cost,
            total=total,
            returned=max(call.prompt_tokens - total, 0),
            output=call.output_left(done) * call.sequences,
            cached=cached,
            tool_s=min(call.tool_s, MAX_TOOL_S) if call.tool_s else 0.0,
            others=known.others,
            swap_tokens=self._swap_tokens,
        )

    def _probe(self) -> Changed:
        """Looks up the cached context of calls that returned: the treatment that the engine really gave them (stage II)."""
        changed: list[CallId] = []
        for _ in range(min(len(self._to_probe), PROBES_PER_EVENT)):
            call_id = self._to_probe.pop()
            known = self._calls.get(call_id)
            if known is not None and not known.runs:
                known.cached = self.context.cached_tokens(call_id)
                changed.append(call_id)
        return changed
