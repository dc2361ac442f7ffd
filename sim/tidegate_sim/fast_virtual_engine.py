"""One engine in virtual time with the fast model of the scheduler: what `virtual_engine` is with vLLM's own scheduler."""

import functools
from collections.abc import Mapping, Sequence

from tidegate_control import control_contract
from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import regulators as engine_regulators
from tidegate_policy.engine import session_hold
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
        regulators: Sequence[str] = (),
        stock_key: engine_limits.StockKey = "latest-start",
        prefill_first: bool = False,
        hold: session_hold.Settings | None = None,
    ) -> None:
        """The parameters are those of `virtual_engine.VirtualEngine`."""
        self.cost = cost
        self.steps = 0
        self.busy_s = 0.0
        self.queued = 0
        """Calls that did not start at the first step after their arrival."""
        self.preemptions = 0
        self.starts: dict[CallId, float] = {}
        """The start of the first step of each call; the reader removes what it has read."""
        self._stock_key = stock_key
        self._prefill_first = prefill_first
        self._loop = clock
        self._listener = listener
        self._fresh: set[str] = set()
        """Calls that arrived since the last step."""
        self._stepping = False
        self._plugin = (
            None
            if stock
            else fast_plugin.FastPlugin(
                cost,
                policy=policy,
                clock=clock.now,
                regulators=engine_regulators.create(regulators),
                hold=hold,
                prefix_cache=prefix_cache,
            )
        )
        self._scheduler = self._plugin or fast_scheduler.FastScheduler(cost, policy=policy, prefix_cache=prefix_cache)

    def load(self) -> engine_limits.EngineLoad:
        """As vLLM's metrics report it."""
        scheduler = self._scheduler
        return engine_limits.EngineLoad(
            running=len(scheduler.running), waiting=len(scheduler.waiting), kv_usage=scheduler.kv.usage
        )

    def watch(self) -> control_contract.Watch:
        """The engine's QoS windows, as its control server would report them. Raises `NotControllable` for `stock`."""
        return self._controlled().watch()

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float], *, bypass: bool = False) -> None:
        """As SetPolicy of EngineControl. Raises `NotControllable` for `stock`."""
        self._controlled().set_policy(name, reason, parameters, bypass=bypass)

    def submit(
        self,
        call: Call,
        output_tokens: int,
        prefixes: Sequence[engine_limits.Prefix] = (),
        output_prefix: int | None = None,
    ) -> None:
        """Receives a call as the gateway would send it. Only this method knows that it produces `output_tokens`."""
        request = self._scheduler.request(
            call.id,
            call.prompt_tokens,
            min(output_tokens, engine_limits.MAX_OUTPUT_TOKENS),
            prefixes,
            output_prefix,
            priority=engine_limits.stock_priority(self._stock_key, call, self.cost),
            arrived_at_s=self._loop.now(),
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
        step = self._schedule()
        while not step.tokens:
            self.preemptions += len(step.preempted)
            self._scheduler.finish(step)
            if not step.preempted:
                self._stepping = False
                return
            step = self._schedule()  # the blocks of the preempted requests are free now
        self.preemptions += len(step.preempted)
        if step.started:
            now = self._loop.now()
            self.starts.update((CallId(request.id), now) for request in step.started)
            self.queued += sum(request.id not in self._fresh for request in step.started)
        self._fresh.clear()
        seconds = step.seconds(self.cost)
        self.steps += 1
        self.busy_s += seconds
        self._loop.after(seconds, functools.partial(self._finish, step))

    def _schedule(self) -> fast_scheduler.Step:
        """The next step; with `prefill_first` without decodes, unless no prefill can run."""
        scheduler = self._scheduler
        if not self._prefill_first:
            return scheduler.schedule()
        scheduler.paused = frozenset(request.id for request in scheduler.running if not request.prefilling)
        step = scheduler.schedule()
        scheduler.paused = frozenset()
        if step.tokens:
            return step
        scheduler.finish(step)
        return scheduler.schedule()

    def _finish(self, step: fast_scheduler.Step) -> None:
        listener = self._listener
        for request, ended in self._scheduler.finish(step):
            if ended:
                listener.on_end(CallId(request.id))
            else:
                listener.on_tokens(CallId(request.id), request.output)
        self._step()
