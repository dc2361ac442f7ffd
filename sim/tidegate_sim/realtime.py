"""A simulated engine in real time: Tidegate's scheduler over a cost model, without a language model.

Its schedule is that of `fast_plugin`: the model of vLLM's scheduler with Tidegate's engine core. A step lasts as long as
the cost model says. `openai_double` gives it vLLM's HTTP interface. Its answers are filler text; its timing, queueing and
protocol are real. For experiments use `virtual_engine`, which runs vLLM's own scheduler in virtual time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.model import Call
from tidegate_sim import engine_limits, fast_kv_cache, fast_plugin, fast_scheduler

BEHIND_S = 0.5
"""A loop that is later than this (its process was stopped) does not try to catch up."""
LONGEST_CONTEXT = 131072
"""Tokens of a prompt and its answer together; fewer where the KV memory is smaller."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """The tokens of one choice of an answer."""

    index: int
    out: asyncio.Queue[tuple[int, int]]


class _Scheduler(fast_plugin.FastPlugin):
    """Steps count with the durations that the cost model gives: those on the clock depend on the machine's load."""

    def __init__(self, cost: CostModel, *, policy: str, regulators: Sequence[Regulator], prefix_cache: bool) -> None:
        super().__init__(cost, policy=policy, clock=time.monotonic, regulators=regulators, prefix_cache=prefix_cache)
        self.kv.keys = fast_kv_cache.HashedKeys()
        self._cost = cost
        self.context = min(LONGEST_CONTEXT, self.kv.blocks * engine_limits.BLOCK_TOKENS)

    def seconds(self, step: fast_scheduler.Step, passed_s: float) -> float:
        return step.seconds(self._cost)


class RealtimeEngine:
    """Calls go in, paced tokens come out. A prefix cache finds equal prompts, and no answer in a later prompt."""

    def __init__(
        self,
        cost: CostModel,
        *,
        policy: str = policies.DEFAULT,
        regulators: Sequence[Regulator] = (),
        prefix_cache: bool = False,
    ) -> None:
        self.cost = cost
        self._scheduler = _Scheduler(cost, policy=policy, regulators=regulators, prefix_cache=prefix_cache)
        self._streams: dict[str, _Stream] = {}
        self._work = asyncio.Event()
        self.looked_up_tokens = 0
        """Prompt tokens of the calls that started."""
        self.cached_tokens = 0
        """Those of them that the prefix cache had."""

    @property
    def core(self) -> engine_core.EngineCore:
        return self._scheduler.core

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its answer together."""
        return self._scheduler.context

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        return self._scheduler.kv.usage

    async def generate(
        self, calls: Sequence[Call], output_tokens: int, contents: Sequence[Iterable[engine_limits.Prefix]]
    ) -> AsyncIterator[tuple[int, int]]:
        """Runs the choices of one request side by side, each as a call of its own with the content of its prompt. Yields,
        at each token, the index of its choice and the number of tokens of this choice so far. Closing the iterator aborts
        all choices. Raises `ValueError` for a call that is longer than `context`."""
        longest = max(call.prompt_tokens for call in calls) + output_tokens
        if longest > self.context:
            raise ValueError(f"the context has {self.context} tokens, and a call takes {longest}")
        out: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        try:
            for index, (call, content) in enumerate(zip(calls, contents, strict=True)):
                self._enter(call, output_tokens, content, _Stream(index, out))
            for _ in range(len(calls) * output_tokens):
                yield await out.get()
        finally:
            for call in calls:
                if self._streams.pop(call.id, None) is not None:
                    self._scheduler.abort(call.id)

    async def run(self) -> None:
        """Steps until cancelled."""
        due_at_s = time.monotonic()
        while True:
            if not self._streams:
                self._work.clear()
                await self._work.wait()
                due_at_s = time.monotonic()
            step = self._scheduler.schedule()
            for request in step.started if self._scheduler.kv.caching else ():
                self.looked_up_tokens += request.prompt_tokens
                self.cached_tokens += request.computed - step.tokens[request]
            if step.tokens or not step.preempted:
                due_at_s += step.seconds(self.cost)
                late_s = time.monotonic() - due_at_s
                if late_s > BEHIND_S:
                    due_at_s = time.monotonic()
                await asyncio.sleep(max(-late_s, 0.0))
            self._deliver(step)

    def _enter(self, call: Call, output_tokens: int, content: Iterable[engine_limits.Prefix], stream: _Stream) -> None:
        request = self._scheduler.request(
            call.id, call.prompt_tokens, output_tokens, content, arrived_at_s=time.monotonic()
        )
        self._scheduler.receive(request, call)
        self._streams[call.id] = stream
        self._work.set()

    def _deliver(self, step: fast_scheduler.Step) -> None:
        """Hands out the tokens of a step."""
        for request, ended in self._scheduler.finish(step):
            stream = self._streams[request.id]
            stream.out.put_nowait((stream.index, request.output))
            if ended:
                del self._streams[request.id]
