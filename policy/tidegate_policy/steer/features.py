"""What the learned selectors read of a window: numbers without a unit of load, so that pools of any size compare.

Names of tenants and classes are not read, because clients choose them.
"""

import math

from tidegate_policy.qos import Qos

NAMES = ("wait", "growth", "misses", "ttft50", "ttft90", "work", "dispersion", "blocked", "preemptions")


def vector(qos: Qos) -> tuple[float, ...]:
    """One finite number of the order of 1 for each of `NAMES`."""
    return (
        math.log1p(wait_s(qos)) / 3,
        max(min((qos.arrived - qos.finished) / max(qos.finished, 1), 2.0), -1.0),
        qos.miss_ratio,
        math.log1p(qos.ttft.quantile_s(0.5)) / 3,
        math.log1p(qos.ttft.quantile_s(0.9)) / 3,
        math.log1p(qos.service.quantile_s(0.5)) / 3,
        min(qos.service.dispersion, 3.0),
        qos.block_ratio,
        math.log1p(qos.preemptions / max(qos.finished, 1)),
    )


def wait_s(qos: Qos) -> float:
    """Seconds in which the pool finishes as many calls as wait."""
    return qos.waiting * qos.window_s / max(qos.finished, 1)


def is_evidence(qos: Qos, enough: int = 20) -> bool:
    """Whether the window has enough calls to be judged, and calls that wait: without a queue no order matters."""
    return qos.waiting > 0 and qos.ttft.count + qos.waiting >= enough
