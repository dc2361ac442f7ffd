"""A simulated engine in real time: continuous batching over a cost model, without a language model.

It drives the engine core that vLLM's scheduler mixin drives. Each step starts waiting calls in the order of the policy,
prefills in chunks, decodes one token for each running call, and lasts as long as the cost model says. `openai_double`
gives it vLLM's HTTP interface. Its answers are filler text; its timing, queueing and protocol are real. For experiments
use `virtual_engine`, which runs vLLM's scheduler in virtual time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import Call, CallId

BEHIND_S = 0.5
"""A loop that is later than this (its process was stopped) does not try to catch up."""


@dataclass(slots=True, eq=False)
class _Sequence:
    call: Call
    output_tokens: int
    """Tokens that the sequence will produce."""
    prefill_left: int
    index: int
    """The choice of its request that the sequence produces."""
    out: asyncio.Queue[tuple[int, int]]
    done: int = 0

    @property
    def context(self) -> int:
        """Its tokens in the KV cache."""
        return self.call.prompt_tokens + self.done - self.prefill_left

    @property
    def whole(self) -> int:
        """Its tokens at its end."""
        return self.call.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class _Step:
    """A step under way."""

    seconds: float = 0.0
    produced: list[_Sequence] = field(default_factory=list)
    """The sequences that get a token."""
    prompt_tokens: dict[CallId, int] = field(default_factory=dict)


class RealtimeEngine:
    """Calls go in, paced tokens come out."""

    def __init__(
        self, cost: CostModel, *, policy: str = policies.DEFAULT, regulators: Sequence[Regulator] = ()
    ) -> None:
        self.cost = cost
        self._sequences: dict[CallId, _Sequence] = {}
        self._running: list[_Sequence] = []
        self.core = engine_core.EngineCore(
            time.monotonic(),
            cost=cost,
            limits=EngineLimits(
                max_running=cost.max_batch, max_step_tokens=cost.max_step_tokens, kv_tokens=cost.kv_tokens
            ),
            policy=policy,
            regulators=regulators,
            probe=self,
        )
        self._queue = self.core.queues[0]
        self._work = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._running)

    def kv_tokens(self, call_id: CallId) -> int:
        return self._sequences[call_id].context

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        return self._sequences[call_id].context

    def shared_tokens(self, call_id: CallId) -> int:
        return 0

    def reserved_places(self) -> int:
        return 0

    def free_kv_tokens(self) -> int:
        return max(self.cost.kv_tokens - sum(sequence.context for sequence in self._running), 0)

    def cached_tokens(self, call_id: CallId) -> int:
        """A simulated engine has no prefix cache."""
        return 0

    def startable(self, waiting: Iterable[policies.QueuedRequest]) -> Iterator[policies.QueuedRequest]:
        """All of them: a simulated engine compiles no grammar."""
        return iter(waiting)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.free_kv_tokens() / self.cost.kv_tokens

    async def generate(self, calls: Sequence[Call], output_tokens: int) -> AsyncIterator[tuple[int, int]]:
        """Runs the choices of one request side by side, each as a call of its own. Yields, at each token, the index of
        its choice and the number of tokens of this choice so far. Closing the iterator aborts all choices."""
        out: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        sequences = [_Sequence(call, output_tokens, call.prompt_tokens, index, out) for index, call in enumerate(calls)]
        try:
            for sequence in sequences:
                self._enter(sequence)
            for _ in range(len(calls) * output_tokens):
                yield await out.get()
        finally:
            for sequence in sequences:
                self._abort(sequence)

    async def run(self) -> None:
        """Steps until cancelled."""
        due_at_s = time.monotonic()
        while True:
            if not self._sequences:
                self._work.clear()
                await self._work.wait()
                due_at_s = time.monotonic()
            plan = self.core.take_plan(time.monotonic())
            self._carry_out(plan)
            step = self._step(plan)
            due_at_s += step.seconds
            late_s = time.monotonic() - due_at_s
            if late_s > BEHIND_S:
                due_at_s = time.monotonic()
            await asyncio.sleep(max(-late_s, 0.0))
            self._deliver(step)

    def _enter(self, sequence: _Sequence) -> None:
        self._queue.push(self.core.on_arrival(time.monotonic(), sequence.call))
        self._sequences[sequence.call.id] = sequence
        self._work.set()

    def _carry_out(self, plan: StepPlan) -> None:
        """Preempts the calls that must yield, and starts waiting calls within the bounds of the plan. As in vLLM, a call
        starts only if the running calls leave tokens of the step to it."""
        now = time.monotonic()
        for sequence in [sequence for sequence in self._running if sequence.call.id in plan.preempt]:
            self._running.remove(sequence)
            sequence.prefill_left = sequence.call.prompt_tokens + sequence.done
            self._queue.push_preempted(self.core.on_preemption(now, sequence.call.id, output_tokens=sequence.done))
        held = sum(sequence.whole for sequence in self._running)
        active = [sequence for sequence in self._running if sequence.call.id not in plan.paused]
        budget = plan.max_step_tokens - sum(sequence.prefill_left or 1 for sequence in active)
        starts = plan.max_starts if plan.max_starts is not None else len(self._queue)
        while self._queue and starts > 0 and budget > 0 and len(self._running) < plan.max_running:
            sequence = self._sequences[self._queue.peek().call.id]
            if self._running and held + sequence.whole > self.cost.kv_tokens:
                return
            self._queue.pop(now)
            self._running.append(sequence)
            held += sequence.whole
            budget -= sequence.prefill_left
            starts -= 1

    def _step(self, plan: StepPlan) -> _Step:
        """Computes one step: decodes first, then prefill chunks up to the bound on tokens."""
        active = [sequence for sequence in self._running if sequence.call.id not in plan.paused]
        decoding = [sequence for sequence in active if not sequence.prefill_left]
        budget = plan.max_step_tokens - len(decoding)
        context = sum(sequence.context for sequence in decoding)
        step = _Step(produced=list(decoding))
        uncached = attended = 0
        for sequence in active:
            if sequence.prefill_left and budget > 0:
                chunk = min(sequence.prefill_left, budget)
                attended += chunk * sequence.context + chunk * (chunk + 1) // 2
                uncached += chunk
                budget -= chunk
                sequence.prefill_left -= chunk
                step.prompt_tokens[sequence.call.id] = chunk
                if not sequence.prefill_left:
                    step.produced.append(sequence)
        step.seconds = self.cost.step_seconds(
            uncached=uncached, attended=attended, decodes=len(decoding), context=context
        )
        return step

    def _deliver(self, step: _Step) -> None:
        """Hands out the tokens of a step, and reports its facts to the core."""
        output_tokens: dict[CallId, int] = {}
        ended: dict[CallId, bool] = {}
        for sequence in step.produced:
            call_id = sequence.call.id
            if self._sequences.get(call_id) is not sequence:
                continue
            sequence.done += 1
            output_tokens[call_id] = 1
            sequence.out.put_nowait((sequence.index, sequence.done))
            if sequence.done >= sequence.output_tokens:
                self._drop(sequence)
                ended[call_id] = True
        self.core.on_step(
            time.monotonic(),
            step_s=step.seconds,
            computed={
                call_id: policies.Computed(step.prompt_tokens.get(call_id, 0), output_tokens.get(call_id, 0))
                for call_id in {**step.prompt_tokens, **output_tokens}
            },
            ended=ended,
        )

    def _abort(self, sequence: _Sequence) -> None:
        if self._sequences.get(sequence.call.id) is sequence:
            self._queue.remove(sequence.call.id)
            self._drop(sequence)
            self.core.on_end(time.monotonic(), sequence.call.id, finished=False)

    def _drop(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.call.id]
        if sequence in self._running:
            self._running.remove(sequence)
