"""How many engines should each node pool have now?

A pure state machine: an observation of the pool goes in, the wanted number of engines of each node pool comes out, with a
sentence that says why. The operator drives it over a cluster, and `tidegate_sim` in virtual time.

- The predicted work decides, not the utilisation: the calls that arrive, times the seconds of an engine that the cost model
  predicts for them (`call_load`), plus the work that waits. What is needed when an engine that starts now is ready counts
  (`load_history.growth`).
- The engines must carry this work with room for bursts: `slo_headroom` learns a factor from the targets that were met, and
  the square root of the work is added (square-root staffing, Halfin and Whitt 1981), because small pools need more room.
- `engine_sets` finds the cheapest set of engines.
- Fewer engines are wanted only if they carry the greatest work of the last `stabilisation_s` seconds with a margin, and if
  this result has not changed for a minute.
- An increase soon after a decrease shows that the decrease came too early, so the window doubles. It halves again with each
  decrease that nothing followed. So a load that swings stops moving the engines.
- While a part of the load is unknown, no fewer engines are wanted, and the window begins anew.
- At most `changes_an_hour` changes happen in any hour. The first two thirds of them may be decreases. The last one is an
  increase to all engines that the pool may have, so the bound never leaves a load without engines.
- A node pool for whose engines the cluster has no room gets no more than it has room for, until a later attempt. Without
  room in any node pool one engine stays wanted, so that it starts as soon as there is room.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_policy.cost import CostModel
from tidegate_policy.scale import call_load, engine_sets, load_history, shortage, slo_headroom
from tidegate_policy.scale.call_load import CallLoad

HOUR_S = 3600.0
LEAST_CHANGES = 6
"""The least bound on the changes of an hour."""
AMORTISED_S = 1800.0
"""A start costs as much as the engine costs in its start time, and is paid off in so many seconds."""
LONGEST_START_S = 3600.0
"""For so long the first engine that starts counts as work, so that it serves before the pool goes to zero again."""
SLIGHT_GROWTH = 1.02
"""Growth up to this factor is not worth a word."""
CHEAPER = 0.8
"""Engines are replaced by engines of another kind if the new set costs at most this share."""
WORTHWHILE = 0.85
"""Fewer engines are wanted if they cost at most this share."""
MOST_PATIENCE = 8.0
"""The window is at most so many times as long as the spec says."""
SOON = 2.0
"""An increase within so many windows after a decrease comes soon."""
SETTLED_S = 120.0
"""After a shortage, calls that came during it end for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """What a pool's spec says about its autoscaler."""

    stabilisation_s: float = 300.0
    """Fewer engines must have been enough for so long."""
    zero_after_s: float = 600.0
    """A pool without calls for so long goes to its minimum, which may be zero."""
    changes_an_hour: int = 30
    """Changes in any hour, at least `LEAST_CHANGES`."""
    spare: float = 1.5
    """Standard deviations of the number of calls in the engines for which there is room."""
    margin: float = 1.1
    """An increase makes room for so many times the work, and a decrease leaves as much room. So noise changes nothing."""
    drain_s: float = 60.0
    """Waiting calls should be done so many seconds after an engine that starts now is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """What is known of a node pool."""

    name: str
    cost: CostModel
    price: float
    """Of one engine for an hour; relative."""
    low: int
    high: int
    """Bounds of the number of engines: those of the spec and the quota."""
    ready: int
    start_s: float
    """Seconds from the creation of an engine until it serves."""
    unschedulable: int = 0
    """Engines for which the cluster has had no room for longer than a new node takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The pool since the previous observation."""

    seconds: float
    """Since then."""
    arrived: CallLoad
    waiting: CallLoad
    """Calls that wait in gateways."""
    queued: int
    """Calls that wait in the queues of engines. Their sizes are taken for the mean of the arriving calls."""
    running: int
    """Calls at engines."""
    targets: Mapping[str, slo_headroom.Targets] = field(default_factory=dict)
    """By class: the calls that ended."""
    tpot_s: float | None = None
    """The tightest target for the time of an output token."""
    node_pools: Sequence[NodePool] = ()
    is_whole: bool = True
    """Whether all gateways have told of their calls. If not, there may be more load than is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """The whole memory."""

    wanted: Mapping[str, int]
    """Engines of each node pool."""
    reason: str = "the autoscaler has begun with these engines"
    since_s: float = 0.0
    """The instant of the last change."""
    is_increase: bool = True
    """Whether the last change wanted more engines of a node pool."""
    began_s: float = 0.0
    """Since when the whole load is known."""
    busy_at_s: float = 0.0
    """When a call was last seen, or may have come unseen, or an engine started for one."""
    history: load_history.History = ()
    rates: tuple[tuple[float, CallLoad], ...] = ()
    """The present rates of the last `stabilisation_s` seconds, with their instants."""
    fewer: tuple[float, Mapping[str, int]] | None = None
    """The engines that would be enough, and since when this is the result."""
    lowered_at_s: float | None = None
    """The last decrease that left engines; None if there was none."""
    patience: float = 1.0
    """By how much the window is longer than the spec says."""
    short_at_s: float = 0.0
    """When fewer engines than the wanted ones were ready, the last time."""
    headroom: slo_headroom.Headroom = field(default_factory=slo_headroom.Headroom)
    changed_at_s: tuple[float, ...] = ()
    """The changes of the last hour."""
    shortages: Mapping[str, shortage.Shortage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`wanted` engines of each node pool, because of `reason`."""

    wanted: Mapping[str, int]
    changed: bool
    reason: str
    node_pools: Mapping[str, str]
    """By node pool: what bounds its engines, if something does."""


def begin(now: float, wanted: Mapping[str, int]) -> ScaleState:
    """The memory of a pool that has these engines."""
    return ScaleState(wanted=dict(wanted), since_s=now, began_s=now, busy_at_s=now)


def resumed(state: ScaleState, *, reason: str, since_s: float, changes: Sequence[float]) -> ScaleState:
    """The memory of a pool whose earlier autoscaler left these facts: the changes of an hour bind its successor too."""
    return replace(state, reason=reason, since_s=since_s, changed_at_s=tuple(changes))


def unseen(now: float, state: ScaleState) -> ScaleState:
    """The state while nothing is known of the load: the window begins anew."""
    return replace(state, began_s=now, busy_at_s=now, fewer=None)


def shifted(state: ScaleState, by_s: float) -> ScaleState:
    """The state with all instants moved by `by_s` seconds, because the wall clock was set."""
    return replace(
        state,
        since_s=state.since_s + by_s,
        began_s=state.began_s + by_s,
        busy_at_s=state.busy_at_s + by_s,
        history=tuple(replace(each, at_s=each.at_s + by_s) for each in state.history),
        rates=tuple((at_s + by_s, rate) for at_s, rate in state.rates),
        fewer=None if state.fewer is None else (state.fewer[0] + by_s, state.fewer[1]),
        lowered_at_s=None if state.lowered_at_s is None else state.lowered_at_s + by_s,
        short_at_s=state.short_at_s + by_s,
        changed_at_s=tuple(at_s + by_s for at_s in state.changed_at_s),
        shortages={name: replace(each, until_s=each.until_s + by_s) for name, each in state.shortages.items()},
    )


def step(now: float, state: ScaleState, seen: Observation, settings: ScaleSettings) -> tuple[ScaleState, Decision]:
    """One decision. Call it every few seconds; `load_history.RECENT_S` must span several observations."""
    state = _remembered(now, state, seen, settings)
    pools = _with_one([_bounded(now, each, state) for each in seen.node_pools], seen, state)
    work = _Work(state, seen, settings, pools)
    present = {each.name: min(max(state.wanted.get(each.name, 0), each.low), each.high) for each in pools}
    short_at_s = now if any(each.ready < present[each.name] for each in pools) else state.short_at_s
    state = replace(
        state,
        short_at_s=short_at_s,
        headroom=slo_headroom.observed(
            state.headroom, seen.targets, settled=now - short_at_s >= SETTLED_S, load=work.load(present)
        ),
    )
    state = replace(state, fewer=_fewer(now, state, work, present, settings))
    wanted, reason = _wanted(now, state, settings, work, present)
    bounds = _bounds(now, state, pools, work, wanted)
    if wanted == dict(state.wanted):
        return state, Decision(wanted=wanted, changed=False, reason=state.reason, node_pools=bounds)
    used = _of_last_hour(now, state)
    if wanted == present:  # the bounds have changed, and the load is not the reason
        after = replace(state, wanted=wanted, reason=reason, since_s=now)
        return after, Decision(wanted=wanted, changed=True, reason=reason, node_pools=bounds)
    is_increase = any(count > present[name] for name, count in wanted.items())
    if is_increase and len(used) >= _budget(settings) - 1:
        if len(used) >= _budget(settings):
            return state, Decision(wanted=state.wanted, changed=False, reason=state.reason, node_pools=bounds)
        wanted = {each.name: each.high for each in pools}
        reason = f"{reason}; this is the last of {_budget(settings)} changes of an hour, so all engines start"
    after = replace(
        _patient(now, state, settings, is_increase=is_increase),
        wanted=wanted,
        reason=reason,
        since_s=now,
        is_increase=is_increase,
        lowered_at_s=now if not is_increase and any(wanted.values()) else None,
        changed_at_s=(*used, now),
    )
    return after, Decision(wanted=wanted, changed=True, reason=reason, node_pools=bounds)


def _wanted(
    now: float,
    state: ScaleState,
    settings: ScaleSettings,
    work: "_Work",
    present: Mapping[str, int],
) -> tuple[dict[str, int], str]:
    """The engines that the pool should have, and why. `present` are the wanted engines within their bounds."""
    kept = dict(present), "the bounds of the spec or the room of the cluster changed"
    least = {each.name: each.low for each in work.pools}
    idle_s = now - state.busy_at_s
    window_s = _window_s(state, settings)
    pause_s = window_s if state.is_increase else load_history.RECENT_S
    may_lower = len(_of_last_hour(now, state)) < _budget(settings) * 2 // 3 and now - state.since_s >= pause_s
    if idle_s >= settings.zero_after_s:
        if present == least or not may_lower:
            return kept
        return least, f"no call for {idle_s:.0f} s"
    if not work.exists:
        return kept
    now_kinds = work.kinds(present, work.needed())
    carried = engine_sets.carried(now_kinds, present)
    if carried < 1.0:
        kinds = work.kinds(present, work.needed(settings.margin), keep=True)
        wanted = engine_sets.cheapest(kinds)
        if wanted != present:
            return wanted, work.sentence(present)
        return kept
    if not may_lower or now - state.began_s < window_s:
        return kept
    if state.fewer is None or now - state.fewer[0] < load_history.RECENT_S:
        return kept
    fewer, price = dict(state.fewer[1]), engine_sets.price(now_kinds, present)
    if fewer != present and engine_sets.price(now_kinds, fewer) <= WORTHWHILE * price:
        return fewer, f"{work.sentence(present)}, and fewer have been enough for {window_s:.0f} s"
    greatest = work.greatest(settings.margin)
    others = engine_sets.cheapest(work.kinds(present, greatest))
    if engine_sets.price(now_kinds, others) <= CHEAPER * price:
        both = {name: max(count, present[name]) for name, count in others.items()}
        if both != present and engine_sets.carried(work.kinds(present, greatest), others) >= 1.0:
            return both, f"{work.sentence(present)}, and other kinds of engines carry it for less"
    return kept


def _fewer(
    now: float, state: ScaleState, work: "_Work", present: Mapping[str, int], settings: ScaleSettings
) -> tuple[float, Mapping[str, int]] | None:
    """The engines of `present` that are enough for the greatest work, and since when this is the result; None if all of
    them are too few."""
    if not work.exists:
        return None
    greatest = work.greatest(settings.margin)
    found = engine_sets.cheapest(work.kinds(present, greatest, fewer=True))
    if engine_sets.carried(work.kinds(present, greatest), found) < 1.0:
        return None
    return state.fewer if state.fewer is not None and state.fewer[1] == found else (now, found)


class _Work:
    """The work of one decision, in engines of each node pool."""

    def __init__(
        self, state: ScaleState, seen: Observation, settings: ScaleSettings, pools: Sequence[NodePool]
    ) -> None:
        self.pools = pools
        self._state = state
        self._seen = seen
        self._settings = settings
        self._rate = load_history.recent(state.history)
        self._waiting = seen.waiting + call_load.mean(self._rate).times(seen.queued)
        self._growth = {
            each.name: load_history.growth(state.history, ahead_s=each.start_s + load_history.RECENT_S / 2)
            for each in pools
        }
        self._dispersion = load_history.dispersion(state.history)

    @property
    def exists(self) -> bool:
        """Whether there is any work, now or lately."""
        return self._rate.calls > 0.0 or self._waiting.calls > 0.0 or self._seen.running > 0

    def needed(self, margin: float = 1.0) -> dict[str, float]:
        """By node pool: its engines that would carry the predicted work alone."""
        return {
            each.name: margin * self._staffed(each, self._rate.times(self._growth[each.name]))
            + self._seconds(each, self._waiting) / (each.start_s + self._settings.drain_s)
            for each in self.pools
        }

    def greatest(self, margin: float) -> dict[str, float]:
        """By node pool: its engines that would carry the greatest work of the last `stabilisation_s` seconds alone."""
        found = self.needed(margin)
        for _, rate in self._state.rates:
            for each in self.pools:
                found[each.name] = max(found[each.name], margin * self._staffed(each, rate))
        return found

    def load(self, counts: Mapping[str, int]) -> float:
        """The work of a second over the seconds of the engines."""
        carried = sum(
            counts[each.name] / seconds
            for each in self.pools
            if (seconds := self._seconds(each, self._rate)) > 0.0 and counts[each.name]
        )
        return 1.0 / carried if carried else 0.0

    def kinds(
        self, present: Mapping[str, int], needed: Mapping[str, float], *, keep: bool = False, fewer: bool = False
    ) -> list[engine_sets.Kind]:
        """The kinds of engines among which to choose: with `keep` no present engine goes, with `fewer` none comes."""
        return [
            engine_sets.Kind(
                name=each.name,
                price=each.price,
                share=1.0 / max(needed[each.name], 1e-6),
                low=present[each.name] if keep else each.low,
                high=present[each.name] if fewer else each.high,
                present=present[each.name],
                start_price=each.price * each.start_s / AMORTISED_S,
                fit=self.fits(each),
            )
            for each in self.pools
        ]

    def fits(self, node_pool: NodePool) -> bool:
        """Whether the engines can meet the tightest target for the time of an output token."""
        return self._seen.tpot_s is None or node_pool.cost.step_s < self._seen.tpot_s

    def sentence(self, present: Mapping[str, int]) -> str:
        """What is predicted, in engines of the node pool with most engines."""
        pool = max(self.pools, key=lambda each: (present[each.name], each.high, each.name))
        parts: list[str] = []
        if self._rate.calls:
            alone = self._seconds(pool, self._rate)
            parts.append(f"{self._rate.calls:.2f} calls/s take {alone:.2f} engines of {pool.name}")
            if (growth := self._growth[pool.name]) > SLIGHT_GROWTH:
                parts.append(f"{growth:.2f} times as many are expected in {pool.start_s:.0f} s")
        if (waiting := round(self._waiting.calls)) > 0:
            calls = "1 call waits" if waiting == 1 else f"{waiting} calls wait"
            parts.append(f"{calls}, {self._seconds(pool, self._waiting):.1f} s of work")
        if self._rate.calls:
            parts.append(f"with room for bursts and targets they need {self.needed()[pool.name]:.2f}")
        return ", ".join(parts) or "calls are at the engines"

    def _staffed(self, node_pool: NodePool, rate: CallLoad) -> float:
        """Engines for this rate with headroom: the work times the learned factor, plus the spare places by the square root
        of the calls that are in the engines on average."""
        engines = self._seconds(node_pool, rate)
        places = call_load.places(rate, node_pool.cost)
        spare = self._settings.spare * math.sqrt(self._dispersion * engines / places)
        return self._state.headroom.factor * engines + spare

    def _seconds(self, node_pool: NodePool, load: CallLoad) -> float:
        """Seconds of an engine. A kind that cannot meet the target takes them all the same, and is the last choice."""
        tpot_s = self._seen.tpot_s if self.fits(node_pool) else None
        return call_load.engine_seconds(load, node_pool.cost, tpot_s=tpot_s)


def _remembered(now: float, state: ScaleState, seen: Observation, settings: ScaleSettings) -> ScaleState:
    """The memory with this observation."""
    history = state.history
    if seen.seconds > 0.0:  # a clock that was set back a little tells no rate
        slice = load_history.Slice(at_s=now, seconds=seen.seconds, load=seen.arrived)
        history = load_history.extended(history, slice, keep_s=load_history.TREND_S + load_history.RECENT_S)
    rates = [each for each in state.rates if each[0] > now - _window_s(state, settings)]
    is_seen = seen.arrived.calls > 0 or seen.waiting.calls > 0 or seen.queued > 0 or seen.running > 0
    is_seen = is_seen or _wakes(now, state, seen.node_pools)
    ready = {each.name: each.ready for each in seen.node_pools}
    remembered = {
        name: each
        for name, each in state.shortages.items()
        if now < each.until_s + shortage.LONGEST_RETRY_S and ready.get(name, 0) <= each.most
    }
    shortages = {
        each.name: shortage.found(
            now, remembered.get(each.name), max(state.wanted.get(each.name, 0) - each.unschedulable, each.ready)
        )
        for each in seen.node_pools
        if each.unschedulable
    }
    return replace(
        state,
        history=history,
        rates=(*rates, (now, load_history.recent(history))),
        began_s=state.began_s if seen.is_whole else now,
        busy_at_s=now if is_seen or not seen.is_whole else state.busy_at_s,
        shortages={**remembered, **shortages},
    )


def _wakes(now: float, state: ScaleState, node_pools: Sequence[NodePool]) -> bool:
    """Whether the pool wakes: none of its engines is ready, and one that the last increase wanted has room."""
    return (
        state.is_increase
        and now - state.since_s < LONGEST_START_S
        and not any(each.ready for each in node_pools)
        and any(state.wanted.get(each.name) and not each.unschedulable for each in node_pools)
    )


def _bounded(now: float, node_pool: NodePool, state: ScaleState) -> NodePool:
    """The node pool with the bound that the room of the cluster sets."""
    found = state.shortages.get(node_pool.name)
    high = max(node_pool.high, node_pool.low)
    if found is None or now >= found.until_s:
        return replace(node_pool, high=high)
    most = min(found.most, high)
    return replace(node_pool, high=most, low=min(node_pool.low, most))


def _with_one(pools: Sequence[NodePool], seen: Observation, state: ScaleState) -> Sequence[NodePool]:
    """The bounded node pools, of which one may have an engine if the room of the cluster leaves none to any of them: that
    which wants one, else the cheapest. Its engine waits for a node, and its pod asks an autoscaler of nodes for one."""
    possible = [each for each in seen.node_pools if max(each.high, each.low)]
    if not possible or any(each.high for each in pools):
        return pools
    one = min(possible, key=lambda each: (not state.wanted.get(each.name), each.price, each.name))
    return [replace(each, high=1, low=min(one.low, 1)) if each.name == one.name else each for each in pools]


def without_room(now: float, state: ScaleState) -> dict[str, int]:
    """By node pool that wants all engines for which the cluster has room, or more: how many these are."""
    return {
        name: each.most
        for name, each in state.shortages.items()
        if now < each.until_s and name in state.wanted and state.wanted[name] >= each.most
    }


def _bounds(
    now: float, state: ScaleState, pools: Sequence[NodePool], work: _Work, wanted: Mapping[str, int]
) -> dict[str, str]:
    """By node pool: why it has no other number of engines, as far as the node pool itself is the reason."""
    short = without_room(now, replace(state, wanted=wanted))
    found: dict[str, str] = {}
    for each in pools:
        if each.unschedulable:
            found[each.name] = f"the cluster has no room for {each.unschedulable} of its engines"
        elif each.name in short:
            found[each.name] = f"the cluster had room for {short[each.name]} of its engines"
        elif not work.fits(each):
            found[each.name] = "its engines cannot meet the tightest target for the time of an output token"
        elif wanted.get(each.name) == each.high:
            found[each.name] = f"it may have no more than {each.high}"
    return found


def _window_s(state: ScaleState, settings: ScaleSettings) -> float:
    """Seconds for which fewer engines must have been enough."""
    return settings.stabilisation_s * state.patience


def _patient(now: float, state: ScaleState, settings: ScaleSettings, *, is_increase: bool) -> ScaleState:
    """The state with the window that this change leads to."""
    if is_increase:
        is_soon = state.lowered_at_s is not None and now - state.lowered_at_s <= SOON * _window_s(state, settings)
        return replace(state, patience=min(2 * state.patience, MOST_PATIENCE)) if is_soon else state
    was_quiet = state.lowered_at_s is not None and now - state.lowered_at_s > SOON * _window_s(state, settings)
    return replace(state, patience=max(state.patience / 2, 1.0)) if was_quiet else state


def _budget(settings: ScaleSettings) -> int:
    return max(settings.changes_an_hour, LEAST_CHANGES)


def _of_last_hour(now: float, state: ScaleState) -> tuple[float, ...]:
    """The changes of the last hour. An instant in the future, which a clock that was set back leaves, does not count."""
    return tuple(at_s for at_s in state.changed_at_s if now - HOUR_S < at_s <= now)
