"""The running calls of an engine, kept up to date by events, so that a step looks at few of them.

Hundreds of calls run, and in most steps each of them delivers one more token. So the calls that decode are not looked at in
each step, and a bound of each call's rank moves with the steps instead of being computed again.
"""

import heapq
from collections.abc import Iterator, Mapping

from tidegate_policy import heap_order
from tidegate_policy.cost import CostModel
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.model import CallId
from tidegate_policy.policies import Policy, QueuedRequest

DRIFT = 0.01
"""Relative change of the seconds of a token after which the bounds are computed again."""
_SLACK = 64
_Bound = tuple[float, CallId]
"""The negative bound of a call's rank, less the seconds of the steps so far."""


class Batch:
    """The ledger."""

    def __init__(self) -> None:
        self.running: dict[CallId, int] = {}
        """The running calls in the order of their starts, with the number of the start."""
        self.filling: dict[CallId, None] = {}
        """Those that are not known to decode: they have just started, or computed a part of a prompt."""
        self.targets: dict[CallId, float] = {}
        """The calls that decode and have a target for their time per output token, with the target."""
        self.decoding: dict[CallId, int] = {}
        """The running calls that are not in `filling`, with their urgency."""
        self.starts = 0
        self.changes = 0
        """Changes of calls that were in the engine: their sizes may differ from before."""
        self.bounds = RankBounds()

    def start(self, call_id: CallId) -> None:
        """A waiting call runs."""
        self.starts += 1
        self.running[call_id] = self.starts
        self.filling[call_id] = None

    def decode(self, call: KnownCall) -> None:
        """A call has computed its prompt. It may have ended or wait again."""
        call_id = call.call.id
        if call_id in self.filling:
            del self.filling[call_id]
            self.decoding[call_id] = call.call.urgency
            if call.call.tpot_s is not None:
                self.targets[call_id] = call.call.tpot_s

    def fill(self, call_id: CallId) -> None:
        """A call computed a part of a prompt."""
        if call_id in self.running:
            self.filling[call_id] = None
            self.decoding.pop(call_id, None)
            self.targets.pop(call_id, None)

    def leave(self, call_id: CallId) -> None:
        """A call waits, or has ended."""
        if self.running.pop(call_id, None) is not None:
            self.filling.pop(call_id, None)
            self.decoding.pop(call_id, None)
            self.targets.pop(call_id, None)
            self.bounds.forget(call_id)

    def change(self, call_id: CallId) -> None:
        """A call has changed."""
        self.changes += 1
        self.fill(call_id)
        self.bounds.clear()

    def started_after(self, number: int) -> Iterator[CallId]:
        """The running calls that started after the start `number`."""
        for call_id, started in reversed(self.running.items()):
            if started <= number:
                break
            yield call_id


class RankBounds:
    """A rank that each running call does not exceed, under a policy with `rank_falls`.

    The work that is left of a call takes at least the steps of all its tokens but one. A bound is kept as it would be if
    the call had delivered the most tokens that any call has delivered since, so progress changes no bound."""

    def __init__(self) -> None:
        self._steps_s = 0.0
        """Seconds of the steps so far, by the most tokens that a call got in each."""
        self._token_s = 0.0
        """A lower bound of the seconds of a token."""
        self._added = 0
        """The number of the last start whose call has a bound."""
        self._bounds: dict[CallId, _Bound] = {}
        self._heap: list[_Bound] = []
        """An entry counts while it is the present bound of its call."""

    def on_step(self, tokens: int) -> None:
        """Each call got at most `tokens` output tokens."""
        self._steps_s += tokens * self._token_s

    def forget(self, call_id: CallId) -> None:
        self._bounds.pop(call_id, None)

    def clear(self) -> None:
        """The policy or a call has changed."""
        self._bounds.clear()
        self._heap.clear()
        self._added = 0

    def highest(
        self, batch: Batch, calls: Mapping[CallId, KnownCall], policy: Policy, cost: CostModel
    ) -> Iterator[tuple[float, KnownCall]]:
        """The running calls with their bounds, the highest first."""
        token_s = cost.step_s + cost.decode_s
        if not self._token_s <= token_s <= self._token_s * (1 + 2 * DRIFT):
            self.clear()
            self._token_s = token_s * (1 - DRIFT)
            self._steps_s = 0.0
        elif len(self._heap) > 2 * len(batch.running) + _SLACK:
            self.clear()
        for call_id in batch.started_after(self._added):
            known = calls[call_id]
            end = policy.rank(QueuedRequest(call=known.call, service_s=0.0))[-1]
            steps = known.call.output_predicted - 1 - known.output_tokens
            bound = self._bounds[call_id] = (self._steps_s + self._token_s * steps - end, call_id)
            heapq.heappush(self._heap, bound)
        self._added = batch.starts
        bounds = self._bounds
        for bound in heap_order.ascending(self._heap):
            if bounds.get(bound[1]) is bound:
                yield self._steps_s - bound[0], calls[bound[1]]
