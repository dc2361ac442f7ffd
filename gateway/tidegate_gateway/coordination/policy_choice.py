"""Which scheduling policy orders the waiting calls? A person's override, else the steering loop's choice, else the
settings.

The choices live in the store, so that all gateways of a pool follow the same one. Without a store they live in this
process.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tidegate_gateway import policy_settings
from tidegate_gateway.observe import policy_switches, prometheus_metrics
from tidegate_gateway.openai import error_table
from tidegate_gateway.store import store_contract, store_link
from tidegate_policy import gateway_core, policies

logger = logging.getLogger("tidegate.gateway")

LONGEST_OVERRIDE_S = 7 * 24 * 3600.0
DEFAULT_OVERRIDE_S = 600.0
"""The length of an override that names none."""
SET_BY_HAND, OVERRIDE_ENDED = "set by hand", "the override has ended"
"""Reasons of switches, in the words of the steering loop (`steer.guards`)."""

Source = Literal["override", "steered"]
SOURCES: tuple[Source, ...] = ("override", "steered")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """The policy in force, and its origin."""

    name: str
    source: Literal["override", "steered", "settings"]
    reason: str
    left_s: float | None = None
    alternatives: tuple[str, ...] = ()
    """The other policies that the steering loop compared, best first."""
    expected: str = ""
    """What the steering loop expects of the switch."""


class PolicyChoice:
    """Applies the choice that ranks highest."""

    def __init__(
        self,
        configured: policy_settings.Policy,
        core: gateway_core.GatewayCore,
        link: store_link.StoreLink,
        metrics: prometheus_metrics.Metrics,
        *,
        waiting: Callable[[], int],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`waiting` counts the calls that wait in the gateway and at the engines."""
        self._settings = configured
        self.active = self._configured
        self._core = core
        self._link = link
        self._metrics = metrics
        self._clock = clock
        self._chosen = store_contract.Exchange()
        self._applied_at_s = clock()
        """When the store told the choices, or this gateway counted their time down."""
        self.choices = 0
        """Choices that this gateway has stored."""
        self.switches = policy_switches.PolicySwitches(metrics.service, clock=clock, wall=wall, waiting=waiting)
        self._has_learned = False
        """The store has told its choices."""
        metrics.on_policy(configured.name, configured.name, "")
        self._order()

    @property
    def _configured(self) -> ActivePolicy:
        return ActivePolicy(name=self._settings.name, source="settings", reason="the settings")

    def configure(self, settings: policy_settings.Policy) -> None:
        """Replaces the policy of the settings, and the parameters of all policies."""
        name = self._core.dispatcher.policy
        again = settings.parameters_of(name) != self._settings.parameters_of(name)
        self._settings = settings
        self.apply(self._chosen)
        if again and self._core.dispatcher.policy == name:
            self._order()

    async def choose(
        self,
        source: Source,
        name: str | None,
        *,
        reason: str,
        for_s: float | None,
        alternatives: tuple[str, ...] = (),
        expected: str = "",
    ) -> ActivePolicy:
        """Stores a choice for all gateways; None takes it back. Raises `GatewayError`."""
        if name is not None and name not in policies.POLICIES:
            known = ", ".join(sorted(policies.POLICIES))
            raise error_table.BadRequest(f"policy {name[:64]!r} is unknown; known are {known}", param="policy")
        if source == "override":
            for_s = DEFAULT_OVERRIDE_S if for_s is None else for_s
        if for_s is not None and not 0 < for_s <= LONGEST_OVERRIDE_S:
            allowed = f"for_s must be more than 0 and at most {LONGEST_OVERRIDE_S:.0f} (7 days)"
            raise error_table.BadRequest(allowed, param="for_s")
        store = self._link.store
        if store is None:
            chosen = None
            if name is not None:
                chosen = store_contract.Chosen(
                    policy=name, reason=reason, left_s=for_s, alternatives=alternatives, expected=expected
                )
            self.count_down()
            if source == "override":
                self.apply(dataclasses.replace(self._chosen, override=chosen))
            else:
                self.apply(dataclasses.replace(self._chosen, steered=chosen))
            return self.active
        try:
            stored = await store.choose_policy(
                source, name, reason, for_s, alternatives=alternatives, expected=expected
            )
        except store_contract.Unavailable as error:
            raise error_table.store_unavailable() from error
        self.choices += 1
        self._has_learned = True
        self.apply(stored)
        return self.active

    def follow(self, learned: store_contract.Exchange, *, choices: int) -> None:
        """Applies what the store said to a question that was asked when there were `choices`. A choice that was stored
        meanwhile is newer."""
        if choices == self.choices:
            self.apply(learned, is_known=not self._has_learned)
            self._has_learned = True

    def apply(self, learned: store_contract.Exchange, *, is_known: bool = False) -> None:
        """Orders the waiting calls by the choice that ranks highest. If it `is_known`, it was in force in the pool before
        this gateway started, so it is no switch of the pool."""
        self._chosen, self._applied_at_s = learned, self._clock()
        if learned.override is not None:
            active = _active("override", learned.override)
        elif learned.steered is not None:
            active = _active("steered", learned.steered)
        else:
            active = self._configured
        before = self._core.dispatcher.policy
        ended = self.active.source == "override" and active.source != "override"
        if active.name not in policies.POLICIES:
            logger.error("policy %r is unknown here (a newer version set it?); %s stays", active.name, before)
            return
        self.active = active
        self.switches.settle()
        if active.name != before:
            reason = OVERRIDE_ENDED if ended else active.reason
            if not is_known:
                self.switches.on_switch(
                    before,
                    active.name,
                    source=active.source,
                    reason=reason,
                    alternatives=() if ended else active.alternatives,
                    expected="" if ended else active.expected,
                )
            count = self._order()
            self._metrics.on_policy(before, active.name, active.source)
            logger.warning("policy %s -> %s (%s): %d waiting calls ordered anew", before, active.name, reason, count)

    def _order(self) -> int:
        """Orders the waiting calls by the active policy and its parameters; returns their number."""
        name = self.active.name
        return self._core.on_policy(self._clock(), name, self._settings.parameters_of(name))

    def count_down(self) -> None:
        """Ends choices whose time is over, where no store does."""
        self.switches.settle()
        chosen, passed_s = self._chosen, self._clock() - self._applied_at_s
        override, steered = _later(chosen.override, passed_s), _later(chosen.steered, passed_s)
        if (override, steered) != (chosen.override, chosen.steered):
            self.apply(dataclasses.replace(chosen, override=override, steered=steered))


def _later(chosen: store_contract.Chosen | None, passed_s: float) -> store_contract.Chosen | None:
    """The choice after so many seconds; None when its time is over."""
    if chosen is None or chosen.left_s is None:
        return chosen
    left_s = chosen.left_s - passed_s
    return dataclasses.replace(chosen, left_s=left_s) if left_s > 0 else None


def _active(source: Source, chosen: store_contract.Chosen) -> ActivePolicy:
    reason = chosen.reason or (SET_BY_HAND if source == "override" else "no reason given")
    return ActivePolicy(
        name=chosen.policy,
        source=source,
        reason=reason,
        left_s=chosen.left_s,
        alternatives=chosen.alternatives,
        expected=chosen.expected,
    )
