"""Drives a pool's steering loop over real engines: it collects their reports, and puts the decided policy in force.

`tidegate_policy.steer.steering_loop` decides. The operator has one driver for each ServingPool, and `tidegate up` has one
without a cluster. A driver knows engines by address only. An engine that reports another policy than the decided one, or
other parameters (it is new, it restarted, or a call to it failed) is set again by the next `enforce`.
"""

import asyncio
import datetime
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set

from tidegate_control import control_connections
from tidegate_policy import policies
from tidegate_policy.steer import guards, llm_choice, steering_loop

logger = logging.getLogger("tidegate.steering")

MOST_REASON = 140
"""Characters of a reason beside a proposal that is held back: gateways keep 256 of both."""
Ask = Callable[[Sequence[Mapping[str, str]], Collection[str]], Awaitable[llm_choice.Answer]]
"""Asks a model: the messages, and the allowed policies."""


class SteeringDriver:
    """One pool. At least once in `settings.observation_period_s`: `observe`, persist the outcome, `enforce`."""

    def __init__(
        self,
        state: guards.SteerState | None,
        settings: steering_loop.Settings,
        *,
        now: float,
        token: str | None = None,
    ) -> None:
        """`state` is what a predecessor left; None for a pool that was never steered. Calls to engines carry `token`."""
        self._loop = steering_loop.SteeringLoop(state, settings, now=now)
        self._outliers: Set[str] = frozenset()
        """The engines whose last report could not be believed."""
        self.engines = control_connections.EngineConnections(pace=_pace(settings), token=token)
        self.ask: Ask | None = None
        """How the model of the selector `llm` is asked; None while the pool has another selector."""
        self._asking: asyncio.Task[None] | None = None

    @property
    def settings(self) -> steering_loop.Settings:
        """The settings in force. A replacement changes the pace of reports at the next `retarget`."""
        return self._loop.settings

    @settings.setter
    def settings(self, settings: steering_loop.Settings) -> None:
        self._loop.settings = settings
        self.engines.pace = _pace(settings)

    @property
    def active_policy(self) -> str:
        """The policy that is in force."""
        return self._loop.state.active

    async def retarget(self, addresses: Collection[str]) -> None:
        """Steers these engines (host:port of EngineControl) and no others."""
        await self.engines.retarget(addresses)

    def observe(
        self, now: float, override: steering_loop.Override | None, *, monotonic_s: float | None = None
    ) -> steering_loop.Outcome:
        """Takes the reports that have come and decides. `now` is in seconds of the wall clock. `monotonic_s` is the time of
        a clock that is never set; without it the wall clock must not be set either."""
        reports = self.engines.take_reports()
        before = self._loop.state.before
        unfit = self.engines.unfit(before) if before is not None else {}
        outcome = self._loop.observe(
            now,
            reports,
            silent=self.engines.silent(),
            override=override,
            unfit=unfit,
            monotonic_s=monotonic_s,
        )
        for engine in outcome.outliers.keys() - self._outliers:
            logger.warning("engine %s counts less than it claims: %s", engine, outcome.outliers[engine])
        self._outliers = outcome.outliers.keys()
        if self._asking is not None:
            self._asking.cancel()  # its answer would come after the decision that it was for
            self._asking = None
        if self.ask is not None and (question := self._loop.question(now)) is not None:
            self._asking = asyncio.create_task(self._advised(self.ask, question))
        return outcome

    async def _advised(self, ask: Ask, question: llm_choice.Question) -> None:
        answer = await ask(question.messages, question.allow)
        if answer.trouble:
            logger.warning("the rules choose the policy, because %s", answer.trouble)
        self._loop.answered(question, answer)

    def not_following(self) -> dict[str, str]:
        """Why each engine may serve by another policy than the one that was put in force last, by address."""
        return self.engines.not_following()

    def active_override(self, now: float) -> steering_loop.Override | None:
        """The override in force unless its time is over: the best guess while its source cannot be asked."""
        return self._loop.active_override(now)

    async def enforce(self) -> dict[str, str]:
        """Puts the decided policy and its parameters in force on every engine that reports others; returns the errors by
        address. A bypass of the guards lasts on the engines until the next decision of another kind."""
        state = self._loop.state
        parameters = self.settings.parameters.get(state.active, {})
        return await self.engines.put_in_force(
            state.active,
            state.reason,
            parameters,
            _defaults(state.active),
            bypass=state.kind is guards.Kind.BYPASS,
        )

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.engines.close()


def explained(outcome: steering_loop.Outcome) -> str:
    """The reason of the active policy, and why a proposal of the selector has not taken effect."""
    reason = steering_loop.explained(outcome.state)
    if outcome.held is None:
        return reason
    return f"{bounded(reason, MOST_REASON)}; {held_back(outcome.held)}"


def bounded(text: str, most: int) -> str:
    """A text with at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def held_back(held: guards.Held) -> str:
    """Why a proposal of the selector has not taken effect."""
    until = datetime.datetime.fromtimestamp(math.ceil(held.until_at_s), datetime.UTC)
    what = "the end of the bypass" if held.policy == held.active else held.policy
    return f"{what} is proposed, and the guard {held.guard} keeps {held.active} until {until:%Y-%m-%dT%H:%M:%SZ}"


def _pace(settings: steering_loop.Settings) -> control_connections.ReportPace:
    return control_connections.ReportPace(settings.report_period_s, settings.idle_report_period_s)


def _defaults(policy: str) -> dict[str, float]:
    """The defaults of a policy's parameters; empty for a policy of another version, which a person may have chosen."""
    kind = policies.POLICIES.get(policy)
    return {parameter.name: parameter.default for parameter in kind.PARAMETERS} if kind else {}
