"""Which engines do the calls of a tenant avoid, because these engines have failed its calls?

An engine may fail the calls of one tenant and serve those of all others: because of what these calls ask for, or because it
is broken or hostile. The others keep it in service (`outliers`), and as it fails calls at once, it has room for more of
them. So the calls of each tenant have a row of failures of their own at each engine, with the numbers of outlier
detection. An engine whose row is long enough gets no calls of this tenant for a while, as long as another engine may serve
them. Only `TAKING_BACK` calls in a row that succeed take back a failure: an engine that fails each second call of a tenant,
after some seconds, is avoided too, and nothing is lost while others serve. A failure that the client sees, because its
answer had begun, is taken back by `TAKING_BACK_LOST` calls.

The second attempt of a call is the last one. So it goes to no engine that has failed a call of the tenant of late, as long
as another one has room: two engines that work together could else fail both attempts, and serve enough other calls.
"""

from collections.abc import Set

from tidegate_policy.admit.outliers import FailureRow, OutlierSettings
from tidegate_policy.model import EngineId

MOST_TENANTS = 1024
"""Tenants whose failed calls are remembered; the oldest entry gives way."""
TAKING_BACK = 4
"""Successes in a row. A tenant comes to avoid an engine that fails more than a fifth of its calls."""
TAKING_BACK_LOST = 20
"""As `TAKING_BACK`, after an answer that broke off: a twentieth of the answers of an engine may do so."""
LATE_S = 60.0
"""Since the last failure, for the engines that get no second attempts."""
NONE: frozenset[EngineId] = frozenset()


class _Row(FailureRow):
    """The failures of one tenant's calls at one engine."""

    def __init__(self) -> None:
        super().__init__()
        self.successes = 0
        """Since the last failure, or since successes have taken one back."""
        self.taking_back = TAKING_BACK
        """Successes in a row that take back a failure."""
        self.failed_at_s = -1e9


class Distrust:
    """The failures of each tenant's calls at each engine."""

    def __init__(self, settings: OutlierSettings) -> None:
        self._settings = settings
        self._rows: dict[str, dict[EngineId, _Row]] = {}
        """By tenant; no entry has an engine that has served the tenant long enough."""

    def succeeded(self, now: float, engine: EngineId, tenant: str) -> None:
        """The engine did its part in a call of the tenant."""
        rows = self._rows.get(tenant)
        row = None if rows is None else rows.get(engine)
        if rows is None or row is None:
            return
        row.successes += 1
        if row.successes >= row.taking_back:
            row.successes = 0
            row.on_success(now)
        if not (row.failures or row.ejected(now) or now - row.failed_at_s < LATE_S):
            self._forget(tenant, rows, engine)

    def failed(self, now: float, engine: EngineId, tenant: str, *, lost: bool = False) -> float | None:
        """The engine failed a call of the tenant; `lost`: after its answer had begun. Returns the seconds for which the
        tenant's calls avoid the engine from here on, if that begins now."""
        rows = self._rows.get(tenant)
        if rows is None:
            if len(self._rows) >= MOST_TENANTS:
                del self._rows[next(iter(self._rows))]
            rows = self._rows[tenant] = {}
        row = rows.get(engine)
        if row is None:
            row = rows[engine] = _Row()
        if lost or not row.failures:
            row.taking_back = TAKING_BACK_LOST if lost else TAKING_BACK
        row.successes, row.failed_at_s = 0, now
        return row.eject(now, self._settings) if row.on_failure(now, self._settings) else None

    def of(self, now: float, tenant: str) -> Set[EngineId]:
        """The engines that calls of the tenant avoid now."""
        rows = self._rows.get(tenant)
        return NONE if rows is None else {engine for engine, row in rows.items() if row.ejected(now)}

    def failed_late(self, now: float, tenant: str) -> Set[EngineId]:
        """The engines that have failed a call of the tenant of late."""
        rows = self._rows.get(tenant)
        return NONE if rows is None else {engine for engine, row in rows.items() if now - row.failed_at_s < LATE_S}

    def forget_engine(self, engine: EngineId) -> None:
        """The engine left the pool."""
        for tenant, rows in list(self._rows.items()):
            self._forget(tenant, rows, engine)

    def _forget(self, tenant: str, rows: dict[EngineId, _Row], engine: EngineId) -> None:
        rows.pop(engine, None)
        if not rows:
            del self._rows[tenant]
