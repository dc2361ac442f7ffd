"""A small engine that serves calls under a policy, for the tests of policies.

It has places for calls, KV memory in tokens, and steps. A step starts calls while they fit, computes a whole prompt or one
output token for each running call, and preempts the call with the greatest rank when memory is short. It reports the same
events as the engine core, in the same order, and keeps the facts that tests compare.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.waiting_queue import WaitingQueue

COST = CostModel(step_s=0.02, prefill_s=1e-4, max_batch=16, kv_tokens=100_000)
STEP_S = 0.02


def call(name: str, **fields) -> Call:
    fields = {"arrived_at_s": 0.0, "prompt_tokens": 100, "output_predicted": 10, **fields}
    return Call(id=CallId(name), **fields)


def context(**fields) -> policies.SchedulerContext:
    return policies.SchedulerContext(cost=lambda: COST, **fields)


@dataclass(slots=True)
class Running:
    item: policies.QueuedRequest
    output: int
    """Tokens that the call really gives."""
    number: int
    prompt_done: bool = False
    served: int = 0
    """Output tokens so far, over all starts."""
    progress: int = 0
    """Output tokens since the last start."""


@dataclass(frozen=True, slots=True)
class Preemption:
    call: Call
    progress: int


@dataclass(slots=True)
class SmallEngine:
    policy: policies.Policy
    places: int = 4
    kv_tokens: int = 10**9
    rank: Callable[[policies.QueuedRequest], policies.Key] | None = None
    """Another choice of victims than the policy's."""
    now: float = 0.0
    queue: WaitingQueue = field(init=False)
    running: dict[CallId, Running] = field(default_factory=dict)
    started: list[CallId] = field(default_factory=list)
    """Each start that was not skipped."""
    ended: list[CallId] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    work_s: Counter[str] = field(default_factory=Counter)
    """Work received by tenant, in seconds of the cost model."""
    outputs: dict[CallId, int] = field(default_factory=dict)
    done: dict[CallId, policies.Computed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.policy)

    def arrive(self, new: Call, *, output: int | None = None) -> policies.QueuedRequest:
        """A call arrives now; it gives `output` tokens, by default as predicted."""
        new = replace(new, arrived_at_s=self.now)
        item = policies.QueuedRequest(call=new, service_s=COST.call_seconds(new))
        self.outputs[new.id] = new.output_predicted if output is None else output
        self.done[new.id] = policies.Computed()
        self.queue.rekey(self.policy.on_arrival(self.now, item))
        self.queue.push(item)
        return item

    def step(self, *, blocked: Collection[CallId] = (), max_starts: int = 10**9) -> None:
        self._start(blocked, max_starts)
        computed = {}
        for call_id in list(self.running):
            if call_id not in self.running:
                continue
            while self._used() + 1 > self.kv_tokens and len(self.running) > 1 and call_id in self.running:
                self.preempt(max(self.running.values(), key=self._victim).item.call.id)
            if call_id in self.running:
                computed[call_id] = self._compute(self.running[call_id])
        self.now += STEP_S
        self.queue.rekey(
            self.policy.on_tokens(self.now, {name: done for name, done in computed.items() if name in self.running})
        )
        for call_id in [name for name, each in self.running.items() if each.served >= each.output]:
            del self.running[call_id]
            self._end(call_id)
            self.ended.append(call_id)

    def run(self, seconds: float, **how) -> None:
        end_s = self.now + seconds
        while self.now < end_s:
            self.step(**how)

    def preempt(self, call_id: CallId) -> None:
        victim = self.running.pop(call_id)
        self.preemptions.append(Preemption(victim.item.call, victim.progress))
        item = self._left(victim, again=True)
        self.queue.rekey(self.policy.on_preemption(self.now, item))
        self.queue.push_preempted(item)

    def abort(self, call_id: CallId) -> None:
        if self.queue.remove(call_id) is None:
            del self.running[call_id]
        self._end(call_id)

    def predict(self, call_id: CallId, output_predicted: int) -> None:
        """A late prediction for a waiting call."""
        known = self.queue.get(call_id)
        changed = replace(known.call, output_predicted=output_predicted)
        self.queue.update(policies.QueuedRequest(call=changed, service_s=COST.call_seconds(changed)))

    def switch(self, policy: policies.Policy) -> None:
        waiting = [item.call.id for item in self.queue]
        known = [self.queue.get(name) for name in waiting] + [each.item for each in self.running.values()]
        known.sort(key=lambda item: item.call.arrived_at_s)
        served = [
            policies.History(item=item, computed=self.done[item.call.id], waits=item.call.id not in self.running)
            for item in known
            if item.call.id in self.running or any(self.done[item.call.id])
        ]
        policies.replay(policy, self.now, known, served)
        self.queue.switch(policy)
        self.policy = policy

    def _start(self, blocked: Collection[CallId], max_starts: int) -> None:
        begin = len(self.started)
        while self.queue.candidates and len(self.running) < self.places and len(self.started) - begin < max_starts:
            item = self.queue.peek()
            need = item.call.prompt_tokens + self.done[item.call.id].output_tokens + 1
            if item.call.id not in blocked and self.running and self._used() + need > self.kv_tokens:
                break
            if item.call.id in blocked:
                self.queue.pass_over()
                continue
            self.queue.start(self.now, item.call.id)
            self.started.append(item.call.id)
            self.running[item.call.id] = Running(
                item,
                self.outputs[item.call.id],
                len(self.started),
                served=self.done[item.call.id].output_tokens,
            )
        self.queue.end_scan()

    def _compute(self, each: Running) -> policies.Computed:
        call, prompt = each.item.call, 0
        if not each.prompt_done:
            prompt = call.prompt_tokens + each.served
            each.prompt_done = True
        each.served += 1
        each.progress += 1
        before = self.done[call.id]
        self.done[call.id] = policies.Computed(before.prompt_tokens + prompt, before.output_tokens + 1)
        self.work_s[call.tenant] += COST.prefill_s * prompt + COST.step_s / COST.max_batch
        return policies.Computed(prompt, 1)

    def _used(self) -> int:
        return sum(each.item.call.prompt_tokens + each.served for each in self.running.values())

    def _victim(self, each: Running) -> policies.Key:
        return (self.rank or self.policy.rank)(self._left(each, again=False))

    def _left(self, each: Running, *, again: bool) -> policies.QueuedRequest:
        """The call with the work that is left of it; `again`: its tokens must be computed again."""
        call = each.item.call
        left = max(call.output_predicted - each.served, 1)
        prefill_s = COST.prefill_s * (call.prompt_tokens + each.served) if again or not each.prompt_done else 0.0
        return policies.QueuedRequest(call=call, service_s=prefill_s + COST.step_s * left)

    def _end(self, call_id: CallId) -> None:
        self.queue.rekey(self.policy.on_end(self.now, call_id))
        del self.outputs[call_id], self.done[call_id]
