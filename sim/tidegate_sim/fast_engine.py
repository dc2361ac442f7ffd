"""One engine in virtual time with the fast model of the scheduler: what `virtual_engine` is with vLLM's own scheduler."""

import functools
from collections.abc import Mapping, Sequence

from tidegate_control import control_contract
from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_sim import engine_limits, fast_plugin, fast_scheduler, virtual_time


class FastEngine:
    """Calls go in, tokens come out, in virtual time."""

    def __init__(
        self,
        clock: virtual_time.Loop,
        cost: CostModel,
        *,
        policy: str,
        listener: engine_limits.Listener,
        stock: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        """The parameters are those of `virtual_engine.VirtualEngine`."""
        self.cost = cost
        self.steps = 0
        self.busy_s = 0.0
        self.queued = 0
        """Calls that did not start at the first step after their arrival."""
        self.preemptions = 0
        self._loop = clock
        self._listener = listener
        self._fresh: set[str] = set()
        """Calls that arrived since the last step."""
        self._stepping = False
        self._plugin = (
            None if stock else fast_plugin.FastPlugin(cost, policy=policy, clock=clock.now, prefix_cache=prefix_cache)
        )
        self._scheduler = self._plugin or fast_scheduler.FastScheduler(cost, policy=policy, prefix_cache=prefix_cache)

    def watch(self) -> control_contract.Watch:
        """The engine's QoS windows, as its control server would report them. Raises `NotControllable` for `stock`."""
        return self._controlled().watch()

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float]) -> None:
        """As SetPolicy of EngineControl. Raises `NotControllable` for `stock`."""
        self._controlled().set_policy(name, reason, parameters)

    def submit(
        self,
        call: Call,
        output_tokens: int,
        prefixes: Sequence[engine_limits.Prefix] = (),
        output_prefix: int | None = None,
    ) -> None:
        """Receives a call as the gateway would send it. Only this method knows that it produces `output_tokens`."""
        latest_start_s = call.due_or_patience_at_s - self.cost.call_seconds(call)
        request = self._scheduler.request(
            call.id,
            call.prompt_tokens,
            output_tokens,
            prefixes,
            output_prefix,
            priority=round(latest_start_s * 1000),
        )
        self._fresh.add(call.id)
        if self._plugin is None:
            self._scheduler.add(request)
        else:
            self._plugin.arrive(request, labels.write(self._loop.now(), call))
        if not self._stepping:
            self._stepping = True
            self._loop.after(0.0, self._step)

    def _controlled(self) -> fast_plugin.FastPlugin:
        if self._plugin is None:
            raise control_contract.NotControllable("vLLM's own scheduler class runs in this row")
        return self._plugin

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if not step.tokens:
            self._scheduler.finish(step)
            self._stepping = False
            return
        self.preemptions += len(step.preempted)
        if step.started:
            self.queued += sum(request.id not in self._fresh for request in step.started)
        self._fresh.clear()
        seconds = step.seconds(self.cost)
        self.steps += 1
        self.busy_s += seconds
        self._loop.after(seconds, functools.partial(self._finish, step))

    def _finish(self, step: fast_scheduler.Step) -> None:
        listener = self._listener
        for request, ended in self._scheduler.finish(step):
            if ended:
                listener.on_end(CallId(request.id))
            else:
                listener.on_tokens(CallId(request.id), request.output)
        self._step()
