"""Whether a proposed switch takes effect: dwell, bypass, rollback, bans (H-MAS 3.4.1).

State in, verdict out. In order of precedence: a manual override, and its end; an emergency bypass to `fcfs`; a rollback
when the pool got worse after a switch; and, once the active order has had its minimum dwell, the selector's proposal. An
order that is not allowed is left at once, unless a person has chosen it. A policy that was rolled back is banned, each time
twice as long, and an order that comes back soon after it was left must stay twice as long as before: neither a bad order
nor two symptoms that take turns can make the pool oscillate. `fcfs` is never banned, so there is always a way back.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate_policy.qos import Qos
from tidegate_policy.steer.rules import SAFE, Proposal, start


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
    """Seconds that an order stays before a proposal may replace it; doubled each time that proposals take turns."""
    window_s: float = 20.0
    """Seconds after a switch in which it may be rolled back."""
    rho: float = 1.2
    """Roll back when TTFT p99 or the miss ratio is above rho times what it was before the switch."""
    floor_ttft_s: float = 0.05
    """TTFT baseline below which no worsening counts: it is noise."""
    floor_miss_ratio: float = 0.02
    """Miss-ratio baseline below which no worsening counts: without a floor one miss after none is infinitely worse."""
    enough: int = 20
    """Calls a window must have seen before a rollback trusts it."""
    ban_s: float = 300.0
    """Seconds that a rolled-back policy is banned the first time; doubled each time, at most a day."""
    bypass_s: float = 60.0
    """Seconds that a bypass lasts at least."""


MAX_BAN_S = 86_400.0
MAX_RETURNS = 4
"""Doublings of the dwell at most: a quarter of an hour from the default."""
SOON_DWELLS = 2
"""An order that comes back within so many dwells of when it was left is taken for one of two that take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How the pool did just before a switch."""

    ttft_p99_s: float
    miss_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteerState:
    """All that the loop remembers; the shell keeps it and hands it back."""

    active: str
    since_s: float
    reason: str = "start"
    kind: Kind = Kind.KEEP
    before: str | None = None
    """The order that a rollback, or the end of an override, returns to; None when there is nothing to return to."""
    until_s: float | None = None
    """When the override ends, as far as its giver said; the shell keeps it and stops to hand the override in."""
    baseline: Baseline | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    """How often each policy was rolled back."""
    banned_until_s: Mapping[str, float] = field(default_factory=dict)
    left_s: Mapping[str, float] = field(default_factory=dict)
    """When a proposal last replaced each order."""
    returns: int = 0
    """How many proposals in a row brought back an order soon after it had been left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do now: `policy` should be in force on every engine, because of `reason`."""

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
    """One decision. `qos` covers the time since the last one; call it at least once in `window_s`. `allow` is the orders
    that may be active, besides `fcfs`, while no person has chosen one; None = any."""
    after, verdict = _decide(now, state, qos, proposal, settings, override)
    if override is not None or allow is None or after.active in (SAFE, *allow):
        return after, verdict
    return _switch(now, after, Kind.SWITCH, start(allow), f"{after.active} is not allowed", None)


def minimum_dwell_s(state: SteerState, settings: GuardSettings) -> float:
    """Seconds from `state.since_s` until a proposal may replace the active order."""
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
    if proposal is not None and proposal.emergency and state.active != SAFE:
        return _switch(now, state, Kind.BYPASS, SAFE, proposal.reason, None)
    regret = _regret(now, state, qos, settings)
    if regret is not None and state.before is not None:
        strikes = state.strikes.get(state.active, 0) + 1
        ban_s = min(settings.ban_s * 2 ** min(strikes - 1, 20), MAX_BAN_S)
        punished = replace(
            state,
            strikes={**state.strikes, state.active: strikes},
            banned_until_s={**state.banned_until_s, state.active: now + ban_s},
        )
        return _switch(now, punished, Kind.ROLLBACK, state.before, regret, None)
    if proposal is None or proposal.emergency or proposal.policy == state.active:
        return state, _keep(state)
    dwell_s = minimum_dwell_s(state, settings)
    if now - state.since_s < dwell_s or now < state.banned_until_s.get(proposal.policy, now):
        return state, _keep(state)
    again = now - state.left_s.get(proposal.policy, -math.inf) <= SOON_DWELLS * dwell_s
    leaving = replace(
        state,
        left_s={**state.left_s, state.active: now},
        returns=min(state.returns + 1, MAX_RETURNS) if again else 0,
    )
    baseline = Baseline(ttft_p99_s=qos.ttft.quantile_s(0.99), miss_ratio=qos.miss_ratio)
    return _switch(now, leaving, Kind.SWITCH, proposal.policy, proposal.reason, baseline)


def _regret(now: float, state: SteerState, qos: Qos, settings: GuardSettings) -> str | None:
    """Why the last switch was a mistake; None when it was not, or it is too late or too early to tell."""
    if state.baseline is None or now - state.since_s > settings.window_s or qos.ttft.count < settings.enough:
        return None
    ttft_s = qos.ttft.quantile_s(0.99)
    ttft_limit_s = settings.rho * max(state.baseline.ttft_p99_s, settings.floor_ttft_s)
    miss_limit = settings.rho * max(state.baseline.miss_ratio, settings.floor_miss_ratio)
    if ttft_s > ttft_limit_s:
        return f"after {state.active} TTFT p99 is {ttft_s:.2f} s, limit {ttft_limit_s:.2f} s"
    if qos.with_target >= settings.enough and qos.miss_ratio > miss_limit:
        return f"after {state.active} {qos.miss_ratio:.0%} of targets are missed, limit {miss_limit:.0%}"
    return None


def _switch(
    now: float, state: SteerState, kind: Kind, policy: str, reason: str, baseline: Baseline | None
) -> tuple[SteerState, Verdict]:
    after = replace(
        state,
        active=policy,
        since_s=now,
        reason=reason,
        kind=kind,
        before=state.active if baseline is not None else None,
        until_s=None,
        baseline=baseline,
    )
    return after, Verdict(kind=kind, policy=policy, reason=reason)


def _keep(state: SteerState) -> Verdict:
    return Verdict(kind=Kind.KEEP, policy=state.active, reason=state.reason)
