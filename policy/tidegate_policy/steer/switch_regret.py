"""Did a switch of the policy make the service worse than the load explains?

The baseline is what the pool delivered just before the switch, extrapolated: calls that came faster than they were served
wait behind one another under every policy, so waits grow and targets are missed without any fault of the new policy. The
growth of the queue follows from the arrivals and from the *earlier* rate of completions. So a policy that serves fewer
calls does not excuse itself by the queue that it causes.

Where calls have targets, met targets decide. A switch is a mistake if the share of met targets and also the number of met
targets a second are below what was expected. A switch that makes long calls wait and meets more targets is no mistake,
whatever its tail latency is. Under a load that rises so fast that most targets are lost anyway, a switch is a mistake if
more targets are missed and also fewer calls finish than before, although calls wait. Where calls have no targets, TTFT p99
and TPOT p99 decide. A pool that finishes few calls a second is on trial for longer.

Clients claim targets (`claimed_targets`). Where first tokens come at once, missed targets are a mistake only if TTFT p99 or
TPOT p99, which no client can claim, are worse too. So no tenant takes a switch back by its claims, or by sending less.
"""

import math
from dataclasses import dataclass

from tidegate_policy.qos import Qos
from tidegate_policy.steer import claimed_targets

FLOOR_TTFT_S, FLOOR_TPOT_S, FLOOR_MISS_RATIO = 0.05, 0.1, 0.02
"""A lower baseline counts as this value: smaller differences are noise, text that comes faster than 0.1 s a token is faster
than people read, and one miss after none would otherwise be infinitely worse."""
TOLERABLE_S = 2.0
"""A wait of this length misses few targets."""
LONGEST_SETTLE_S = 30.0
LONGEST_WINDOW_S = 60.0
COLLAPSE = 0.5
"""With fewer completions than this share of the expected ones no misses need be seen: the calls that will miss wait."""
FEWEST, SHORT_OF = 5, 0.8
"""The calls without which no trial tells anything; and the part of the longest trial that observations surely cover."""
NOISE = 2.0
"""Standard deviations by which the misses must exceed their limit."""
UNSEEN = "no observation of the pool fell into the time of its trial"
"""The effect of a switch where no observation of its trial counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The quality of service just before a switch. The fields with defaults are absent from a state of an earlier
    version."""

    ttft_p99_s: float
    miss_ratio: float
    tpot_p99_s: float | None = None
    """None when no call with two tokens finished."""
    ttft_p50_s: float = 0.0
    target_rate: float = 0.0
    """Finished calls with a target, a second."""
    finish_rate: float = 0.0
    """Finished calls a second."""
    grown: float = 0.0
    """Calls by which the queue grew in the window of the baseline. The misses that they will cause are still to come."""
    work_s: float = 0.0
    """Mean work of the calls that came."""
    settle_s: float = 0.0
    """Seconds after the switch in which most calls that finish had started before it."""


def baseline(qos: Qos) -> Baseline:
    """The baseline of a switch now; `qos` is the last window before it."""
    window_s = max(qos.window_s, 1e-3)
    return Baseline(
        ttft_p99_s=qos.ttft.quantile_s(0.99),
        miss_ratio=qos.miss_ratio,
        tpot_p99_s=qos.tpot.quantile_s(0.99) if qos.tpot.count else None,
        ttft_p50_s=qos.ttft.quantile_s(0.5),
        target_rate=qos.with_target / window_s,
        finish_rate=qos.finished / window_s,
        grown=float(max(qos.arrived - qos.finished, 0)),
        work_s=qos.service.mean_s,
        settle_s=min(qos.service.quantile_s(0.9), LONGEST_SETTLE_S),
    )


def window_s(before: Baseline, least_s: float, *, enough: int) -> float:
    """Seconds of a trial after `settle_s`: `least_s`, or longer until `enough` calls finish at the earlier rate."""
    if not before.finish_rate:
        return least_s
    return max(least_s, min(enough / before.finish_rate, LONGEST_WINDOW_S))


def found(before: Baseline, trial: Qos, age_s: float, *, rho: float, enough: int) -> str | None:
    """What is worse than expected `age_s` seconds after the switch, as the end of a sentence; None when nothing is."""
    if not before.finish_rate:  # nothing is known of the service before
        return None
    waits_s = _further_wait_s(before, trial, age_s)
    if before.target_rate:
        if before.finish_rate * trial.window_s < _enough(before, enough):
            return None
        if fewer := _fewer_finished(before, trial, rho):
            return fewer
        if trial.ttft.quantile_s(0.9) < claimed_targets.LONG_WAIT_S and not _slower(
            before, trial, waits_s, rho, enough
        ):
            return None
        return _fewer_met(before, trial, waits_s, rho)
    return _slower(before, trial, waits_s, rho, enough)


def _slower(before: Baseline, trial: Qos, waits_s: float, rho: float, enough: int) -> str | None:
    """Whether first tokens, or later ones, come later than expected."""
    if trial.ttft.count >= enough:
        ttft_s, limit_s = trial.ttft.quantile_s(0.99), rho * (max(before.ttft_p99_s, FLOOR_TTFT_S) + waits_s)
        if ttft_s > limit_s:
            return f"TTFT p99 is {ttft_s:.2f} s, limit {limit_s:.2f} s"
    if before.tpot_p99_s is not None and trial.tpot.count >= enough:
        tpot_s, limit_s = trial.tpot.quantile_s(0.99), rho * max(before.tpot_p99_s, FLOOR_TPOT_S)
        if tpot_s > limit_s:
            return f"TPOT p99 is {tpot_s:.3f} s, limit {limit_s:.3f} s"
    return None


def _enough(before: Baseline, enough: int) -> float:
    """The calls that a trial must let expect: fewer where the longest trial has fewer."""
    return max(min(enough, SHORT_OF * LONGEST_WINDOW_S * before.finish_rate), FEWEST)


def _further_wait_s(before: Baseline, trial: Qos, age_s: float) -> float:
    """Seconds by which waits would have grown under the earlier policy."""
    if not before.finish_rate or not trial.window_s:
        return 0.0
    grown = before.grown + (trial.arrived / trial.window_s - before.finish_rate) * age_s
    return max(grown, 0.0) / before.finish_rate


def _fewer_finished(before: Baseline, trial: Qos, rho: float) -> str | None:
    """Whether fewer calls finish although calls wait. Longer calls may finish more slowly, and no more finish than there
    are."""
    longer = max(trial.service.mean_s / before.work_s, 1.0) if before.work_s else 1.0
    expected = min(before.finish_rate * trial.window_s, trial.arrived + trial.waiting) / (rho * longer)
    if not trial.waiting or trial.finished >= expected - NOISE * math.sqrt(expected):
        return None
    limit = _tolerated(before, rho)
    collapsed = trial.finished < COLLAPSE * expected
    if not collapsed and not _exceeds(trial, limit):
        return None
    return (
        f"{trial.finished} calls finished in {trial.window_s:.0f} s, expected {expected:.0f}, and {trial.miss_ratio:.0%} "
        f"of targets are missed, limit {limit:.0%}"
    )


def _fewer_met(before: Baseline, trial: Qos, waits_s: float, rho: float) -> str | None:
    usual_s = before.ttft_p50_s + TOLERABLE_S
    expected = (1 - _tolerated(before, rho)) * usual_s / (usual_s + waits_s)
    limit = 1 - expected
    if not _exceeds(trial, limit):
        return None
    met_rate = (trial.with_target - trial.missed) / max(trial.window_s, 1e-3)
    if met_rate >= before.target_rate * expected:
        return None
    return (
        f"{trial.miss_ratio:.0%} of targets are missed, limit {limit:.0%}, and {met_rate:.2f} targets a second are met, "
        f"expected {before.target_rate * expected:.2f}"
    )


def _tolerated(before: Baseline, rho: float) -> float:
    """The share of targets that may be missed under the load of the baseline."""
    tolerated = min(rho * max(before.miss_ratio, FLOOR_MISS_RATIO), 1 - (1 - before.miss_ratio) / rho)
    return max(tolerated, FLOOR_MISS_RATIO)


def _exceeds(trial: Qos, limit: float) -> bool:
    noise = NOISE * math.sqrt(trial.with_target * limit * (1 - limit))
    return trial.missed > limit * trial.with_target + noise


def effect(trial: Qos) -> str:
    """What a switch that stayed did, in words."""
    parts = [f"{trial.finished} calls finished in {trial.window_s:.0f} s"]
    if trial.with_target:
        parts.append(f"{1 - trial.miss_ratio:.0%} of {trial.with_target} targets met")
    if trial.ttft.count:
        parts.append(f"TTFT p50 {trial.ttft.quantile_s(0.5):.2f} s, p99 {trial.ttft.quantile_s(0.99):.2f} s")
    return ", ".join(parts)
