"""`augmented`: the call that occupies the least KV memory over time goes first (AugServe 4.3).

Stage I values a call by its predictions when it arrives. Stage II values the next call of its session by what the tool
really returned and by what the prefix cache still holds. A session is one request in the paper, and each of its calls is a
request here, so the second stage is the value of the returning call. The treatment of the context while the tool runs is
not decided here (`engine/session_hold.py`); the value only assumes the treatment that wastes least.

Printed eq 26 adds the waiting time to a value of which the lowest goes first, so waiting would lower the priority. Here the
waiting time lowers the value. The value V, in seconds of the whole cache, is brought to `V / (V + reference_s)`, so that it
cannot outgrow the waiting time: a call stands `patience_s` times this number behind the instant at which it began to wait.
The instant is constant while the call waits, so waiting changes no key.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
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

MAX_SESSIONS = 4096
"""Sessions whose context length is remembered between calls; the session that ended a call first is forgotten first."""
PROBES_PER_EVENT = 8
MAX_TOOL_S = 86400.0


@dataclass(slots=True, eq=False)
class _Known:
    """A call from its arrival to its end; without a session and a tool, from its first start."""

    session: str | None
    prompt_tokens: int
    since_s: float
    """The instant at which the call was last scheduled, else its arrival (eq 26)."""
    total: int
    """Context tokens of the session before this call."""
    others: int
    """Context tokens of the calls that ran when this call arrived."""
    cached: int = 0
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
        self._sessions: OrderedDict[str, int] = OrderedDict()
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
        """The value of a running call counts only the output that is left, on the context that it has."""
        call, cost = item.call, self.context.cost()
        done = self._tokens.outputs(call.id)
        left = max(call.output_predicted - done, 1) * call.sequences
        value_s = cost.step_s * left * (call.prompt_tokens + done + left / 2) / cost.kv_tokens
        return (call.arrived_at_s + self._patience_s * value_s / (value_s + self._reference_s),)

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
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        known = self._stop(call_id)
        if known is None:
            return NONE_CHANGED
        del self._calls[call_id]
        output_tokens = self._tokens.outputs(call_id)
        self._tokens.forget(call_id)
        if known.session is not None and output_tokens:
            self._sessions[known.session] = known.prompt_tokens + output_tokens
            self._sessions.move_to_end(known.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return NONE_CHANGED

    def _new(self, item: QueuedRequest) -> _Known:
        call = item.call
        total = 0 if call.session is None else min(self._sessions.get(call.session, 0), call.prompt_tokens)
        return _Known(call.session, call.prompt_tokens, call.arrived_at_s, total, self._running_context)

    def _stop(self, call_id: CallId) -> _Known | None:
        known = self._calls.get(call_id)
        if known is not None and known.runs:
            known.runs = False
            self._running_context -= known.prompt_tokens
        return known

    def _key(self, item: QueuedRequest, cost: CostModel) -> Key:
        call = item.call
        known = self._calls.get(call.id)
        if known is None:
            known = self._new(item)
        total = known.total
        value_s = augmented_value.value_s(
            cost,
            total=total,
            returned=call.prompt_tokens - total,
            output=call.output_predicted * call.sequences,
            cached=min(known.cached, total) if total else 0,
            tool_s=min(call.tool_s, MAX_TOOL_S) if call.tool_s else 0.0,
            others=known.others,
            swap_tokens=self._swap_tokens,
        )
        return (known.since_s + self._patience_s * value_s / (value_s + self._reference_s),)

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
