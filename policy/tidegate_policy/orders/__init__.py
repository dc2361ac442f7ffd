"""The policy pool: which waiting call goes next?

An order gives each call a *lane* and, within the lane, an immutable *key* (smaller goes first; ties go by arrival in the
queue). A key never depends on the current time, so a queue is a heap that needs no re-sorting while time passes. An
order with several lanes also owns a *gate*, the only state there is, which says whose turn it is. `waiting` keeps the
queue, `ORDERS` is the one list of names.
"""

from collections.abc import Callable

from tidegate_policy.orders.contract import FreeGate, Gate, Key, Order, Ticket
from tidegate_policy.orders.edf import Edf
from tidegate_policy.orders.fcfs import Fcfs
from tidegate_policy.orders.priority import Priority
from tidegate_policy.orders.sjf import Sjf
from tidegate_policy.orders.two_lane import TwoLane
from tidegate_policy.orders.urgency import Urgency

ORDERS: dict[str, Callable[[], Order]] = {
    "fcfs": Fcfs,
    "edf": Edf,
    "sjf": Sjf,
    "two-lane": TwoLane,
    "urgency": Urgency,
    "priority": Priority,
}


class UnknownOrder(ValueError):
    """A policy name that is not in the pool; the message lists those that are."""


def named(name: str) -> Order:
    """A fresh order (gate state included) by its public name. Raises `UnknownOrder`."""
    try:
        return ORDERS[name]()
    except KeyError:
        raise UnknownOrder(f"unknown policy {name!r}; known are {', '.join(sorted(ORDERS))}") from None


__all__ = ["ORDERS", "FreeGate", "Gate", "Key", "Order", "Ticket", "UnknownOrder", "named"]
