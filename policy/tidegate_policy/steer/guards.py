"""Does a proposed switch take effect? Dwell, bypass, rollback and bans (H-MAS 3.4.1).

State in, verdict out. In order of precedence: a manual override, and its end; an emergency bypass to the safe policy; a
rollback when the pool got worse after a switch; and, once the active policy has had its minimum dwell, the selector's
proposal. A policy that is not allowed is left at once, unless a person has chosen it. A policy that was rolled back is
banned, and each further ban of it is twice as long. A policy that comes back soon after it was left must stay twice as
long as before. So neither a bad policy nor two alternating symptoms can make the pool oscillate. In any hour the loop
switches at most `per_hour` times, whatever the load does: the last of these switches is kept for a bypass, and the one
before it for a rollback. The safe policy is never banned, so there is always a way back.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Proposal


class Kind(StrEnum):
    """What a verdict does."""

    KEEP = "keep"
    SWITCH = "switch"
    ROLLBACK = "rollback"
    BYPASS = "bypass"
    OVERRIDE = "override"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """How cautious the loop is."""

    dwell_s: float = 60.0
    """Seconds that a policy stays before a proposal may replace it; doubled each time that two proposals alternate."""
    window_s: float = 20.0
    """Seconds after a switch in which it may be rolled back."""
    rho: float = 1.2
    """Roll back when TTFT p99, TPOT p99 or the miss ratio is above rho times what it was before the switch."""
    floor_ttft_s: float = 0.05
    """A lower TTFT baseline is raised to this value, because small differences are noise."""
    floor_tpot_s: float = 0.1
    """A lower TPOT baseline is raised to this value: text that comes faster than this is faster than people read."""
    floor_miss_ratio: float = 0.02
    """A lower miss-ratio baseline is raised to this value: otherwise one miss after none would be infinitely worse."""
    enough: int = 20
    """Calls that a window must have seen before it can cause a rollback."""
    ban_s: float = 300.0
    """Seconds of the first ban of a rolled-back policy; doubled for each further ban, at most a day."""
    bypass_s: float = 60.0
    """Shortest duration of a bypass in seconds."""
    per_hour: int = 5
    """Switches in any hour, at least 3; those that a person or an edit of the spec causes do not count."""


MAX_BAN_S = 86_400.0
HOUR_S = 3600.0
MAX_RETURNS = 4
"""The dwell is doubled at most this often: from the default to 16 minutes."""
SOON_DWELLS = 2
"""A policy that comes back within this many dwells after it was left counts as one of two alternating policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The quality of service just before a switch."""

    ttft_p99_s: float
    miss_ratio: float
    tpot_p99_s: float | None = None
    """None when no call with two tokens finished, or when an earlier version wrote the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteerState:
    """The whole memory of the loop. The driver persists it and hands it to a successor."""

    active: str
    since_at_s: float
    reason: str = "start"
    kind: Kind = Kind.KEEP
    before: str | None = None
    """The policy that a rollback, or the end of an override, returns to; None when there is none."""
    ends_at_s: float | None = None
    """When the override ends, if its source said so. The driver stops to pass the override at that instant."""
    baseline: Baseline | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    """How often each policy was rolled back."""
    banned_until_at_s: Mapping[str, float] = field(default_factory=dict)
    left_at_s: Mapping[str, float] = field(default_factory=dict)
    """When a proposal last replaced each policy."""
    switched_at_s: tuple[float, ...] = ()
    """The instants of the switches of the last hour that the loop decided."""
    returns: int = 0
    """How many proposals in a row brought back a policy soon after it had been left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`policy` should be in force on every engine, because of `reason`."""

    kind: Kind
    policy: str
    reason: str


def step(
    now: float,
    state: SteerState,
    qos: Qos,
    proposal: Proposal | None,
    settings: GuardSettings,
    *,
    override: str | None = None,
    allow: Collection[str] | None = None,
) -> tuple[SteerState, Verdict]:
    """One decision. `qos` covers the time since the last one; call it at least once in `window_s`. `allow` lists the
    policies that may be active, besides the safe one, while no person has chosen a policy; None allows all."""
    after, verdict = _decide(now, state, qos, proposal, settings, override)
    if override is not None or allow is None or after.active in (policies.SAFE, *allow):
        return after, verdict
    return _switch(now, after, Kind.SWITCH, start_policy(allow), f"{after.active} is not allowed", None)


def start_policy(allow: Collection[str]) -> str:
    """The policy that a pool begins with, and that it takes when its policy is no longer allowed."""
    return policies.DEFAULT if policies.DEFAULT in allow else policies.SAFE


def minimum_dwell_s(state: SteerState, settings: GuardSettings) -> float:
    """Seconds from `state.since_at_s` until a proposal may replace the active policy."""
    dwell_s = settings.dwell_s * (1 << state.returns)
    return max(dwell_s, settings.bypass_s) if state.kind is Kind.BYPASS else dwell_s


def _decide(
    now: float, state: SteerState, qos: Qos, proposal: Proposal | None, settings: GuardSettings, override: str | None
) -> tuple[SteerState, Verdict]:
    if override is not None:
        if override == state.active and state.kind is Kind.OVERRIDE:
            return state, _keep(state)
        overridden = state.before if state.kind is Kind.OVERRIDE else state.active
        after, verdict = _switch(now, state, Kind.OVERRIDE, override, "set by hand", None)
        return replace(after, before=overridden), verdict
    if state.kind is Kind.OVERRIDE and state.before is not None:
        return _switch(now, state, Kind.SWITCH, state.before, "the override has ended", None)
    if proposal is not None and proposal.emergency and state.active != policies.SAFE:
        if len(_of_last_hour(now, state)) >= settings.per_hour:
            return state, _keep(state)
        return _switch(now, state, Kind.BYPASS, policies.SAFE, proposal.reason, None)
    regret = _regret(now, state, qos, settings)
    if regret is not None and state.before is not None and len(_of_last_hour(now, state)) < settings.per_hour - 1:
        strikes = state.strikes.get(state.active, 0) + 1
        ban_s = min(settings.ban_s * 2 ** min(strikes - 1, 20), MAX_BAN_S)
        punished = replace(
            state,
            strikes={**state.strikes, state.active: strikes},
            banned_until_at_s={**state.banned_until_at_s, state.active: now + ban_s},
        )
        return _switch(now, punished, Kind.ROLLBACK, state.before, regret, None)
    if proposal is None or proposal.emergency or proposal.policy == state.active:
        return state, _keep(state)
    dwell_s = minimum_dwell_s(state, settings)
    if now - state.since_at_s < dwell_s or now < state.banned_until_at_s.get(proposal.policy, now):
        return state, _keep(state)
    if len(_of_last_hour(now, state)) >= settings.per_hour - 2:
        return state, _keep(state)
    again = now - state.left_at_s.get(proposal.policy, -math.inf) <= SOON_DWELLS * dwell_s
    remembered = replace(
        state,
        left_at_s={**state.left_at_s, state.active: now},
        returns=min(state.returns + 1, MAX_RETURNS) if again else 0,
    )
    baseline = Baseline(
        ttft_p99_s=qos.ttft.quantile_s(0.99),
        miss_ratio=qos.miss_ratio,
        tpot_p99_s=qos.tpot.quantile_s(0.99) if qos.tpot.count else None,
    )
    return _switch(now, remembered, Kind.SWITCH, proposal.policy, proposal.reason, baseline)


def _regret(now: float, state: SteerState, qos: Qos, settings: GuardSettings) -> str | None:
    """Why the last switch was a mistake; None when it was none, or when it is too late or too early to tell."""
    if state.baseline is None or now - state.since_at_s > settings.window_s or qos.ttft.count < settings.enough:
        return None
    ttft_s = qos.ttft.quantile_s(0.99)
    ttft_limit_s = settings.rho * max(state.baseline.ttft_p99_s, settings.floor_ttft_s)
    miss_limit = settings.rho * max(state.baseline.miss_ratio, settings.floor_miss_ratio)
    if ttft_s > ttft_limit_s:
        return f"rollback: after {state.active} TTFT p99 is {ttft_s:.2f} s, limit {ttft_limit_s:.2f} s"
    if state.baseline.tpot_p99_s is not None and qos.tpot.count >= settings.enough:
        tpot_s = qos.tpot.quantile_s(0.99)
        tpot_limit_s = settings.rho * max(state.baseline.tpot_p99_s, settings.floor_tpot_s)
        if tpot_s > tpot_limit_s:
            return f"rollback: after {state.active} TPOT p99 is {tpot_s:.3f} s, limit {tpot_limit_s:.3f} s"
    if qos.with_target >= settings.enough and qos.miss_ratio > miss_limit:
        return f"rollback: after {state.active} {qos.miss_ratio:.0%} of targets are missed, limit {miss_limit:.0%}"
    return None


def _switch(
    now: float, state: SteerState, kind: Kind, policy: str, reason: str, baseline: Baseline | None
) -> tuple[SteerState, Verdict]:
    counted = kind in (Kind.BYPASS, Kind.ROLLBACK) or baseline is not None
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
    )
    return after, Verdict(kind=kind, policy=policy, reason=reason)


def _of_last_hour(now: float, state: SteerState) -> tuple[float, ...]:
    """The switches of the last hour. An instant in the future, which a clock that was set back leaves, does not count."""
    return tuple(at_s for at_s in state.switched_at_s if now - HOUR_S < at_s <= now)


def _keep(state: SteerState) -> Verdict:
    return Verdict(kind=Kind.KEEP, policy=state.active, reason=state.reason)
