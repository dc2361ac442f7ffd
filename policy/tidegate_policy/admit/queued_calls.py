"""Which calls of each tenant wait for an engine? They have entered, and have no place at an engine yet."""

import math
from collections.abc import Callable, Iterator

from tidegate_policy.model import Call, CallId

FEW, EACH_S = 32, 5e-5
"""What is found for more tenants counts for so long for each of them, so that it takes a bounded part of the time."""


class QueuedCalls:
    """The calls in the queue of one gateway."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[CallId, int]] = {}
        """The calls of each tenant in the order in which they entered, and their sequences; no entry is empty."""
        self._sequences: dict[str, int] = {}
        """Of each of these tenants."""
        self.sequences = 0
        self._look_at_s = -math.inf
        """The earliest instant of the next look."""

    def add(self, call: Call) -> None:
        """The call begins to wait."""
        self._calls.setdefault(call.tenant, {})[call.id] = call.sequences
        self._sequences[call.tenant] = self._sequences.get(call.tenant, 0) + call.sequences
        self.sequences += call.sequences

    def remove(self, call: Call) -> None:
        """The call goes to an engine, or leaves, if it waits."""
        calls = self._calls.get(call.tenant)
        if calls is None or call.id not in calls:
            return
        sequences = calls.pop(call.id)
        self.sequences -= sequences
        self._sequences[call.tenant] -= sequences
        if not calls:
            del self._calls[call.tenant], self._sequences[call.tenant]

    def sequences_of(self, tenant: str) -> int:
        """Sequences of a tenant."""
        return self._sequences.get(tenant, 0)

    def owed(self, now: float, lacks: Callable[[str], bool]) -> Iterator[CallId]:
        """The calls of the tenants that lack places. The caller sends each to an engine before it takes the next one; the
        turn of a tenant ends with a call that it does not send. While many tenants wait, looks are rare."""
        if now < self._look_at_s:
            return
        if len(self._calls) > FEW:
            self._look_at_s = now + len(self._calls) * EACH_S
        for tenant in list(self._calls):
            sent = True
            while sent and (calls := self._calls.get(tenant)) and lacks(tenant):
                call = next(iter(calls))
                yield call
                sent = call not in calls
