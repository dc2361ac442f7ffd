"""Which engine has failed too many calls to be given more? (Outlier detection, with the names that Envoy uses.)

Health checks show whether an engine answers. Outlier detection shows whether an engine does its work. A passing health
check does not bring an ejected engine back, only time does. Each ejection in a row lasts twice as long; one success
ends the row.
"""

from dataclasses import dataclass, replace

from tidegate_policy import immutable


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSettings:
    """When an engine is ejected, and for how long."""

    consecutive_failures: int = 3
    """Calls that fail in a row, by the engine's fault, before the engine is ejected."""
    base_ejection_s: float = 1.0
    """Length of the first ejection; each further one in a row doubles it."""
    max_ejection_s: float = 60.0


@immutable.value(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """What the calls of one engine have shown."""

    failures: int = 0
    """Failures in a row."""
    ejections: int = 0
    """Ejections in a row; a success after the last one starts anew."""
    ejected_until_at_s: float = 0.0

    def after(self, now: float, *, ok: bool, settings: OutlierSettings) -> "FailureRecord":
        """The record after one more call."""
        if ok and not self.failures and not self.ejections:
            return self
        if ok:
            return FailureRecord(ejected_until_at_s=self.ejected_until_at_s)
        failures = self.failures + 1
        if failures < settings.consecutive_failures or self.ejected(now):
            return replace(self, failures=failures)
        ejection_s = min(settings.base_ejection_s * 2 ** min(self.ejections, 30), settings.max_ejection_s)
        # One failure after the engine's return is enough for the next ejection.
        return FailureRecord(
            failures=settings.consecutive_failures - 1,
            ejections=self.ejections + 1,
            ejected_until_at_s=now + ejection_s,
        )

    def ejected(self, now: float) -> bool:
        return now < self.ejected_until_at_s
