"""`sjf`: the shortest job goes first. It gives the lowest mean latency; long calls pay for it under sustained overload.

The size of a call is its predicted work before it is served. Service does not change the size, so a preempted call keeps
its place among the sizes, and `srtf`, which compares the remaining work, differs from this policy after preemptions. Both
choose victims by the remaining work: the preemption of a long call that is nearly done wastes all its work.
"""

from tidegate_policy.model import CallId
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Key,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
)


class Sjf(StaticPolicy):
    """The key is the predicted work in seconds (HexGen eq 2)."""

    name = "sjf"

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._started: dict[CallId, float] = {}
        """The size of each call at its last start."""
        self._sizes: dict[CallId, float] = {}
        """The sizes of the calls that were preempted."""

    def key(self, item: QueuedRequest) -> Key:
        return (self._sizes.get(item.call.id, item.service_s),)

    def rank(self, item: QueuedRequest) -> Key:
        return (item.service_s,)

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        self._started[item.call.id] = item.service_s
        return NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        self._sizes.setdefault(item.call.id, self._started.get(item.call.id, item.service_s))
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        self._started.pop(call_id, None)
        self._sizes.pop(call_id, None)
        return NONE_CHANGED
