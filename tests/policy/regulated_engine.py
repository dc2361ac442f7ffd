"""An engine core whose calls run or wait as a test says, for the tests of regulators."""

from collections.abc import Iterable, Iterator, Mapping

from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, regulators, snapshot
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed, QueuedRequest

COST = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=1e-4, context_s=0.0, max_step_tokens=1000)
LIMITS = EngineLimits(max_running=8, max_step_tokens=1000, kv_tokens=10_000)
FULL = StepPlan(max_running=8, max_step_tokens=1000)


class World:
    """An engine core whose calls run or wait as a test says."""

    def __init__(self, policy: str = "sjf", cost: CostModel = COST, limits: EngineLimits = LIMITS) -> None:
        self.kv: dict[CallId, int] = {}
        self.shared: dict[CallId, int] = {}
        """Tokens of a running call that another call holds too."""
        self.cached: dict[CallId, int] = {}
        """Tokens of a waiting call that the prefix cache holds."""
        self.kept: dict[CallId, int] = {}
        """Those of them whose memory a running call keeps."""
        self.blocked: set[CallId] = set()
        """Waiting calls that cannot start."""
        self.looks = 0
        """Waiting calls that were looked at."""
        self.free = limits.kv_tokens
        self.core = engine_core.EngineCore(0.0, cost=cost, limits=limits, policy=policy, probe=self)

    def kv_tokens(self, call_id: CallId) -> int:
        return self.kv[call_id]

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        return min(self.kv[call_id] - self.shared.get(call_id, 0), enough)

    def free_kv_tokens(self) -> int:
        return self.free

    def shared_tokens(self, call_id: CallId) -> int:
        return self.kept.get(call_id, 0)

    def reserved_places(self) -> int:
        return 0

    def cached_tokens(self, call_id: CallId) -> int:
        return self.cached.get(call_id, 0)

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        for item in waiting:
            self.looks += 1
            if item.call.id not in self.blocked:
                yield item

    def waits(self, name: str, prompt: int = 100, output: int = 10, **more: object) -> None:
        self.core.queues[0].push(self.core.on_arrival(0.0, call(name, prompt, output, more)))

    def waits_blocked(self, name: str, prompt: int = 100, output: int = 10, **more: object) -> None:
        """A call that cannot start yet, for example because its grammar is not compiled."""
        self.waits(name, prompt, output, **more)
        self.blocked.add(CallId(name))

    def runs(self, name: str, prompt: int = 100, output: int = 10, done: int = 0, **more: object) -> None:
        """A call that decodes after `done` output tokens; with `done` 0 half of its prompt is computed."""
        self.core.queues[0].push(self.core.on_arrival(0.0, call(name, prompt, output, more)))
        self.core.queues[0].start(0.0, CallId(name))
        self.kv[CallId(name)] = prompt + done - 1 if done else prompt // 2
        if done:
            computed = {CallId(name): Computed(prompt, done)}
            self.core.on_step(0.0, step_s=0.02, computed=computed, ended={})
        self.free -= self.kv[CallId(name)]

    def engine(self, now: float = 1.0) -> snapshot.EngineSnapshot:
        return self.core.snapshot(now)


def call(name: str, prompt: int, output: int, more: Mapping[str, object]) -> Call:
    return Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=output, **more)  # type: ignore[arg-type]


def shaped(name: str, engine: snapshot.EngineSnapshot, plan: StepPlan = FULL) -> StepPlan:
    return regulators.create([name])[0].shape(engine, plan)
