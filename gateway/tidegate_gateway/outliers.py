"""Which engine has failed too often to be given more calls? (Envoy's outlier detection, with its names.)

Health checks say whether an engine answers; this says whether it does its work. A passing health check does not bring an
ejected engine back, only time does: each ejection in a row lasts twice as long, one success ends the row. Pure values; the
clock is `engines`'.
"""

from dataclasses import dataclass, replace

from tidegate_gateway import gateway_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the calls of one engine have shown."""

    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row: a success after the last one starts anew."""
    until_s: float = 0.0
    """The engine is ejected until this instant."""

    def after(self, now: float, *, ok: bool, limits: gateway_settings.Health) -> "Record":
        if ok:
            return Record(until_s=self.until_s)
        failures = self.failures + 1
        if failures < limits.consecutive_failures or self.ejected(now):
            return replace(self, failures=failures)
        away_s = min(limits.base_ejection_s * 2**self.ejections, limits.max_ejection_s)
        # One failure after the return is enough for the next ejection.
        return Record(failures=limits.consecutive_failures - 1, ejections=self.ejections + 1, until_s=now + away_s)

    def ejected(self, now: float) -> bool:
        return now < self.until_s
