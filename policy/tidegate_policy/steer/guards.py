"""Does a proposed switch take effect? Dwell, bypass, rollback and bans (H-MAS 3.4.1).

State in, verdict out. In order of precedence: a manual override, and its end; an emergency bypass to the safe policy; a
rollback when the pool got worse after a switch than its load explains (`switch_regret`); and, once the active policy has
had its minimum dwell, the selector's proposal. A policy that is not allowed is left at once, unless a person has chosen it.

An emergency under the safe policy begins a bypass too, because the bypass lifts the bounds of the engines. A bypass or an
override interrupts the trial of a switch: the trial begins anew, against the same baseline, once the policy is back.

A policy that was rolled back is banned, and each further ban of it is twice as long, unless the last one ended a day ago.
A policy that comes back soon after it was left must stay twice as long as before, and so must the safe policy when an
emergency returns soon. A policy that one engine does not know is taken back too, so that a proposal is in force everywhere
or nowhere. So neither a bad policy nor two alternating symptoms can make the pool oscillate. In any hour the loop switches
at most `per_hour` times, whatever the load does: the last of these switches is kept for a bypass, and the one before it
for a rollback. A bypass heeds no ban, so there is always a way back to the safe policy.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer import proposal, switch_regret
from tidegate_policy.steer import trial as trials


class Kind(StrEnum):
    """What a verdict does."""

    KEEP = "keep"
    SWITCH = "switch"
    ROLLBACK = "rollback"
    BYPASS = "bypass"
    OVERRIDE = "override"


class Guard(StrEnum):
    """The guards that hold a proposal back for a time."""

    DWELL = "dwell"
    BAN = "ban"
    RATE = "rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """How cautious the loop is."""

    dwell_s: float = 60.0
    """Seconds that a policy stays before a proposal may replace it; doubled each time that two proposals alternate."""
    window_s: float = 20.0
    """Seconds in which a switch may be rolled back, once the calls that started before it have ended."""
    rho: float = 1.2
    """How many times worse than the extrapolated baseline the service may be (`switch_regret`)."""
    enough: int = 20
    """Calls that a trial must have seen before it can cause a rollback; where calls have targets, those that the earlier
    rate of completions lets expect."""
    ban_s: float = 300.0
    """Seconds of the first ban of a rolled-back policy; doubled for each further ban, at most a day."""
    bypass_s: float = 60.0
    """Shortest duration of a bypass in seconds."""
    per_hour: int = 5
    """Switches in any hour, at least 3; those that a person or an edit of the spec causes do not count."""


MAX_BAN_S = 86_400.0
HOUR_S = 3600.0
AFTER_BYPASS = "engines lift their bounds, and calls run in the order in which they came"
AFTER_ROLLBACK = "the service is as before the switch"
"""What is expected of switches that no selector proposed."""
MAX_RETURNS = 4
"""The dwell is doubled at most this often: from the default to 16 minutes."""
LATE_S = 10.0
"""An observation that ends this long after the trial of a switch still judges the switch, and a later one does not."""
SOON_DWELLS = 2
"""A policy that comes back within this many dwells after it was left counts as one of two alternating policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The trial of a switch that a bypass or an override has interrupted. It begins anew once the policy is back."""

    policy: str
    before: str
    """The policy that a rollback returns to."""
    baseline: switch_regret.Baseline
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteerState:
    """The whole memory of the loop. The driver persists it and hands it to a successor."""

    active: str
    since_at_s: float
    reason: str = "start"
    kind: Kind = Kind.KEEP
    before: str | None = None
    """The policy that a rollback, or the end of a bypass or of an override, returns to; None when there is none."""
    ends_at_s: float | None = None
    """When the override ends, if its source said so. The driver stops to pass the override at that instant."""
    baseline: switch_regret.Baseline | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    """How often each policy was rolled back."""
    banned_until_at_s: Mapping[str, float] = field(default_factory=dict)
    left_at_s: Mapping[str, float] = field(default_factory=dict)
    """When a proposal last replaced each policy. The end of a bypass is no such instant of the safe policy."""
    bypass_ended_at_s: float | None = None
    """When the last bypass ended; None when there was none."""
    switched_at_s: tuple[float, ...] = ()
    """The instants of the switches of the last hour that the loop decided."""
    returns: int = 0
    """How many proposals in a row brought back a policy soon after it had been left."""
    bypasses: int = 0
    """How many bypasses in a row began soon after the one before had ended."""
    alternatives: tuple[str, ...] = ()
    """The other policies that the selector compared for the last switch, best first."""
    expected: str = ""
    """What is expected of the last switch."""
    effect: str = ""
    """What followed the last switch; empty until the time in which it may be rolled back is over."""
    trial: trials.Trial | None = None
    """What has followed the last switch so far; None when the trial is over."""
    interrupted: Interrupted | None = None
    """The trial that goes on after a bypass or an override; None in every other state."""
    memory: proposal.Memory = field(default_factory=dict)
    """What the selector remembers, by its class; another selector begins without a memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A proposal that the guards hold back."""

    policy: str
    """The policy that is proposed. The active one: the end of a bypass."""
    active: str
    """The policy that stays."""
    until_at_s: float
    guard: Guard
    """The one that holds it back for the longest time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`policy` should be in force on every engine, because of `reason`."""

    kind: Kind
    policy: str
    reason: str
    held: Held | None = None
    """A proposal that waits; None where none does."""


def step(
    now: float,
    state: SteerState,
    qos: Qos,
    proposed: proposal.Proposal | None,
    settings: GuardSettings,
    *,
    trial: Qos | None = None,
    unknown: str | None = None,
    override: str | None = None,
    allow: Collection[str] | None = None,
) -> tuple[SteerState, Verdict]:
    """One decision. `qos` covers the time since the last one; call it at least once in `window_s`. `trial` covers the
    service since the last switch, without the time in which calls that started before it still ended; None = `qos`.
    `unknown` is the answer of an engine that does not know the active policy; None = every engine knows it.
    `allow` lists the policies that may be active, besides the safe one, while no person has chosen a policy; None allows
    all."""
    after, verdict = _decide(now, state, qos, qos if trial is None else trial, proposed, settings, override, unknown)
    if override is not None or allow is None or after.active in (policies.SAFE, *allow):
        return after, verdict
    return _switch(now, after, Kind.SWITCH, start_policy(allow), f"{after.active} is not allowed", None)


def start_policy(allow: Collection[str]) -> str:
    """The policy that a pool begins with, and that it takes when its policy is no longer allowed."""
    return policies.DEFAULT if policies.DEFAULT in allow else policies.SAFE


def minimum_dwell_s(state: SteerState, settings: GuardSettings) -> float:
    """Seconds from `state.since_at_s` until a proposal may replace the active policy."""
    dwell_s = settings.dwell_s * (1 << state.returns)
    if state.kind is Kind.BYPASS:
        return max(dwell_s, _bypass_s(state, settings))
    return dwell_s


def trial_s(state: SteerState, settings: GuardSettings) -> float:
    """Seconds after a switch of the selector in which it may be rolled back. Those in which nobody observed the pool come
    on top."""
    unseen_s = 0.0 if state.trial is None else state.trial.unseen_s
    if state.baseline is None:
        return settings.window_s + unseen_s
    window_s = switch_regret.window_s(state.baseline, settings.window_s, enough=settings.enough)
    return state.baseline.settle_s + window_s + unseen_s


def allowed(now: float, state: SteerState, allow: Collection[str]) -> tuple[str, ...]:
    """The policies of `allow` that are not banned."""
    return tuple(name for name in allow if not _is_banned(now, state, name))


def credible(now: float, state: SteerState) -> SteerState:
    """A state that a predecessor left, whose clock may have been ahead: nothing in it has happened later than `now`."""
    return replace(
        _moved(state, lambda at_s: min(at_s, now)),
        banned_until_at_s={name: min(at_s, now + MAX_BAN_S) for name, at_s in state.banned_until_at_s.items()},
    )


def shifted(state: SteerState, by_s: float) -> SteerState:
    """The state after a step of the wall clock by so many seconds: what has lasted for some time has lasted as long."""
    return replace(
        _moved(state, lambda at_s: at_s + by_s),
        ends_at_s=None if state.ends_at_s is None else state.ends_at_s + by_s,
        banned_until_at_s={name: at_s + by_s for name, at_s in state.banned_until_at_s.items()},
    )


def _moved(state: SteerState, move: Callable[[float], float]) -> SteerState:
    """The state with other instants of what has happened."""
    trial, held, ended_at_s = state.trial, state.interrupted, state.bypass_ended_at_s
    return replace(
        state,
        since_at_s=move(state.since_at_s),
        left_at_s={name: move(at_s) for name, at_s in state.left_at_s.items()},
        switched_at_s=tuple([move(at_s) for at_s in state.switched_at_s]),
        bypass_ended_at_s=None if ended_at_s is None else move(ended_at_s),
        trial=None if trial is None else replace(trial, seen_at_s=move(trial.seen_at_s)),
        interrupted=None if held is None else replace(held, at_s=move(held.at_s)),
    )


def _decide(
    now: float,
    state: SteerState,
    qos: Qos,
    trial: Qos,
    proposed: proposal.Proposal | None,
    settings: GuardSettings,
    override: str | None,
    unknown: str | None,
) -> tuple[SteerState, Verdict]:
    if override is not None:
        if override == state.active and state.kind is Kind.OVERRIDE:
            return state, _keep(state)
        overridden = state.before if state.kind in (Kind.OVERRIDE, Kind.BYPASS) else state.active
        after, verdict = _switch(now, state, Kind.OVERRIDE, override, "set by hand", None)
        return replace(after, before=overridden, interrupted=_interrupted(now, state, settings)), verdict
    if state.kind is Kind.OVERRIDE and state.before is not None:
        return _resumed(now, state, *_switch(now, state, Kind.SWITCH, state.before, "the override has ended", None))
    is_bypass = state.kind is Kind.BYPASS
    if proposed is not None and proposed.emergency and not (is_bypass and state.active == policies.SAFE):
        if state.active != policies.SAFE and len(_of_last_hour(now, state)) >= settings.per_hour:
            until_at_s = _spent_until_s(now, state, settings.per_hour)
            return state, _held(state, proposed, until_at_s, Guard.RATE)
        ended_at_s = -math.inf if state.bypass_ended_at_s is None else state.bypass_ended_at_s
        soon = now - ended_at_s <= SOON_DWELLS * _bypass_s(state, settings)
        after, verdict = _switch(now, state, Kind.BYPASS, policies.SAFE, proposed.reason, None)
        bypasses = min(state.bypasses + 1, MAX_RETURNS) if soon else 0
        after = replace(after, before=state.active, bypasses=bypasses, expected=AFTER_BYPASS)
        return replace(after, interrupted=_interrupted(now, state, settings)), verdict
    regret = _regret(now, state, trial, settings)
    if unknown is not None and state.baseline is not None:
        regret = f"rollback: {state.active} is not known everywhere: {unknown}"
    if regret is not None and state.before is not None and len(_of_last_hour(now, state)) < settings.per_hour - 1:
        forgiven = now - state.banned_until_at_s.get(state.active, now) > MAX_BAN_S
        strikes = (0 if forgiven else state.strikes.get(state.active, 0)) + (unknown is None)
        ban_s = min(settings.ban_s * 2 ** min(max(strikes - 1, 0), 20), MAX_BAN_S)
        punished = replace(
            state,
            strikes={**state.strikes, state.active: strikes},
            banned_until_at_s={**state.banned_until_at_s, state.active: now + ban_s},
        )
        after, verdict = _switch(now, punished, Kind.ROLLBACK, state.before, regret, None)
        return replace(after, expected=AFTER_ROLLBACK), verdict
    if proposed is None or proposed.emergency or (proposed.policy == state.active and not is_bypass):
        return state, _keep(state)
    dwell_s = minimum_dwell_s(state, settings)
    until = {Guard.DWELL: state.since_at_s + dwell_s}
    if proposed.policy != state.active:
        until[Guard.BAN] = state.banned_until_at_s.get(proposed.policy, now)
        until[Guard.RATE] = _spent_until_s(now, state, settings.per_hour - 2)
    longest = max(until, key=until.__getitem__)
    if now < until[longest]:
        return state, _held(state, proposed, until[longest], longest)
    if proposed.policy == state.active:  # the bypass ends, and its policy stays
        return _resumed(now, state, *_switch(now, state, Kind.SWITCH, state.active, proposed.reason, None))
    again = now - state.left_at_s.get(proposed.policy, -math.inf) <= SOON_DWELLS * dwell_s
    remembered = replace(
        state,
        left_at_s=state.left_at_s if is_bypass else {**state.left_at_s, state.active: now},
        returns=min(state.returns + 1, MAX_RETURNS) if again else 0,
    )
    after, verdict = _switch(
        now, remembered, Kind.SWITCH, proposed.policy, proposed.reason, switch_regret.baseline(qos)
    )
    after = replace(after, alternatives=proposed.alternatives, expected=proposed.expected)
    return _resumed(now, state, after, verdict)


def _resumed(now: float, state: SteerState, after: SteerState, verdict: Verdict) -> tuple[SteerState, Verdict]:
    """The state `after` an override or a bypass, in which the trial that was interrupted begins anew if its policy is
    back."""
    held = state.interrupted
    if held is None or held.policy != after.active or now - held.at_s > trials.LONGEST_UNSEEN_S:
        return after, verdict
    return replace(after, baseline=held.baseline, before=held.before), verdict


def _interrupted(now: float, state: SteerState, settings: GuardSettings) -> Interrupted | None:
    """The trial that a bypass or an override now interrupts; None when its time is over, also if nobody observed its
    end."""
    if state.kind in (Kind.OVERRIDE, Kind.BYPASS):
        return state.interrupted
    if state.baseline is None or state.before is None or state.effect:
        return None
    if now - state.since_at_s > trial_s(state, settings):
        return None
    return Interrupted(policy=state.active, before=state.before, baseline=state.baseline, at_s=now)


def _bypass_s(state: SteerState, settings: GuardSettings) -> float:
    """The shortest duration of the last bypass: longer each time that an emergency returned soon."""
    return settings.bypass_s * (1 << state.bypasses)


def _is_banned(now: float, state: SteerState, policy: str) -> bool:
    return now < state.banned_until_at_s.get(policy, now)


def _regret(now: float, state: SteerState, trial: Qos, settings: GuardSettings) -> str | None:
    """Why the last switch was a mistake; None when it was none, or when it is too late or too early to tell."""
    before, age_s = state.baseline, now - state.since_at_s
    if before is None or not 0 < age_s <= trial_s(state, settings) + LATE_S:
        return None
    regret = switch_regret.found(before, trial, age_s, rho=settings.rho, enough=settings.enough)
    return None if regret is None else f"rollback: after {state.active} {regret}"


def _switch(
    now: float, state: SteerState, kind: Kind, policy: str, reason: str, baseline: switch_regret.Baseline | None
) -> tuple[SteerState, Verdict]:
    counted = policy != state.active and (kind in (Kind.BYPASS, Kind.ROLLBACK) or baseline is not None)
    recent = _of_last_hour(now, state)
    after = replace(
        state,
        switched_at_s=(*recent, now) if counted else recent,
        active=policy,
        since_at_s=now,
        reason=reason,
        kind=kind,
        before=state.active if baseline is not None else None,
        ends_at_s=None,
        baseline=baseline,
        alternatives=(),
        expected="",
        effect="",
        trial=None,
        interrupted=None,
        bypass_ended_at_s=now if state.kind is Kind.BYPASS else state.bypass_ended_at_s,
    )
    return after, Verdict(kind=kind, policy=policy, reason=reason)


def _of_last_hour(now: float, state: SteerState) -> tuple[float, ...]:
    """The switches of the last hour, and those of a clock that was ahead."""
    return tuple(at_s for at_s in state.switched_at_s if now - HOUR_S < at_s)


def _keep(state: SteerState) -> Verdict:
    return Verdict(kind=Kind.KEEP, policy=state.active, reason=state.reason)


def _held(state: SteerState, proposed: proposal.Proposal, until_at_s: float, guard: Guard) -> Verdict:
    held = Held(policy=proposed.policy, active=state.active, until_at_s=until_at_s, guard=guard)
    return replace(_keep(state), held=held)


def _spent_until_s(now: float, state: SteerState, switches: int) -> float:
    """When fewer than `switches` of the loop lie within an hour; `now` if that is so."""
    recent = _of_last_hour(now, state)
    return recent[-switches] + HOUR_S if len(recent) >= switches else now
