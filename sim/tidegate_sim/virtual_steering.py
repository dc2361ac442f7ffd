"""Steers the engines of a benchmark's cell in virtual time, as `SteeringDriver` steers engines over EngineControl.

`tidegate_policy.steer.steering_loop` decides. A trace begins when the pool has had its first policy for one dwell, so the
first decision may change it. The cell calls `observe` once in each observation period.
"""

from collections.abc import Mapping

from tidegate_policy import gateway_core, policies
from tidegate_policy.model import EngineId
from tidegate_policy.steer import guards, steering_loop
from tidegate_sim import asked_model, engine_models


class VirtualSteering:
    """The steering loop over virtual engines: what `SteeringDriver` does over EngineControl."""

    def __init__(
        self,
        core: gateway_core.GatewayCore,
        engines: Mapping[EngineId, engine_models.Engine],
        settings: steering_loop.Settings,
        *,
        start: str,
    ) -> None:
        """`start` is the policy with which the trace begins."""
        self.period_s = settings.observation_period_s
        self.switches: list[tuple[float, str, str]] = []
        self._core = core
        self._engines = engines
        began = guards.SteerState(active=start, since_at_s=-settings.guards.dwell_s)
        self._loop = steering_loop.SteeringLoop(began, settings, now=0.0)
        self._watches = {name: engine.watch() for name, engine in engines.items()}
        self._unfit: dict[str, str] = {}
        """The answers of the engines that do not know the policy that was put in force last."""
        self._enforce(0.0)

    def observe(self, now: float) -> None:
        reports = {str(name): [watch.cut().window] for name, watch in self._watches.items()}
        verdict = self._loop.observe(now, reports, silent=(), unfit=self._unfit).verdict
        if verdict.kind is not guards.Kind.KEEP:
            self.switches.append((now, verdict.policy, verdict.reason))
            self._enforce(now)
        if (question := self._loop.question(now)) is not None:
            self._loop.answered(question, asked_model.answer(question))

    def _enforce(self, now: float) -> None:
        state = self._loop.state
        parameters = self._loop.settings.parameters.get(state.active, {})
        bypass, self._unfit = state.kind is guards.Kind.BYPASS, {}
        for name, engine in self._engines.items():
            try:
                engine.set_policy(state.active, state.reason, parameters, bypass=bypass)
            except (policies.UnknownPolicy, policies.BadParameter) as error:
                self._unfit[str(name)] = str(error)
        self._core.on_policy(now, state.active)  # without parameters, as gateways are told
