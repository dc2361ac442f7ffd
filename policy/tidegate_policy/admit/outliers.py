"""Which engine has failed too many calls to be given more? (Outlier detection, with the names that Envoy uses.)

Health checks show whether an engine answers. Outlier detection shows whether an engine does its work. A success takes back
one failure, so an engine that fails two of three calls is ejected like one that fails three in a row. A passing health
check does not bring an ejected engine back, only time does. Each ejection in a row lasts twice as long. The row ends when
successes have taken back all failures.

The calls of one tenant may fail everywhere because of what they ask for. So they eject no engine that has served another
tenant a moment ago, unless a call of a second tenant fails too. That tenant's further calls avoid the engine (`distrust`).

A call that an engine rejects as wrong (4xx) is no failure of the engine. But an engine that rejects call after call, at
once, would draw all calls, and one may reject the calls of one kind alone. So the third rejection of an engine, and each
one after it, is checked: another engine gets the call too. If that one rejects it as well, it is the call's fault, and the
count begins anew for its tenant.

If the other engine answers the call, either of the two may be wrong: one that answers everything is as easily built as one
that rejects everything. So an engine that serves calls is not ejected for its rejections, and neither is one that a single
other engine contradicts, unless the pool has no third. Nobody waits for that verdict, because the call has its answer.
"""

from dataclasses import dataclass

from tidegate_policy.model import EngineId

SERVED_S = 10.0
"""A moment ago. An engine that serves one tenant alone is ejected by the failures of that tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSettings:
    """When an engine is ejected, and for how long."""

    consecutive_failures: int = 3
    """Calls that fail by the engine's fault, beyond those that succeed, before the engine is ejected."""
    base_ejection_s: float = 1.0
    """Length of the first ejection; each further one in a row doubles it."""
    max_ejection_s: float = 60.0


DOUBTED_REJECTIONS = 3
"""The rejection from which on another engine gets the rejected call too."""
CONTRADICTING = 2
"""Engines that must have answered what an engine rejected, before it is ejected; all others where there are fewer."""
MOST_AT_FAULT = 64
"""Tenants whose wrong calls one engine knows of."""


class FailureRow:
    """A row of calls that failed, and the ejection that follows from it."""

    def __init__(self) -> None:
        self.ejected_until_at_s = 0.0
        self.failures = 0
        """Failures that no success has taken back; those of a row of calls that fail."""
        self._ejections = 0
        """Ejections in a row."""

    def ejected(self, now: float) -> bool:
        return now < self.ejected_until_at_s

    def on_success(self, now: float) -> None:
        """A call succeeded."""
        if not self.ejected(now):  # else the call began before
            self.failures = max(self.failures - 1, 0)
            if not self.failures:
                self._ejections = 0

    def on_failure(self, now: float, settings: OutlierSettings) -> bool:
        """A call failed. Returns whether the row is long enough for an ejection."""
        self.failures = min(self.failures + 1, settings.consecutive_failures)
        return self.failures >= settings.consecutive_failures and not self.ejected(now)

    def eject(self, now: float, settings: OutlierSettings) -> float:
        """Begins an ejection; returns its seconds."""
        ejection_s = min(settings.base_ejection_s * 2.0 ** min(self._ejections, 30), settings.max_ejection_s)
        self.ejected_until_at_s = now + ejection_s
        self._ejections += 1
        # One failure after the engine's return is enough for the next ejection.
        self.failures = settings.consecutive_failures - 1
        return ejection_s


class FailureRecord(FailureRow):
    """What the calls of one engine have shown."""

    def __init__(self) -> None:
        super().__init__()
        self.is_contradicted = False
        """The last ejection rests on the word of other engines."""
        self._rejections = 0
        """Calls that the engine rejected as wrong, up to `DOUBTED_REJECTIONS`."""
        self._at_fault: dict[str, int] = {}
        """Rejected calls of each tenant since another engine rejected one of them too; the newest tenant comes last."""
        self._contradicted_by: dict[EngineId, int] = {}
        """Rejected calls that each other engine answered, since this one served a call or was found right."""
        self._failed: str | None = None
        """The tenant whose calls the row of failures consists of; None if there are several, or none."""
        self._served: tuple[str, float] = ("", -1e9)
        """The tenant served last, and when."""
        self._served_before: tuple[str, float] = ("", -1e9)
        """The newest of the others."""

    def succeeded(self, now: float, tenant: str) -> None:
        """The engine did its part in a call of the tenant."""
        self.on_success(now)
        self._contradicted_by.clear()
        if tenant != self._served[0]:
            self._served_before = self._served
        self._served = (tenant, now)

    def failed(self, now: float, tenant: str, settings: OutlierSettings) -> bool:
        """The engine failed a call of the tenant. Returns whether it is to be ejected."""
        if not self.failures:
            self._failed = tenant
        elif tenant != self._failed:
            self._failed = None
        return self.on_failure(now, settings) and (self._failed is None or not self._served_another(now, tenant))

    def rejected(self, tenant: str) -> bool:
        """The engine rejected a call of the tenant as wrong. Returns whether another engine should be asked."""
        self._rejections = min(self._rejections + 1, DOUBTED_REJECTIONS)
        if tenant not in self._at_fault:
            return self._rejections >= DOUBTED_REJECTIONS
        self._at_fault[tenant] += 1
        return self._at_fault[tenant] >= DOUBTED_REJECTIONS

    def confirmed(self, tenant: str) -> None:
        """Another engine rejected the same call of the tenant."""
        self._contradicted_by.clear()
        self._at_fault.pop(tenant, None)
        if len(self._at_fault) >= MOST_AT_FAULT:
            del self._at_fault[next(iter(self._at_fault))]
        self._at_fault[tenant] = 0

    def contradicted(self, now: float, by: EngineId, others: int, settings: OutlierSettings) -> bool:
        """Another engine answered a call that this one rejected; `others` is the number of engines that serve beside this
        one. Returns whether this one is to be ejected."""
        if self.ejected(now) or now - self._served[1] < SERVED_S:
            return False
        self._contradicted_by[by] = self._contradicted_by.get(by, 0) + 1
        return sum(self._contradicted_by.values()) >= settings.consecutive_failures and len(
            self._contradicted_by
        ) >= min(CONTRADICTING, others)

    def eject(self, now: float, settings: OutlierSettings, *, is_contradicted: bool = False) -> float:
        """Ejects the engine; returns for how many seconds."""
        self.is_contradicted = is_contradicted
        self._contradicted_by.clear()
        return super().eject(now, settings)

    def _served_another(self, now: float, tenant: str) -> bool:
        served = self._served_before if self._served[0] == tenant else self._served
        return now - served[1] < SERVED_S
