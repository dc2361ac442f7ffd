"""Which relQuery starts its next row, and when? The calls of other tenants go first.

`floor` rows of a tenant may always be under way, however many relQueries it has. Further rows start only while all of these
hold: few calls wait in the gateway, an engine has a free place that rows may take, and the rows under way do not yet keep
the engines busy. The next row belongs to the tenant with the fewest rows under way, tenants with equally many take turns,
and it belongs to the relQuery of that tenant with the fewest.

When rows keep the engines busy follows from their costs. A row alone keeps its engine busy for a part b of its time (its
prompt, and what each of its tokens costs beyond the fixed time of a step). For the rest, 1 - b, it uses steps that it can
share. n rows that share all steps keep the engine busy for n b / (n b + 1 - b) of the time. So n b = `SHARED` (1 - b) rows
use `SHARED` / (`SHARED` + 1) of the engine. More rows bring little more throughput, and the calls of others wait behind
their prompts. Hence few rows with long prompts and short answers are under way at a time, while rows with long answers fill
the batches.

The rows of one gateway are counted, so each gateway has a floor and a window of its own.
"""

from dataclasses import dataclass

SHARED = 6.0
"""Rows use so many times the fixed time of the steps that they share; with 6 they can use 86% of the engines."""
LEAST_BUSY = 2.0
"""Busy parts of the rows at each engine that are always allowed, so that the next row is there when one ends."""
LOWER_WEIGHT = 0.1
"""Weight of the newest row in the busy part of a relQuery's rows. A row with a higher part replaces it, so that long rows
behind short ones are noticed at once."""
FREE_PART = 8
"""Rows leave one place in so many free at each engine, and at least one place if the engine has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """The limits of one gateway."""

    window: int
    """Rows of one relQuery under way."""
    in_flight: int
    """Rows of all relQueries under way, floors aside; tenants share them equally, and so do the relQueries of a tenant."""
    floor: int
    """Rows of one tenant that may always be under way."""
    waiting: int
    """Calls that wait in the gateway, above which no rows beyond the floor start."""


@dataclass(slots=True)
class _RelQuery:
    tenant: str
    busy: float = 1.0
    """The part of its time for which a row keeps its engine busy; all of it while no row was answered."""
    answered: bool = False
    asked: int | None = None
    """When it asked for a turn for its next row, as a count; None = it does not ask."""


class RowWindow:
    """The relQueries that one gateway runs, and their rows under way. Not thread-safe."""

    def __init__(self) -> None:
        self._relqueries: dict[str, _RelQuery] = {}
        self._of_tenant: dict[str, int] = {}
        """RelQueries of each tenant; no entry is 0."""
        self._rows: dict[str, int] = {}
        """Rows of each relQuery under way. Those of one that was removed count until they end, also once it is back."""
        self._rows_of_tenant: dict[str, int] = {}
        """Rows under way of each tenant. Rows of relQueries that were removed count until they end."""
        self._served: dict[str, int] = {}
        """When a row of each tenant with relQueries started last, as a count."""
        self._count = 0

    @property
    def rows(self) -> int:
        """Rows under way."""
        return sum(self._rows_of_tenant.values())

    def rows_of(self, relquery: str) -> int:
        """Rows of the relQuery under way."""
        return self._rows.get(relquery, 0)

    def add(self, relquery: str, tenant: str) -> None:
        """The gateway runs the relQuery from here on."""
        self._relqueries[relquery] = _RelQuery(tenant)
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1

    def remove(self, relquery: str) -> None:
        """The gateway runs it no longer. Its rows under way still end by `end`. An unknown relQuery is ignored."""
        known = self._relqueries.pop(relquery, None)
        if known is not None:
            _subtract(self._of_tenant, known.tenant)
            if known.tenant not in self._of_tenant:
                self._served.pop(known.tenant, None)

    def ask(self, relquery: str) -> None:
        """The relQuery has a row that could start."""
        known = self._relqueries.get(relquery)
        if known is not None and known.asked is None:
            self._count += 1
            known.asked = self._count

    def withdraw(self, relquery: str) -> None:
        """The relQuery asks no longer."""
        known = self._relqueries.get(relquery)
        if known is not None:
            known.asked = None

    def start(self, relquery: str) -> None:
        """The row that was asked for is under way."""
        known = self._relqueries[relquery]
        known.asked = None
        self._rows[relquery] = self._rows.get(relquery, 0) + 1
        self._count += 1
        self._served[known.tenant] = self._count
        self._rows_of_tenant[known.tenant] = self._rows_of_tenant.get(known.tenant, 0) + 1

    def end(self, relquery: str, tenant: str) -> None:
        """A row of the relQuery, which is this tenant's, has ended."""
        _subtract(self._rows_of_tenant, tenant)
        _subtract(self._rows, relquery)

    def observe(self, relquery: str, busy: float) -> None:
        """A row was answered that alone keeps its engine busy for the part `busy` of its time, 0 to 1. Calls of groups that
        are no relQueries of this gateway are ignored."""
        known = self._relqueries.get(relquery)
        if known is None:
            return
        if not known.answered or busy > known.busy:
            known.busy, known.answered = busy, True
        else:
            known.busy += LOWER_WEIGHT * (busy - known.busy)

    def next(self, limits: RowLimits, *, waiting: int, engines: int, room: bool) -> str | None:
        """The relQuery whose next row may start now; None = no row may. `waiting` calls wait in the gateway, `engines`
        accept calls, and there is `room` at an engine if one of them has a place that rows may take."""
        asking = sorted(
            (
                self._rows_of_tenant.get(item.tenant, 0),
                self._served.get(item.tenant, 0),
                self._rows.get(name, 0),
                item.asked,
                name,
            )
            for name, item in self._relqueries.items()
            if item.asked is not None
        )
        if not asking:
            return None
        if asking[0][0] < limits.floor:
            return asking[0][-1]
        if waiting > limits.waiting or not room or self.rows >= limits.in_flight:
            return None
        busy = sum([self._rows.get(name, 0) * item.busy for name, item in self._relqueries.items()])
        for entry in asking:
            name = entry[-1]
            item = self._relqueries[name]
            if self._rows.get(name, 0) < self._most(item, limits) and busy + item.busy <= engines * _most_busy(item):
                return name
        return None

    def _most(self, item: _RelQuery, limits: RowLimits) -> int:
        """Rows that the relQuery may have under way."""
        return min(limits.window, limits.in_flight // (len(self._of_tenant) * self._of_tenant[item.tenant]))


def places(limit: int) -> int:
    """The places that rows may take at an engine with `limit` places."""
    return max(limit - max(limit // FREE_PART, 1), 1)


def _most_busy(item: _RelQuery) -> float:
    """Busy parts of all rows at an engine, up to which rows of the relQuery start."""
    return max(SHARED * (1.0 - item.busy), LEAST_BUSY)


def _subtract(counts: dict[str, int], name: str) -> None:
    left = counts.get(name, 0) - 1
    if left > 0:
        counts[name] = left
    else:
        counts.pop(name, None)
