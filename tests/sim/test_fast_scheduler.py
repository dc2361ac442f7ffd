"""The fast model of the scheduler makes vLLM's schedule, step by step, on random histories. One file holds the histories
and both drivers, because they belong together.

The number of histories is small, so that the test is short. `TIDEGATE_FAST_HISTORIES=N` runs N histories of each kind.
"""

import itertools
import os
import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tidegate_engine import vllm_probe
from tidegate_engine.scheduler import TidegateScheduler
from tidegate_policy import labels, policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import regulators as engine_regulators
from tidegate_policy.engine import session_hold
from tidegate_policy.engine.regulators import REGULATORS
from tidegate_policy.model import Call, CallId
from tidegate_sim import engine_limits, fast_plan_execution, fast_plugin, fast_scheduler
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

HISTORIES = int(os.environ.get("TIDEGATE_FAST_HISTORIES", "2"))
MOST_STEPS = 4000


@dataclass
class Arrival:
    """A request of a history."""

    step: int
    name: str
    prompt: int
    output: int
    prefixes: tuple = ()
    output_prefix: int | None = None
    session: str = ""
    urgency: int = 2
    due_s: float | None = None
    abort_step: int | None = None
    aborted_in_step: bool = False
    """The request is aborted while a step runs, not between two steps."""


@dataclass
class History:
    """Everything that happens to an engine from outside."""

    limits: CostModel
    prefix_cache: bool
    arrivals: list
    switches: dict = field(default_factory=dict)
    controls: dict = field(default_factory=dict)
    regulators: tuple = ()
    hold: session_hold.Settings | None = None


def drawn(seed, *, policy=None, sessions=False, tight=False):
    """A random history. Most engines have so little KV that requests are preempted all the time. With `sessions` most
    requests are the next turn of a session, and the engine holds contexts. With `tight` requests are surely preempted."""
    rng = random.Random(seed)
    limits = CostModel(
        step_s=0.02,
        prefill_s=0.05 if sessions else 1e-4,  # so that it pays to hold a context
        attention_s=1e-9,
        decode_s=1e-4,
        context_s=1e-7,
        kv_tokens=500 if tight else rng.choice((500, 700, 900, 3000)),
        max_batch=12 if tight else rng.choice((5, 12, 40)),
        max_step_tokens=128 if tight else rng.choice((48, 128, 512)),
    )
    longest = min(limits.kv_tokens - 100, 1500)
    arrivals = []
    for index in range(rng.randrange(15, 35)):
        output = rng.randrange(1, 120)
        session = f"s{index}"
        prefixes, prompt = (), rng.randrange(1, rng.choice((40, 200, max(longest - 120, 60))))
        kind, step = rng.uniform(0.35, 0.6) if sessions else rng.random(), rng.randrange(0, 100)
        if kind < 0.4:
            prefixes = tuple((rng.randrange(3), rng.choice((16, 40, 64, 200))) for _ in range(rng.randrange(1, 3)))
        elif kind < 0.7 and arrivals and (before := rng.choice(arrivals)).output_prefix is not None:
            prefixes = (*before.prefixes, (before.output_prefix, before.output))  # the next turn of a session
            prompt = sum(count for _, count in prefixes) + rng.randrange(1, 60)
            session = before.session
            step = before.step + before.output + rng.randrange(1, 30)
        output_prefix = 100 + 2 * index if sessions or rng.random() < 0.6 else None
        if output_prefix is not None:
            named = sum(count for _, count in prefixes)
            prefixes = (*prefixes, (output_prefix + 1, max(prompt - named, 1)))
            prompt = sum(count for _, count in prefixes)
        if prompt + output > longest:
            prefixes, prompt, output, output_prefix = (), 50, 50, None
        aborts = rng.random() < 0.1
        arrivals.append(
            Arrival(
                step=step,
                name=f"r{index}",
                prompt=prompt,
                output=output,
                prefixes=prefixes,
                output_prefix=output_prefix,
                session=session,
                urgency=rng.randrange(5),
                due_s=rng.choice((None, rng.uniform(0.1, 20))),
                abort_step=rng.randrange(1, 250) if aborts else None,
                aborted_in_step=rng.random() < 0.5,
            )
        )
    arrivals.sort(key=lambda item: item.step)
    switches = {}
    controls = {}
    if policy is not None and not tight:
        switches = {rng.randrange(200): rng.choice(sorted(policies.POLICIES)) for _ in range(rng.randrange(3))}
        controls = {
            rng.randrange(200): {
                "max_running": rng.choice((None, 0, 2, 8)),
                "max_step_tokens": rng.choice((None, 0, 40, 100)),
            }
            for _ in range(rng.randrange(3))
        }
    regulated = () if policy is None or tight else tuple(rng.sample(sorted(REGULATORS), rng.choice((0, 0, 0, 1, 3))))
    hold = session_hold.Settings(max_share=0.6) if sessions else None
    return History(limits, rng.random() < 0.85, arrivals, switches, controls, regulated, hold)


class Real:
    """vLLM's scheduler, behind the events of a history."""

    def __init__(self, history, clock, *, stock=None, policy=None):
        self.stock, self.clock = stock, clock
        if stock:
            self.scheduler = engine.build(
                Scheduler, history.limits, scheduling=stock, prefix_cache=history.prefix_cache
            )
        else:
            self.scheduler = engine.build(
                TidegateScheduler,
                history.limits,
                prefix_cache=history.prefix_cache,
                policy=policy,
                cost=history.limits,
                regulators=engine_regulators.create(history.regulators),
                hold=history.hold,
                clock=clock,
            )
        self.ends, self.words = {}, {}

    @property
    def core(self):
        return None if self.stock else self.scheduler._core

    def arrive(self, item):
        self.ends[item.name] = item.output
        if item.output_prefix is not None:
            self.words[item.name] = engine.prefix_token(item.output_prefix)
        priority = priority_of(item)
        self.scheduler.add_request(
            engine.request(
                item.name,
                item.prompt,
                sent(self.clock(), item),
                item.prefixes,
                priority=priority,
                arrived_at_s=self.clock(),
            )
        )

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self):
        output = self.scheduler.schedule()
        self.output, self.produced = output, engine.producing(output, self.scheduler.requests)
        cached = output.scheduled_cached_reqs
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        starts += [
            (name, count)
            for name, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in cached.resumed_req_ids
        ]
        return {
            "tokens": list(output.num_scheduled_tokens.items()),
            "cached": starts,
            "preempted": sorted(output.preempted_req_ids or ()),
            "seconds": engine.step_seconds(COST, output, self.scheduler.requests),
            **self.facts(),
        }

    def finish(self):
        made_up = engine.forward(self.output, self.produced, self.scheduler.requests, self.ends, self.words)
        batches = self.scheduler.update_from_output(self.output, made_up).values()
        return [(result.request_id, result.finish_reason is not None) for batch in batches for result in batch.outputs]

    def facts(self):
        return {
            "running": [request.request_id for request in self.scheduler.running],
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "usage": self.scheduler.get_kv_cache_usage(),
            "waiting": len(self.scheduler.waiting),
            "own": own_kv_tokens(vllm_probe.VllmProbe(self.scheduler), self.scheduler.running, "request_id"),
            "shared": shared_tokens(vllm_probe.VllmProbe(self.scheduler), self.core),
        }


class Fast:
    """The fast scheduler, behind the events of a history."""

    def __init__(self, history, clock, *, stock=None, policy=None):
        self.stock, self.clock, self.own = stock, clock, 0
        if stock:
            self.scheduler = fast_scheduler.FastScheduler(
                history.limits, policy=stock, prefix_cache=history.prefix_cache
            )
        else:
            self.scheduler = fast_plugin.FastPlugin(
                history.limits,
                policy=policy,
                clock=clock,
                regulators=engine_regulators.create(history.regulators),
                hold=history.hold,
                prefix_cache=history.prefix_cache,
            )

    @property
    def core(self):
        return None if self.stock else self.scheduler.core

    def arrive(self, item):
        request = self.scheduler.request(
            item.name,
            item.prompt,
            item.output,
            item.prefixes,
            item.output_prefix,
            priority=priority_of(item),
            arrived_at_s=self.clock(),
        )
        if self.stock:
            self.scheduler.add(request)
        else:
            self.scheduler.arrive(request, sent(self.clock(), item))

    def abort(self, name):
        self.scheduler.abort(name)

    def schedule(self):
        self.step = step = self.scheduler.schedule()
        return {
            "tokens": [(request.id, count) for request, count in step.tokens.items()],
            "cached": [
                (request.id, request.computed - step.tokens[request]) for request in (*step.started, *step.resumed)
            ],
            "preempted": sorted(request.id for request in step.preempted),
            "seconds": step.seconds(COST),
            **self.facts(),
        }

    def finish(self):
        return [(request.id, ended) for request, ended in self.scheduler.finish(self.step)]

    def facts(self):
        return {
            "running": [request.id for request in self.scheduler.running],
            "free": self.scheduler.kv.free_blocks,
            "usage": self.scheduler.kv.usage,
            "waiting": len(self.scheduler.waiting),
            "own": own_kv_tokens(fast_plan_execution.FastProbe(self.scheduler), self.scheduler.running, "id"),
            "shared": shared_tokens(fast_plan_execution.FastProbe(self.scheduler), self.core),
        }


def own_kv_tokens(probe, running, name):
    """The tokens that the preemption of each running request would free, counted to its end and to three blocks."""
    ids = [getattr(request, name) for request in running]
    return [probe.own_kv_tokens(each, enough=enough) for each in ids for enough in (10_000, 40)]


def shared_tokens(probe, core):
    """Tokens of the cached prefixes of the first waiting calls, and those of them that calls keep."""
    waiting = [] if core is None else [item.call.id for queue in core.queues for item in queue.first(4)]
    return [(probe.cached_tokens(each), probe.shared_tokens(each)) for each in waiting]


# The fixed time of a step is short, so that the parts of prompts beside marked calls are smaller than a step.
COST = CostModel(step_s=0.001, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-7)


def priority_of(item):
    return item.urgency * 7 % 5


def sent(now, item):
    return labels.write(
        now,
        Call(
            id=CallId(item.name),
            arrived_at_s=now,
            prompt_tokens=item.prompt,
            output_predicted=max(item.output - 5, 1),
            urgency=item.urgency,
            due_at_s=None if item.due_s is None else now + item.due_s,
            tenant=f"t{item.urgency % 3}",
            yields=item.urgency == 4,
            owed=item.urgency == 0,
            ahead=item.urgency == 1,
            group=f"g{item.urgency}",
            session=item.session,
            tool="search" if item.output_prefix is not None else None,
            tool_s=0.2 if item.output_prefix is not None else None,
            tool_return_tokens=30 if item.output_prefix is not None else 0,
            ttft_s=0.5,
            tpot_s=0.05,
        ),
    )


def lived(make, history, **how):
    """Runs a history and returns the facts of each step."""
    now = [0.0]
    subject = make(history, lambda: now[0], **how)
    arrivals = list(history.arrivals)
    facts, left = [], {item.name for item in arrivals}
    for step in range(MOST_STEPS):
        while arrivals and arrivals[0].step <= step:
            subject.arrive(arrivals.pop(0))
        for item in history.arrivals:
            if item.abort_step == step and not item.aborted_in_step and item.name in left and item not in arrivals:
                subject.abort(item.name)
                left.discard(item.name)
        if subject.core is not None:
            if step in history.switches:
                subject.scheduler.set_policy(history.switches[step], "a test", {})
            if step in history.controls:
                command = history.controls[step]
                (subject.scheduler if make is Real else subject.core).set_controls(**command)
        found = subject.schedule()
        now[0] += found["seconds"]
        for item in history.arrivals:
            if item.abort_step == step and item.aborted_in_step and item.name in left and item not in arrivals:
                subject.abort(item.name)
                left.discard(item.name)
        found["results"] = subject.finish()
        left -= {name for name, ended in found["results"] if ended}
        found["after"] = subject.facts()
        if subject.core is not None:
            core = subject.core
            found["state"] = core.state(now[0], kv_usage=found["after"]["usage"])
            found["counted"] = (core.busy_s, core.prompt_tokens, core.output_tokens, core.preemptions)
            found["failures"] = dict(core.failures.counts)
            found["held"] = core.snapshot(now[0]).pinned_kv_tokens
        facts.append(found)
        if not left and not arrivals:
            return facts
    raise AssertionError(f"{len(left)} requests never ended")


def compare(history, **how):
    """Returns the number of preemptions and of cached tokens, which show what the history exercised."""
    real, fast = lived(Real, history, **how), lived(Fast, history, **how)
    for number, (theirs, ours) in enumerate(zip(real, fast, strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(real) == len(fast)
    return (
        sum(len(step["preempted"]) for step in real),
        sum(count for step in real for _, count in step["cached"]),
    )


def together(found):
    preempted, cached = (sum(values) for values in zip(*found, strict=True))
    return preempted, cached


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_fast_model_makes_the_schedule_of_vllms_own_class(policy):
    preempted, cached = together(
        [compare(drawn(f"stock {seed}", tight=seed == 0), stock=policy) for seed in range(HISTORIES)]
    )
    assert preempted > 0
    assert cached > 0


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_the_fast_model_makes_the_schedule_of_tidegates_class(policy):
    found = [
        compare(drawn(f"{policy} {seed}", policy=policy, tight=seed == 0), policy=policy) for seed in range(HISTORIES)
    ]
    preempted, cached = together(found)
    assert preempted > 0
    assert cached > 0


@pytest.mark.parametrize("policy", ["fcfs", "urgency"])
def test_the_fast_model_holds_and_releases_the_contexts_that_tidegates_class_holds(policy):
    histories = [drawn(f"sessions {policy} {seed}", policy=policy, sessions=True) for seed in range(HISTORIES)]
    found = [compare(history, policy=policy) for history in histories]
    assert together(found)[0] > 0
    held = [step["held"] for history in histories for step in lived(Fast, history, policy=policy)]
    assert max(held) > 0
    assert any(later < sooner for sooner, later in itertools.pairwise(held))


def test_a_prompt_that_vllm_would_not_accept_is_rejected():
    scheduler = fast_scheduler.FastScheduler(COST)
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.add(scheduler.request("a", engine_limits.MAX_MODEL_LEN, 1))


def test_a_prompt_that_is_rejected_is_unknown_to_the_core():
    scheduler = fast_plugin.FastPlugin(COST, policy="fcfs", clock=lambda: 0.0)
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.arrive(scheduler.request("a", engine_limits.MAX_MODEL_LEN, 1), {})
    with pytest.raises(KeyError):
        scheduler.core.item(CallId("a"))
