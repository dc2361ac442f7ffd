"""A pool in virtual time that the autoscaler sizes, and the bound on its changes, for the tests of the autoscaler."""

import dataclasses

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import autoscaler, call_load
from tidegate_policy.scale.autoscaler import NodePool, Observation, ScaleSettings

FAST = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=1e-4, kv_tokens=100_000, max_batch=64)
SLOW = CostModel(step_s=0.04, prefill_s=2e-4, decode_s=2e-4, kv_tokens=100_000, max_batch=64)
CALL = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=200)
ONE = call_load.of_calls([CALL])
EACH_S = call_load.engine_seconds(ONE, FAST)
"""Seconds of a fast engine for one call."""
PERIOD_S = 10.0


def node_pool(name="fast", cost=FAST, price=1.0, low=0, high=20, ready=0, **more):
    return NodePool(name=name, cost=cost, price=price, low=low, high=high, ready=ready, start_s=120.0, **more)


class Pool:
    """A pool in virtual time, whose engines are ready as soon as they are wanted unless the test says otherwise."""

    def __init__(self, *node_pools, settings=None, wanted=None):
        self.node_pools = node_pools or (node_pool(),)
        self.settings = settings or ScaleSettings()
        self.now = 0.0
        self.state = autoscaler.begin(0.0, wanted or {each.name: each.low for each in self.node_pools})
        self.first = dict(self.state.wanted)
        self.changes = []

    def observe(self, calls_a_second, *, times=1, running=0, **seen):
        for _ in range(times):
            self.now += PERIOD_S
            pools = [dataclasses.replace(each, ready=self.state.wanted.get(each.name, 0)) for each in self.node_pools]
            observation = Observation(
                seconds=PERIOD_S,
                running=running,
                **{
                    "arrived": ONE.times(calls_a_second * PERIOD_S),
                    "waiting": call_load.NOTHING,
                    "queued": 0,
                    "node_pools": pools,
                    **seen,
                },
            )
            self.state, self.decision = autoscaler.step(self.now, self.state, observation, self.settings)
            if self.decision.changed:
                self.changes.append((self.now, dict(self.decision.wanted), self.decision.reason))
        return self.decision.wanted


def load(engines):
    """The calls a second that keep so many fast engines fully occupied."""
    return engines / EACH_S


def assert_few(pool, budget):
    """At most `budget` changes in any hour, and after an increase no decrease before the stabilisation window is over."""
    instants = [at_s for at_s, *_ in pool.changes]
    for at_s in instants:
        assert sum(at_s - 3600 < other <= at_s for other in instants) <= budget
    raised_s, before = 0.0, pool.first
    for at_s, after, _ in pool.changes:
        if any(after[name] < before[name] for name in after):
            assert at_s - raised_s >= pool.settings.stabilisation_s
        if any(after[name] > before[name] for name in after):
            raised_s = at_s
        before = after
