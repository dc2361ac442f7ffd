"""Which calls wait, how many of each kind, and whose wait ends first?

The order in which they leave is that of `waiting_queue`. Calls with the same engines to choose from are a group: where the
engines with room serve none of the groups that wait, the queue need not be searched. A tenant whose calls avoid an engine
(`admit.distrust`) has a part of each group for itself.
"""

import heapq
from typing import Any

from tidegate_policy.dispatch.call_records import Waiting
from tidegate_policy.model import Call, CallId, EngineId

Group = tuple[int, frozenset[EngineId]]
"""The identity of the engines that a call may go to, and the engines that have failed it."""

SLACK_EXPIRIES = 64
"""Expiries of calls that no longer wait, tolerated beyond one for each waiting call."""


class WaitingCalls:
    """What is remembered of the waiting calls."""

    def __init__(self) -> None:
        self.by_id: dict[CallId, Waiting] = {}
        self.by_class_and_tenant: dict[tuple[str, str], int] = {}
        """How many calls of each class and tenant wait; no entry is 0."""
        self.by_tenant: dict[str, int] = {}
        """How many calls of each tenant wait; no entry is 0."""
        self.by_group: dict[Group, int] = {}
        """How many calls of each group wait; no entry is 0."""
        self.by_group_and_tenant: dict[tuple[Group, str], int] = {}
        """How many calls of each group and tenant wait; no entry is 0."""
        self._expiries: list[tuple[float, CallId]] = []
        """A heap of (expiry, call). Entries of calls that no longer wait are skipped, and removed when they are many."""

    def add(self, waiting: Waiting) -> None:
        """The call begins to wait."""
        call = waiting.call
        self.by_id[call.id] = waiting
        _more(self.by_class_and_tenant, (call.slo_class, call.tenant))
        _more(self.by_tenant, call.tenant)
        group = group_of(waiting)
        _more(self.by_group, group)
        _more(self.by_group_and_tenant, (group, call.tenant))
        heapq.heappush(self._expiries, (waiting.expires_at_s, call.id))
        if len(self._expiries) > 2 * len(self.by_id) + SLACK_EXPIRIES:
            self._expiries = [entry for entry in self._expiries if self._still_waits(*entry)]
            heapq.heapify(self._expiries)

    def pop(self, call: Call) -> Waiting:
        """The call waits no more; what was remembered of it. Raises `KeyError`."""
        waiting = self.by_id.pop(call.id)
        _less(self.by_class_and_tenant, (call.slo_class, call.tenant))
        _less(self.by_tenant, call.tenant)
        group = group_of(waiting)
        _less(self.by_group, group)
        _less(self.by_group_and_tenant, (group, call.tenant))
        return waiting

    def since_s(self) -> dict[str, float]:
        """By class: the arrival of the call that began to wait first."""
        found: dict[str, float] = {}
        for waiting in self.by_id.values():
            found.setdefault(waiting.call.slo_class, waiting.call.arrived_at_s)
        return found

    def next_expiry_at_s(self) -> float | None:
        """The instant at which the first wait ends; None while no call waits."""
        while self._expiries and not self._still_waits(*self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pop_expiry(self) -> CallId:
        """The call whose wait ends at `next_expiry_at_s`. It waits until `pop`."""
        return heapq.heappop(self._expiries)[1]

    def _still_waits(self, expires_at_s: float, call_id: CallId) -> bool:
        waiting = self.by_id.get(call_id)
        return waiting is not None and waiting.expires_at_s == expires_at_s


class StuckCalls:
    """The calls of which one look at the queue has shown that the engines with room may serve none."""

    def __init__(self, waiting: WaitingCalls) -> None:
        self._waiting = waiting
        self._groups: set[Group] = set()
        self._parts: set[tuple[Group, str]] = set()
        """The parts that tenants have of the other groups."""

    def add(self, waiting: Waiting, *, by_distrust: bool) -> bool:
        """No engine with room may serve this call, so none may serve the others of its group; `by_distrust`: because its
        tenant avoids them, so that this is true of its tenant's calls alone. Returns whether every call that waits is
        stuck."""
        group = group_of(waiting)
        if not by_distrust:
            self._groups.add(group)
        else:
            self._parts.add((group, waiting.call.tenant))
        by_group, by_part = self._waiting.by_group, self._waiting.by_group_and_tenant
        stuck = sum([by_group.get(each, 0) for each in self._groups])
        stuck += sum([by_part.get(each, 0) for each in self._parts if each[0] not in self._groups])
        return stuck >= len(self._waiting.by_id)


def group_of(waiting: Waiting) -> Group:
    """The group of a call."""
    return id(waiting.only), waiting.avoid


def _more(counts: dict[Any, int], key: object) -> None:
    counts[key] = counts.get(key, 0) + 1


def _less(counts: dict[Any, int], key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
