"""What calls are in the engine: how many of each group, and how many that the gateway has marked."""

from collections import Counter

from tidegate_policy.model import Call


class CallCensus:
    """The counts of the calls that wait or run."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()
        """Calls of each group; a call without one is a group of its own."""
        self.yielding = 0
        """Calls whose prompts yield to those of other tenants."""
        self.owed = 0
        """Calls that are owed a place."""
        self.owed_by: Counter[str] = Counter()
        """Of each tenant."""
        self.first = 0
        """Calls that go before those of others: all that are owed a place, and those ahead of long prompts."""

    def add(self, call: Call) -> None:
        self.groups[group_of(call)] += 1
        self.yielding += call.yields
        if call.owed:
            self.owed += 1
            self.owed_by[call.tenant] += 1
        self.first += call.goes_first

    def remove(self, call: Call) -> None:
        group = group_of(call)
        self.groups[group] -= 1
        if not self.groups[group]:
            del self.groups[group]
        self.yielding -= call.yields
        if call.owed:
            self.owed -= 1
            self.owed_by[call.tenant] -= 1
            if not self.owed_by[call.tenant]:
                del self.owed_by[call.tenant]
        self.first -= call.goes_first


def group_of(call: Call) -> str:
    """The group of a call; a call without one is a group of its own."""
    return call.group or call.id
