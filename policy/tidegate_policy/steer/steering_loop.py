"""One pool's steering loop: reports of its engines and the time in, the policy that should be in force out.

A driver calls `SteeringLoop.observe` at least once in `Settings.observation_period_s`. An observation is what the
engines delivered since the previous one. Every `Settings.interval_s` the selector may propose a policy, from the
whole interval. Every observation may be an emergency, and the guards judge the last switch by the observations since it.
`guards.SteerState` is all that must be kept for a successor.

Instants are seconds of the wall clock, because the state outlives the process.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tidegate_policy import clock_steps, policies, qos
from tidegate_policy.steer import (
    claimed_targets,
    credible_reports,
    credible_tenants,
    emergency,
    guards,
    llm_choice,
    proposal,
    rules,
    switch_regret,
    trial,
)

SHORTEST_REPORT_PERIOD_S, LONGEST_REPORT_PERIOD_S = 0.1, 60.0
"""Time between two reports of an engine that EngineControl accepts."""
REPORTS_AN_OBSERVATION = 4
NO_GAP_PERIODS = 1.5
"""After a longer time than so many observation periods the pool was not observed for a while."""
OLDEST_ANSWER_PERIODS = 2
"""An answer whose question was asked more observation periods before the decision is too old."""
SAME_END_S = 2.0
"""Two ends of an override that differ by less are the same end: gateways report a remaining duration, not an instant."""


def observation_period_s(*, interval_s: float, window_s: float) -> float:
    """Time between two observations: the guards need at least two in their rollback window. A model has as long to
    answer."""
    return min(interval_s, window_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a pool's spec says about its policy."""

    allow: tuple[str, ...]
    """Policies that may be active while no person has chosen one; `policies.SAFE` is always allowed."""
    interval_s: float
    """Time between two decisions of the selector."""
    guards: guards.GuardSettings
    selector: proposal.Selector = field(default_factory=rules.Rules)
    parameters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By policy: the values of the parameters that do not take their default."""

    @property
    def observation_period_s(self) -> float:
        """Time between two observations."""
        return observation_period_s(interval_s=self.interval_s, window_s=self.guards.window_s)

    @property
    def report_period_s(self) -> float:
        """Time between two reports of an engine."""
        return _accepted(self.observation_period_s / REPORTS_AN_OBSERVATION)

    @property
    def idle_report_period_s(self) -> float:
        """Time between two reports of an engine in which nothing happens."""
        return _accepted(self.observation_period_s)


def _accepted(period_s: float) -> float:
    """The nearest period of reports that EngineControl accepts."""
    return min(max(period_s, SHORTEST_REPORT_PERIOD_S), LONGEST_REPORT_PERIOD_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A policy that a person has chosen, in the spec or for a limited time."""

    policy: str
    reason: str
    ends_at_s: float | None = None
    """When the override ends; None when its source decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one observation."""

    state: guards.SteerState
    verdict: guards.Verdict
    window: Mapping[str, qos.Qos] | None
    """What each engine delivered since the selector's last decision, by address; None between two decisions."""
    outliers: Mapping[str, str] = field(default_factory=dict)
    """By address: why the numbers of an engine cannot be believed."""
    held: guards.Held | None = None
    """The proposal of the last decision that waits; None where none does."""
    judged: qos.Qos | None = None
    """The service that followed the last switch, in the observation that completes its trial; None in every other one."""


class SteeringLoop:
    """The loop of one pool."""

    def __init__(self, state: guards.SteerState | None, settings: Settings, *, now: float) -> None:
        """`state` is what a predecessor left; None for a pool that was never steered."""
        self.settings = settings
        """The settings in force; a caller may replace them between two observations."""
        fresh = guards.SteerState(active=guards.start_policy(settings.allow), since_at_s=now)
        self.state = fresh if state is None else guards.credible(now, state)
        self._decided_at_s = self._observed_at_s = now
        self._steps = clock_steps.ClockSteps()
        self._interval: dict[str, qos.Qos] = {}
        """What each engine delivered since the selector's last decision."""
        self._decided = qos.NOTHING
        """What the pool delivered in the interval of the last decision."""
        self._tenants = credible_tenants.TenantRecord()
        """The service of the tenants since the selector's last decision."""
        self._engines: tuple[int, int] = (0, 0)
        """The engines that report, and those whose reports are overdue, at the last observation."""
        self._pending = llm_choice.Pending()
        self._held: guards.Held | None = None

    def observe(
        self,
        now: float,
        reports: Mapping[str, Sequence[qos.Qos]],
        *,
        silent: Collection[str],
        override: Override | None = None,
        unfit: Mapping[str, str] = MappingProxyType({}),
        monotonic_s: float | None = None,
    ) -> Outcome:
        """One observation. `reports` has an entry for each engine of the pool, with its reports since the previous
        observation; `silent` names the engines whose reports are overdue. `unfit` has the answers of the engines that
        followed the policy before the active one, and do not know the active one. By `monotonic_s`, a clock that is never
        set, the loop notices that the wall clock was set."""
        self._follow_clock(now, monotonic_s)
        longest_s = (
            max(now - self._observed_at_s, self.settings.observation_period_s) + 2 * self.settings.report_period_s
        )
        self._observed_at_s = now
        latest = {
            engine: credible_reports.within(qos.over_time(windows, tenants=False), longest_s)
            for engine, windows in reports.items()
            if windows
        }
        believed = credible_reports.believed(latest)
        together = qos.across(believed.reports.values(), tenants=False)
        self._follow_trial(now, together)
        self._tenants.add(reports, believed.shares)
        for engine, report in latest.items():
            earlier = self._interval.get(engine)
            self._interval[engine] = report if earlier is None else qos.over_time((earlier, report), tenants=False)
        is_decision = now - self._decided_at_s >= self.settings.interval_s
        if is_decision:
            believed = credible_reports.believed(self._interval)
            together = self._decided = self._together(believed)
            self._decided_at_s = now
            self._interval, self._tenants = {}, credible_tenants.TenantRecord()
        self._engines = (len(reports) - len(silent), len(silent))
        oldest_s = OLDEST_ANSWER_PERIODS * self.settings.observation_period_s
        answered = self._pending.taken(now, oldest_s=oldest_s) if is_decision else {}
        self.state, verdict = _decide(
            now,
            self.state,
            self._with_engines(together),
            believed.reports.values(),
            self.settings,
            override,
            answered,
            unfit=unfit,
            only_emergencies=not is_decision,
        )
        if is_decision or verdict.held or verdict.kind is not guards.Kind.KEEP:
            self._held = verdict.held
        judged: qos.Qos | None = None
        held = self.state.trial
        if held is not None and now >= self.state.since_at_s + guards.trial_s(self.state, self.settings.guards):
            judged = held.service
            effect = switch_regret.UNSEEN if judged is None else switch_regret.effect(judged)
            self.state = replace(self.state, effect=effect, trial=None)
        return Outcome(
            state=self.state,
            verdict=verdict,
            window=believed.reports if is_decision else None,
            outliers=believed.outliers,
            held=self._held,
            judged=judged,
        )

    def _follow_clock(self, now: float, monotonic_s: float | None) -> None:
        """Moves what is remembered when the wall clock was set since the last observation."""
        if step_s := self._steps.step_s(now, monotonic_s):
            self.state = guards.shifted(self.state, step_s)
            self._decided_at_s += step_s
            self._observed_at_s += step_s
            self._pending.shift(step_s)
            if self._held is not None:
                self._held = replace(self._held, until_at_s=self._held.until_at_s + step_s)

    def _together(self, interval: credible_reports.Believed) -> qos.Qos:
        """What the pool delivered in the interval so far."""
        return replace(qos.across(interval.reports.values(), tenants=False), tenants=self._tenants.together())

    def question(self, now: float) -> llm_choice.Question | None:
        """What a model is asked after the last observation before a decision of the selector `llm`; None at any other time.
        The policies of the question are those that the decision allows: banned policies are not among them."""
        decides_at_s = self._decided_at_s + self.settings.interval_s
        if not isinstance(self.settings.selector, llm_choice.LlmChoice):
            return None
        if not now < decides_at_s <= now + self.settings.observation_period_s:
            return None
        together = self._together(credible_reports.believed(self._interval)) if self._interval else self._decided
        allow = guards.allowed(now, self.state, self.settings.allow)
        believed = claimed_targets.believed(self._with_engines(together))
        question = llm_choice.question(believed, self.state.active, allow)
        self._pending.ask(now, question)
        return question

    def answered(self, question: llm_choice.Question, answer: llm_choice.Answer) -> None:
        """The model has answered, or failed to."""
        self._pending.answered(question, answer)

    def _with_engines(self, together: qos.Qos) -> qos.Qos:
        engines, silent = self._engines
        return replace(together, engines=engines, silent=silent)

    def _follow_trial(self, now: float, latest: qos.Qos) -> None:
        """Adds the latest observation to the trial of the last switch, if its service counts as the effect of it."""
        state = self.state
        if state.kind is guards.Kind.KEEP or state.effect:
            return
        held = trial.Trial(seen_at_s=state.since_at_s) if state.trial is None else state.trial
        state = replace(state, trial=trial.seen(held, now, NO_GAP_PERIODS * self.settings.observation_period_s))
        assert state.trial is not None
        age_s, settle_s = now - state.since_at_s, 0.0 if state.baseline is None else state.baseline.settle_s
        if settle_s <= age_s <= guards.trial_s(state, self.settings.guards) + guards.LATE_S:
            state = replace(state, trial=trial.with_service(state.trial, latest))
        self.state = state

    def active_override(self, now: float) -> Override | None:
        """The override in force unless its time is over: the best guess while its source cannot be asked."""
        state = self.state
        if state.kind is not guards.Kind.OVERRIDE or (state.ends_at_s is not None and now >= state.ends_at_s):
            return None
        return Override(policy=state.active, reason=state.reason, ends_at_s=state.ends_at_s)


def explained(state: guards.SteerState) -> str:
    """The reason of the active policy as persons read it. Where the rules made the last decision in place of the model of
    the selector `llm`, it says so, also when the policy stayed."""
    trouble = state.memory.get(llm_choice.LlmChoice.__name__, {}).get("trouble")
    if not trouble or state.kind in (guards.Kind.OVERRIDE, guards.Kind.BYPASS):
        return state.reason
    stand_in = llm_choice.stand_in(str(trouble))
    return state.reason if stand_in in state.reason else f"{state.reason}; last decision {stand_in}"


def _decide(
    now: float,
    state: guards.SteerState,
    together: qos.Qos,
    reports: Collection[qos.Qos],
    settings: Settings,
    override: Override | None,
    answered: proposal.Memory,
    *,
    unfit: Mapping[str, str],
    only_emergencies: bool,
) -> tuple[guards.SteerState, guards.Verdict]:
    proposed = emergency.found(together, reports)
    if proposed is None and not only_emergencies:
        proposed, state = _proposed(now, state, together, settings, answered)
    state, verdict = guards.step(
        now,
        state,
        together,
        proposed,
        settings.guards,
        trial=qos.NOTHING if state.trial is None or state.trial.service is None else state.trial.service,
        unknown=None if not unfit else f"{min(unfit)} answers {unfit[min(unfit)]}",
        override=None if override is None else override.policy,
        allow=settings.allow,
    )
    if override is not None and verdict.kind is guards.Kind.OVERRIDE:
        state = replace(state, reason=override.reason)
        verdict = replace(verdict, reason=override.reason)
    if override is not None and not _same_end(state.ends_at_s, override.ends_at_s):
        state = replace(state, ends_at_s=override.ends_at_s)
    return state, verdict


def _proposed(
    now: float, state: guards.SteerState, together: qos.Qos, settings: Settings, answered: proposal.Memory
) -> tuple[proposal.Proposal | None, guards.SteerState]:
    """What the selector proposes, or that the policy from before a bypass comes back; and the state with its memory. A
    memory that the selector cannot read is forgotten. All that the selector `llm` reads is what came of its question."""
    name = type(settings.selector).__name__
    together = claimed_targets.believed(together)
    allow = guards.allowed(now, state, settings.allow)
    try:
        is_llm = isinstance(settings.selector, llm_choice.LlmChoice)
        memory = dict(answered) if is_llm else copy.deepcopy(state.memory.get(name, {}))
        proposed = settings.selector.propose(together, state.active, allow, memory)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        memory = {}
        proposed = settings.selector.propose(together, state.active, allow, memory)
    if proposed is None and state.kind is guards.Kind.BYPASS and state.before is not None:
        back = state.before if state.before in allow else policies.SAFE
        proposed = proposal.Proposal(policy=back, reason="the emergency is over")
    return proposed, replace(state, memory={name: memory} if memory else {})


def _same_end(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < SAME_END_S
