"""A simulated engine in real time: continuous batching over a cost model, no model inside.

Each step admits waiting calls in the active order, prefills in chunks, decodes one token for every running call, and
lasts as long as the cost model says. `wire` gives it vLLM's face. It answers with filler text and says so; what is real
is the timing, the queueing and the protocol. For experiments use `engine`, which runs vLLM's scheduler in virtual time.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tidegate_policy import policies, qos, window
from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.waiting_queue import WaitingQueue

BEHIND_S = 0.5
"""A loop that is later than this (a stopped process) does not try to catch up."""


@dataclass(slots=True)
class _Sequence:
    call: Call
    output_tokens: int
    prefill_left: int
    index: int
    """Among those of its request."""
    out: asyncio.Queue[tuple[int, int]]
    done: int = 0

    @property
    def context(self) -> int:
        return self.call.prompt_tokens - self.prefill_left + self.done


class RealtimeEngine:
    """Calls in, paced tokens out."""

    def __init__(self, cost: CostModel, *, policy: str = "fcfs") -> None:
        self.cost = cost
        self.max_running = cost.max_batch
        self.max_step_tokens = cost.max_step_tokens
        self.busy_s = 0.0
        self._queue = WaitingQueue(policies.named(policy))
        self._sequences: dict[CallId, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._work = asyncio.Event()
        self._recorders: set[window.Recorder] = set()

    @property
    def policy(self) -> str:
        return self._queue.policy.name

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        return min(sum(sequence.context for sequence in self._running) / self.cost.kv_tokens, 1.0)

    def waiting_ids(self, limit: int) -> list[str]:
        """The first `limit` waiting calls in the order in which they will start."""
        return [ticket.call.id for ticket, _ in zip(self._queue, range(limit), strict=False)]

    def set_policy(self, policy: str) -> int:
        """Re-orders those who wait; returns how many. Raises `policies.UnknownPolicy`."""
        self._queue.switch(policies.named(policy))
        return len(self._queue)

    def record(self) -> window.Recorder:
        """A recorder that hears of every event from now on, until `forget`."""
        recorder = window.Recorder(_now())
        self._recorders.add(recorder)
        return recorder

    def forget(self, recorder: window.Recorder) -> None:
        self._recorders.discard(recorder)

    def cut(self, recorder: window.Recorder) -> qos.Qos:
        """The recorder's window since its last cut."""
        return recorder.cut(_now(), running=self.running, waiting=self.waiting, kv_usage=self.kv_usage)

    async def generate(self, calls: Sequence[Call], output_tokens: int) -> AsyncIterator[tuple[int, int]]:
        """The choices of one request side by side, each a call of its own: yields a choice's index and the number of its
        tokens so far, at each token. Leaving early aborts all."""
        out: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        sequences = [_Sequence(call, output_tokens, call.prompt_tokens, index, out) for index, call in enumerate(calls)]
        try:
            for sequence in sequences:
                self._enter(sequence)
            for _ in range(len(calls) * output_tokens):
                yield await out.get()
        finally:
            for sequence in sequences:
                self._leave(sequence)

    async def run(self) -> None:
        """Steps until cancelled."""
        due_s = _now()
        while True:
            if not self._running and not self._queue:
                self._work.clear()
                await self._work.wait()
                due_s = _now()
            self._admit()
            seconds, produced = self._step()
            due_s += seconds
            self.busy_s += seconds
            late_s = _now() - due_s
            if late_s > BEHIND_S:
                due_s = _now()
            await asyncio.sleep(max(-late_s, 0.0))
            self._deliver(produced)

    def _enter(self, sequence: _Sequence) -> None:
        service_s = self.cost.call_seconds(sequence.call)
        self._queue.push(policies.QueuedRequest(call=sequence.call, service_s=service_s))
        self._sequences[sequence.call.id] = sequence
        for recorder in self._recorders:
            recorder.on_arrival(sequence.call, service_s)
        self._work.set()

    def _admit(self) -> None:
        held = sum(sequence.call.prompt_tokens + sequence.output_tokens for sequence in self._running)
        while self._queue and len(self._running) < self.max_running:
            sequence = self._sequences[self._queue.peek().call.id]
            need = sequence.call.prompt_tokens + sequence.output_tokens
            if self._running and held + need > self.cost.kv_tokens:
                return
            self._queue.pop()
            self._running.append(sequence)
            held += need

    def _step(self) -> tuple[float, list[_Sequence]]:
        """Plans one step: decodes first, then prefill chunks up to the token limit."""
        budget = self.max_step_tokens
        decoding = [sequence for sequence in self._running if not sequence.prefill_left]
        budget -= len(decoding)
        uncached = attended = 0
        produced = list(decoding)
        for sequence in self._running:
            if sequence.prefill_left and budget > 0:
                chunk = min(sequence.prefill_left, budget)
                seen = sequence.call.prompt_tokens - sequence.prefill_left
                attended += chunk * seen + chunk * (chunk + 1) // 2
                uncached += chunk
                budget -= chunk
                sequence.prefill_left -= chunk
                if not sequence.prefill_left:
                    produced.append(sequence)
        context = sum(sequence.context for sequence in decoding)
        return (
            self.cost.step_seconds(uncached=uncached, attended=attended, decodes=len(decoding), context=context),
            produced,
        )

    def _deliver(self, produced: list[_Sequence]) -> None:
        now = _now()
        for sequence in produced:
            if sequence.call.id not in self._sequences:
                continue
            sequence.done += 1
            sequence.out.put_nowait((sequence.index, sequence.done))
            for recorder in self._recorders:
                recorder.on_tokens(now, sequence.call.id, 1)
            if sequence.done >= sequence.output_tokens:
                self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        call_id = sequence.call.id
        if self._sequences.get(call_id) is not sequence:
            return
        del self._sequences[call_id]
        self._queue.remove(call_id)
        if sequence in self._running:
            self._running.remove(sequence)
        for recorder in self._recorders:
            recorder.on_end(_now(), call_id, finished=sequence.done >= sequence.output_tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()
