"""The trial of the last switch: the service that counts as its effect so far.

It is part of the state of the loop, so that a successor goes on with it. Time in which nobody observed the pool does not
count: the trial is longer by that time, up to `LONGEST_UNSEEN_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tidegate_policy import qos

LONGEST_UNSEEN_S = 3600.0
"""After a longer time without an observer the service before the switch says nothing about the service now."""
MOST_COUNT = 10**9
"""No count of a trial is greater, so that a status holds it."""
_COUNTS = ("engines", "arrived", "finished", "waiting", "preemptions", "with_target", "missed", "blocked")
_TIMES = ("ttft", "tpot", "service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is known of the effect of a switch."""

    seen_at_s: float
    """The instant of the last observation."""
    unseen_s: float = 0.0
    """Seconds since the switch in which nobody observed the pool."""
    service: qos.Qos | None = None
    """The service of the pool, without tenants and classes; None until an observation counts."""


def seen(trial: Trial, now: float, period_s: float) -> Trial:
    """The trial at an observation; `period_s` is the longest time between two observations that is no gap."""
    gap_s = max(now - trial.seen_at_s - period_s, 0.0)
    return replace(trial, seen_at_s=now, unseen_s=min(trial.unseen_s + gap_s, LONGEST_UNSEEN_S))


def with_service(trial: Trial, latest: qos.Qos) -> Trial:
    """The trial with the service of one more observation."""
    together = latest if trial.service is None else qos.over_time((trial.service, latest), tenants=False)
    bounded: dict[str, Any] = {name: min(getattr(together, name), MOST_COUNT) for name in _COUNTS}
    for name in _TIMES:
        counts = getattr(together, name).counts
        bounded[name] = qos.Histogram(counts=tuple([min(count, MOST_COUNT) for count in counts]))
    return replace(trial, service=qos.Qos(window_s=together.window_s, **bounded))


def written(trial: Trial) -> dict[str, Any]:
    """The trial as JSON, without its empty fields."""
    found: dict[str, Any] = {"seen_at_s": trial.seen_at_s, "unseen_s": trial.unseen_s}
    if trial.service is not None:
        numbers = {name: getattr(trial.service, name) for name in ("window_s", *_COUNTS)}
        times = {name: list(getattr(trial.service, name).counts) for name in _TIMES}
        found["service"] = {name: value for name, value in {**numbers, **times}.items() if value or name == "window_s"}
    return found


def read(kept: Mapping[str, Any]) -> Trial:
    """The trial that `written` wrote. Raises `KeyError`, `TypeError`, `ValueError` for anything else."""
    if not isinstance(kept, Mapping):
        raise TypeError("a trial is no mapping")
    service = kept.get("service")
    trial = Trial(**{**kept, "service": None if service is None else _service(service)})
    if trial.unseen_s < 0:
        raise ValueError("no time is shorter than 0 s")
    return trial


def _service(kept: Mapping[str, Any]) -> qos.Qos:
    if not isinstance(kept, Mapping):
        raise TypeError("a service is no mapping")
    times = {name: qos.Histogram(counts=tuple(kept.get(name, ()))) for name in _TIMES}
    service = qos.Qos(**{**dict.fromkeys(_COUNTS, 0), **kept, **times})
    if service.tenants or service.classes or not 0 <= service.window_s < float("inf"):
        raise ValueError("a trial has other fields")
    counts = [getattr(service, name) for name in _COUNTS]
    for histogram in times.values():
        if len(histogram.counts) > len(qos.BOUNDS_S) + 1:
            raise ValueError("a histogram has too many buckets")
        counts += histogram.counts
    if not all(isinstance(count, int) and 0 <= count <= MOST_COUNT for count in counts):
        raise ValueError("a count is out of its range")
    return service
