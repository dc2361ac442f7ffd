"""A model of vLLM 0.32's scheduler in plain Python, in one file so that it can be read beside vLLM's own.

It schedules as `vllm.v1.core.sched.scheduler.Scheduler` does for a model with full attention, chunked prefill, one KV-cache
group and synchronous steps. It leaves out what the virtual engine never uses: encoders, LoRA, grammars, speculative tokens,
KV connectors, streaming input and pauses of the whole engine. `tests/sim/test_fast_scheduler.py` compares it with vLLM's
scheduler step by step on random histories.

`FastScheduler` is vLLM's class with one of its two policies. `fast_plugin` adds Tidegate's engine core.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from tidegate_policy.cost import CostModel
from tidegate_sim import engine_limits, fast_kv_cache
from tidegate_sim.engine_limits import BLOCK_TOKENS

WORD = -1
"""The token of all outputs that no later prompt repeats. The parts that prompts share have the numbers of their ids."""


class FastRequest:
    """A request in the engine, in one class with plain attributes because each step reads and writes many of them."""

    __slots__ = (
        "arrived_at_s",
        "computed",
        "ended",
        "ends",
        "hashed",
        "held",
        "id",
        "keys",
        "output",
        "preemptions",
        "prefilling",
        "priority",
        "prompt_tokens",
        "running",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        ends: int,
        keys: fast_kv_cache.Tokens,
        priority: int,
        arrived_at_s: float,
    ) -> None:
        """`ends` is the number of output tokens. Only the modelled forward pass reads it."""
        self.id = request_id
        self.prompt_tokens = prompt_tokens
        self.ends = ends
        self.priority = priority
        """The client's own priority; only vLLM's priority policy reads it."""
        self.arrived_at_s = arrived_at_s
        self.keys = keys
        self.tokens = prompt_tokens
        """Tokens of the prompt and of the output so far."""
        self.output = 0
        self.computed = 0
        """Tokens whose KV is in memory or is computed in the step that runs."""
        self.held = 0
        """KV blocks of the request."""
        self.hashed: list[fast_kv_cache.Block] = []
        """The first of these blocks, which the prefix cache knows."""
        self.prefilling = False
        """Whether the last step of the request left a part of its prompt, or of its recomputation, for later steps."""
        self.running = False
        self.preemptions = 0
        self.ended = False


class Step:
    """One scheduled step."""

    __slots__ = (
        "attended",
        "context",
        "decodes",
        "preempted",
        "producing",
        "prompts",
        "resumed",
        "started",
        "tokens",
        "uncached",
    )

    def __init__(self) -> None:
        self.tokens: dict[FastRequest, int] = {}
        """Scheduled tokens of each request, in the order in which vLLM schedules."""
        self.started: list[FastRequest] = []
        """Requests that started for the first time."""
        self.resumed: list[FastRequest] = []
        """Requests that started again after a preemption."""
        self.preempted: set[FastRequest] = set()
        self.producing: list[FastRequest] = []
        """Requests that get a token from this step."""
        self.prompts: dict[FastRequest, int] = {}
        """Prompt tokens of the step, for requests that have any."""
        self.uncached = self.attended = self.decodes = self.context = 0
        """The arguments of `CostModel.step_seconds`."""

    def seconds(self, cost: CostModel) -> float:
        return cost.step_seconds(
            uncached=self.uncached, attended=self.attended, decodes=self.decodes, context=self.context
        )


class Queue(Protocol):
    """The waiting requests of an engine."""

    def add(self, request: FastRequest) -> None:
        """A request arrived."""

    def peek(self) -> FastRequest:
        """The request that starts next."""

    def pop(self) -> FastRequest:
        """Takes the request that starts next."""

    def put_back(self, request: FastRequest) -> None:
        """A running request was preempted."""

    def remove(self, request: FastRequest) -> None:
        """Takes out a request that was aborted."""

    def __len__(self) -> int: ...


class ArrivalQueue:
    """vLLM's `FCFSRequestQueue`."""

    def __init__(self) -> None:
        self._waiting: deque[FastRequest] = deque()

    def add(self, request: FastRequest) -> None:
        self._waiting.append(request)

    def peek(self) -> FastRequest:
        return self._waiting[0]

    def pop(self) -> FastRequest:
        return self._waiting.popleft()

    def put_back(self, request: FastRequest) -> None:
        self._waiting.appendleft(request)

    def remove(self, request: FastRequest) -> None:
        self._waiting.remove(request)

    def __len__(self) -> int:
        return len(self._waiting)


class PriorityQueue:
    """vLLM's `PriorityRequestQueue`."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, FastRequest]] = []

    def add(self, request: FastRequest) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrived_at_s, request.id, request))

    def peek(self) -> FastRequest:
        return self._heap[0][3]

    def pop(self) -> FastRequest:
        return heapq.heappop(self._heap)[3]

    def put_back(self, request: FastRequest) -> None:
        self.add(request)

    def remove(self, request: FastRequest) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class FastScheduler:
    """vLLM's scheduler class with its policy `fcfs` or `priority`."""

    context = engine_limits.MAX_MODEL_LEN
    """The most tokens of a prompt and its output together."""

    def __init__(self, limits: CostModel, *, policy: str = "fcfs", prefix_cache: bool = True) -> None:
        self.kv = fast_kv_cache.KvCache(engine_limits.kv_blocks(limits.kv_tokens), caching=prefix_cache)
        self.requests: dict[str, FastRequest] = {}
        self.running: list[FastRequest] = []
        self.waiting: Queue = PriorityQueue() if policy == "priority" else ArrivalQueue()
        self.max_running = limits.max_batch
        self.max_step_tokens = limits.max_step_tokens
        self.paused: AbstractSet[str] = frozenset()
        """Running requests that get no token in the next step, and keep their KV blocks."""
        self.max_call_tokens: int | None = None
        """Tokens that one request of several computes in the next step at most; None = no bound."""
        self._by_priority = policy == "priority"
        """Whether the running request of the greatest rank is preempted first; otherwise the last that started."""
        self._preempted: set[FastRequest] = set()
        """Requests that were preempted since the last step was scheduled."""
        self._own = WORD
        """The token of which the own part of the last prompt consists; each prompt has a smaller number."""

    # What a client of the engine does.

    def request(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        prefixes: Iterable[engine_limits.Prefix] = (),
        output_prefix: int | None = None,
        *,
        priority: int = 0,
        arrived_at_s: float = 0.0,
    ) -> FastRequest:
        """A request whose prompt is `prefixes`, then tokens that no other prompt has. `output_prefix` is the id by which
        the prefixes of later requests name its output."""
        runs: list[fast_kv_cache.Run] = []
        if self.kv.caching:
            self._own -= 1
            runs = _prompt(prompt_tokens, prefixes, self._own)
        output = WORD if output_prefix is None else output_prefix
        keys = fast_kv_cache.Tokens(self.kv.keys, runs, output, own=self._own)
        ends = min(output_tokens, self.context - prompt_tokens)
        return FastRequest(request_id, prompt_tokens, ends, keys, priority, arrived_at_s)

    def add(self, request: FastRequest) -> None:
        """Raises `ValueError` as `check` does."""
        self.check(request)
        self.requests[request.id] = request
        self.waiting.add(request)

    def check(self, request: FastRequest) -> None:
        """Raises `ValueError` for a prompt that vLLM's front end rejects."""
        if not 0 < request.prompt_tokens < self.context:
            raise ValueError(f"a prompt of {request.prompt_tokens} tokens does not fit into the model's context")

    def abort(self, request_id: str) -> None:
        """Ends a request that waits or runs. Ids that are not known are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request, finished=False)

    def preempt(self, request_id: str) -> None:
        """Preempts a request before a step. Ids that do not run are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.running:
            self.running.remove(request)
            self._preempt(request)

    def hits(self, request: FastRequest) -> Sequence[fast_kv_cache.Block]:
        """The cached blocks that a waiting request would find now. Its last token is always computed, for its logits."""
        if not self.kv.caching:
            return ()
        most = (request.tokens - 1) // BLOCK_TOKENS
        return self.kv.hits(request.keys.extend(most), most)

    # One step.

    def schedule(self) -> Step:
        """Schedules the next step."""
        step = Step()
        most = self.max_call_tokens
        if most is None or len(self.running) + len(self.waiting) < 2:
            most = self.max_step_tokens
        budget, preempted = self._schedule_running(step, most)
        if not preempted:
            self._schedule_waiting(step, budget, most)
        step.preempted, self._preempted = self._preempted, set()
        self._advance(step)
        return step

    def finish(self, step: Step) -> list[tuple[FastRequest, bool]]:
        """Ends a step: each request in `producing` gets its token. Returns these requests and whether each has ended."""
        results = []
        ended = False
        for request in step.producing:
            if request.ended:
                continue
            request.tokens += 1
            request.output += 1
            last = request.output >= request.ends
            if last:
                ended = True
                self._end(request, finished=True)
            results.append((request, last))
        if ended:
            self.running = [request for request in self.running if not request.ended]
        return results

    def _schedule_running(self, step: Step, most: int) -> tuple[int, bool]:
        """Schedules the running requests, at most so many tokens of each. Returns the tokens that are left of the step, and
        whether any was preempted."""
        budget, index, preempted = self.max_step_tokens, 0, False
        kv, scheduled, running, paused = self.kv, step.tokens, self.running, self.paused
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.computed
            count = request.tokens - computed
            if paused and request.id in paused:
                index += 1
                continue
            if count > most:
                count = most
            if count > budget:
                count = budget
            end = computed + count
            missing = (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS - request.held
            if missing > 0:
                while missing > kv.free_blocks:
                    if self._reclaim():
                        continue
                    victim = self._victim()
                    place = running.index(victim)
                    del running[place]
                    if place < index:
                        index -= 1
                    budget += scheduled.pop(victim, 0)
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        return budget, True
                kv.take(missing)
                request.held += missing
            if kv.caching:
                full = end // BLOCK_TOKENS
                if full > len(request.hashed):
                    kv.cache(request.hashed, request.keys.extend(full), full)
            scheduled[request] = count
            budget -= count
            index += 1
        return budget, preempted

    def _schedule_waiting(self, step: Step, budget: int, most: int) -> None:
        kv, waiting = self.kv, self.waiting
        while budget > 0 and len(waiting) and len(self.running) < self.max_running:
            request = waiting.peek()
            hits = self.hits(request)
            computed = len(hits) * BLOCK_TOKENS
            whole = (request.tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - len(hits)
            fits = whole + kv.evictable(hits) <= kv.free_blocks  # the whole sequence must fit
            while not fits and self._reclaim():
                fits = whole + kv.evictable(hits) <= kv.free_blocks
            if not fits:
                break
            count = min(request.tokens - computed, budget, most)
            end = computed + count
            kv.touch(hits)
            request.hashed = list(hits)
            request.held = (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
            kv.take(request.held - len(hits))
            if kv.caching:
                full = end // BLOCK_TOKENS
                kv.cache(request.hashed, request.keys.extend(full), full)
            waiting.pop()
            self.running.append(request)
            (step.resumed if request.preemptions else step.started).append(request)
            request.running = True
            request.computed = computed
            step.tokens[request] = count
            budget -= count

    def _advance(self, step: Step) -> None:
        """Counts the scheduled tokens as computed, and sums up the work of the step."""
        uncached = attended = decodes = context = 0
        producing, prompts = step.producing, step.prompts
        for request, count in step.tokens.items():
            start = request.computed
            request.computed = end = start + count
            if end < request.tokens:
                request.prefilling = True
            else:
                request.prefilling = False
                producing.append(request)
            if count == 1 and start >= request.prompt_tokens:
                decodes += 1
                context += end
            else:
                uncached += count
                attended += count * start + count * (count + 1) // 2
                if start < request.prompt_tokens:
                    prompts[request] = min(count, request.prompt_tokens - start)
        step.uncached, step.attended, step.decodes, step.context = uncached, attended, decodes, context

    def _reclaim(self) -> bool:
        """Frees memory that no request needs. False if there is none."""
        return False

    def _victim(self) -> FastRequest:
        """The running request that is preempted when a block is missing."""
        if self._by_priority:
            return max(self.running, key=lambda request: (request.priority, request.arrived_at_s))
        return self.running[-1]

    def _preempt(self, request: FastRequest) -> None:
        """Takes the blocks of a request, which has left `running`, and lets it wait again."""
        self._release(request)
        request.running = False
        request.computed = 0
        request.preemptions += 1
        self.waiting.put_back(request)
        self._preempted.add(request)

    def _end(self, request: FastRequest, *, finished: bool) -> None:
        self._release(request)
        request.ended = True
        request.running = False
        del self.requests[request.id]

    def _release(self, request: FastRequest) -> None:
        self.kv.free(request.hashed, request.held - len(request.hashed))
        request.hashed, request.held = [], 0


def _prompt(prompt_tokens: int, prefixes: Iterable[engine_limits.Prefix], own: int) -> list[fast_kv_cache.Run]:
    """A prompt of `prompt_tokens` tokens: the shared parts, then the token `own`."""
    runs: list[fast_kv_cache.Run] = []
    left = prompt_tokens
    for token, count in (*prefixes, (own, prompt_tokens)):
        taken = min(count, left)
        left -= taken
        if taken:
            runs.append((token, taken))
    return runs
