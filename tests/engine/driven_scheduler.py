"""Tidegate's scheduler in vLLM's loop, without a model, driven by one thread."""

from tidegate_engine.scheduler import TidegateScheduler
from tidegate_policy.cost import CostModel
from tidegate_sim import virtual_engine as engine

ROOMY = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=2, max_step_tokens=512)
TIGHT = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=20 * engine.BLOCK_TOKENS, max_batch=4, max_step_tokens=512)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Driven:
    """A scheduler, and the one thread that may step it."""

    def __init__(self, limits=ROOMY, policy="fcfs", scheduler=TidegateScheduler, **ours):
        self.clock = Clock()
        self.scheduler = engine.build(scheduler, limits, cost=limits, policy=policy, clock=self.clock, **ours)
        self.ends = {}

    def add(self, name, prompt=16, output=10, prefixes=(), priority=0, **labels):
        self.ends[name] = output
        sent = {f"tg.{key}": value for key, value in labels.items()}
        self.scheduler.add_request(engine.request(name, prompt, sent, prefixes, priority=priority))

    def step(self):
        """One step; returns the calls that got tokens."""
        output, produced = self.begin()
        self.end(output, produced)
        return list(output.num_scheduled_tokens)

    def begin(self):
        """Schedules a step; returns its output, and the calls that produce a token."""
        output = self.scheduler.schedule()
        return output, engine.producing(output, self.scheduler.requests)

    def end(self, output, produced):
        """The device has computed the step."""
        self.clock.now_s += 1.0
        self.scheduler.update_from_output(output, engine.forward(output, produced, self.scheduler.requests, self.ends))

    def running(self):
        return [request.request_id for request in self.scheduler.running]

    def starts(self):
        """The order in which they start, when each leaves after its first token."""
        order = []
        while self.scheduler.has_requests():
            order += self.step()
        return order
