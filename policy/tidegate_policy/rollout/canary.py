"""Which share of the calls does a new revision of the engines get now, and does it replace the old one?

A state machine without a clock: a state and an observation go in, the next state comes out. A revision starts one engine,
gets a share of the calls that grows from step to step, and is promoted after the last step. It fails when `side_by_side`
finds a fault, or when its engine crashes, does not serve in time, or stops serving again and again. A revision that was
promoted or has failed stays so. The driver carries the state from one operator to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate_policy.rollout import side_by_side

MOST_STOPS = 5
"""A revision fails when its engine stops serving so many times in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of the test."""

    weight: int
    """Percent of the pool's calls that the new engines get, 1 to 99."""
    duration_s: float
    """Its least duration; it lasts until both sides have had enough calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """How a new revision is tested."""

    steps: Sequence[Step]
    """At least one."""
    limits: side_by_side.Limits = field(default_factory=side_by_side.Limits)
    start_s: float = 2100.0
    """Seconds in which the new engine must serve, from its creation or from the time at which it stopped to serve."""


class Phase(StrEnum):
    """Where a revision is."""

    STARTING = "Starting"
    """Its engine does not serve (again) yet, and gets no calls."""
    TESTING = "Testing"
    PROMOTED = "Promoted"
    """It replaces the old revision, one engine after the other."""
    FAILED = "Failed"
    """The old revision comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """A revision under test."""

    revision: str
    phase: Phase
    step: int
    """The present step, or the one with which the test goes on, from 0."""
    since_s: float
    """When the phase or the step began."""
    reason: str
    """One clause for people."""
    stops: int = 0
    """How often the engine has stopped serving in the present step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known of the two revisions now."""

    serves: bool
    """An engine of the new revision is ready."""
    was_removed: bool = False
    """Each engine of the new revision that had served was deleted, as an eviction or the removal of a node does it. That is
    no fault of the revision."""
    crash: str | None = None
    """How an engine of the new revision ended since it first served; None = it did not."""
    old_serves: bool = True
    """An engine of the old revision is ready, with which the new one can be compared."""
    paused: bool = False
    new: side_by_side.Service = field(default_factory=side_by_side.Service)
    """Since the step began. A step that goes on after its engine has stopped serving has begun once."""
    old: side_by_side.Service = field(default_factory=side_by_side.Service)


def begin(now: float, revision: str) -> CanaryState:
    """The state of a revision whose first engine is being created."""
    return CanaryState(
        revision=revision, phase=Phase.STARTING, step=0, since_s=now, reason="its first engine has not started yet"
    )


def shifted(state: CanaryState, by_s: float) -> CanaryState:
    """The state with its instant moved by `by_s` seconds, because the wall clock was set."""
    return replace(state, since_s=state.since_s + by_s)


def weight(state: CanaryState, settings: CanarySettings, *, new: int, old: int) -> int | None:
    """Percent of the calls that the new engines get; None = as many as any other engine. `new` and `old` are the ready
    engines of the pool. The new ones get no more than their number's share: more load would make them slower than the old
    ones, and the comparison would blame the revision."""
    if state.phase is Phase.PROMOTED:
        return None
    if state.phase is not Phase.TESTING:
        return 0
    wanted = settings.steps[min(state.step, len(settings.steps) - 1)].weight
    return min(wanted, max(100 * new // (new + old), 1)) if new and old else wanted


def step(now: float, state: CanaryState, seen: Observation, settings: CanarySettings) -> CanaryState:
    """The state after an observation. A pause keeps the revision from going forward, and not from going back."""
    if state.phase in (Phase.PROMOTED, Phase.FAILED):
        return state
    if seen.crash is not None:
        return _failed(now, state, seen.crash)
    if state.phase is Phase.STARTING:
        return _starting(now, state, seen, settings)
    if fault := side_by_side.fault(seen.new, seen.old, settings.limits):
        return _failed(now, state, f"{fault} (step {state.step + 1} of {len(settings.steps)})")
    if not seen.serves:
        stops = state.stops + (not seen.was_removed)
        if stops >= MOST_STOPS:
            where = f"step {state.step + 1} of {len(settings.steps)}"
            return _failed(now, state, f"its engine stopped serving {stops} times ({where})")
        reason = "its engine does not serve any more"
        return replace(state, phase=Phase.STARTING, since_s=now, reason=reason, stops=stops)
    index = min(state.step, len(settings.steps) - 1)  # the settings may have lost steps
    if seen.paused or now - state.since_s < settings.steps[index].duration_s or not _enough(seen, settings.limits):
        return state
    if index + 1 < len(settings.steps):
        return _testing(now, state, index + 1, settings)
    calls = f"{seen.new.calls} calls of the last step" if seen.new.calls else "the last step"
    return replace(state, phase=Phase.PROMOTED, since_s=now, reason=f"it served as well as the old engines in {calls}")


def _starting(now: float, state: CanaryState, seen: Observation, settings: CanarySettings) -> CanaryState:
    if seen.serves and not seen.paused:
        return _testing(now, state, min(state.step, len(settings.steps) - 1), settings)
    if not seen.serves and now - state.since_s >= settings.start_s:
        return _failed(now, state, f"its engine did not serve within {settings.start_s:.0f} s")
    return state


def _testing(now: float, state: CanaryState, index: int, settings: CanarySettings) -> CanaryState:
    each = settings.steps[index]
    share = f"at most {each.weight}% of the calls"  # `weight` may be less
    reason = f"step {index + 1} of {len(settings.steps)}: {share} for {each.duration_s:g} s or more"
    stops = state.stops if index == state.step else 0
    return replace(state, phase=Phase.TESTING, step=index, since_s=now, reason=reason, stops=stops)


def _failed(now: float, state: CanaryState, why: str) -> CanaryState:
    return replace(state, phase=Phase.FAILED, since_s=now, reason=why)


def _enough(seen: Observation, limits: side_by_side.Limits) -> bool:
    """Whether both sides have had the calls that a judgement needs."""
    return seen.new.calls >= limits.min_calls and (seen.old.calls >= limits.min_calls or not seen.old_serves)
