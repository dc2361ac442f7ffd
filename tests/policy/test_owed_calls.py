"""A call that is owed a place starts in the next step, also where the answers of others have filled the memory."""

from dataclasses import replace

import pytest

from tidegate_policy.cost import CostModel
from tidegate_policy.engine import owed_calls, snapshot
from tidegate_policy.model import Call, CallId
from tidegate_sim import fast_plugin
from tidegate_sim.engine_limits import BLOCK_TOKENS

BLOCKS, PROMPT = 40, 4 * BLOCK_TOKENS
LIMITS = CostModel(step_s=0.01, prefill_s=1e-4)


class Engine:
    """The model of vLLM's scheduler with Tidegate's engine core, under one policy."""

    def __init__(self, policy: str, *, max_batch: int = 8, blocks: int = BLOCKS) -> None:
        self.now = 0.0
        limits = replace(LIMITS, kv_tokens=(blocks + 1) * BLOCK_TOKENS, max_batch=max_batch)
        self.scheduler = fast_plugin.FastPlugin(limits, policy=policy, clock=lambda: self.now, prefix_cache=False)

    def arrives(
        self, name: str, *, owed: bool = False, ahead: bool = False, yields: bool = False, prompt: int = PROMPT
    ) -> None:
        self.now += 0.001
        call = Call(
            id=CallId(name),
            arrived_at_s=self.now,
            prompt_tokens=prompt,
            output_predicted=400,
            owed=owed,
            ahead=ahead,
            yields=yields,
            tenant="quiet" if owed or ahead else "flood",
        )
        self.scheduler.receive(self.scheduler.request(call.id, prompt, 400), call)

    def step(self) -> tuple[set[str], set[str]]:
        """The calls that start or resume, and those that are preempted."""
        self.now += 0.01
        step = self.scheduler.schedule()
        self.scheduler.finish(step)
        return {request.id for request in (*step.started, *step.resumed)}, {request.id for request in step.preempted}

    def computed(self, *names: str) -> int:
        """The tokens of these calls that are computed."""
        return sum(self.scheduler.requests[name].computed for name in names)

    def compute_long_prompt(self, tokens: int) -> None:
        """One call decodes, and steps of `PROMPT` tokens beside it begin with the prompt of another one."""
        self.arrives("decodes")
        self.step()
        self.scheduler.core.set_controls(max_running=None, max_step_tokens=PROMPT + 1)
        self.arrives("long", prompt=tokens)
        self.step()

    def fill(self) -> None:
        """Calls of one tenant take all memory."""
        for number in range(8):
            self.arrives(f"f{number}")
        while self.scheduler.kv.free_blocks >= PROMPT // BLOCK_TOKENS:
            self.step()


@pytest.mark.parametrize("policy", ["fcfs", "urgency", "sjf", "wfq"])
def test_an_owed_call_takes_the_memory_of_a_call_that_is_owed_none(policy: str) -> None:
    engine = Engine(policy)
    engine.fill()
    engine.arrives("quiet", owed=True)
    started, preempted = engine.step()
    assert started == {"quiet"}
    assert preempted
    assert preempted <= {f"f{number}" for number in range(8)}


def test_an_owed_call_takes_a_place_of_a_full_batch() -> None:
    engine = Engine("fcfs", max_batch=2)
    for name in ("f0", "f1", "f2"):
        engine.arrives(name)
    engine.step()
    engine.arrives("quiet", owed=True)
    assert engine.step() == ({"quiet"}, {"f1"})
    engine.arrives("f3")
    engine.arrives("second", owed=True)
    assert engine.step() == ({"second"}, {"f0"})
    engine.arrives("third", owed=True)
    assert engine.step() == (set(), set()), "no owed call gives way to another one"


def test_a_call_that_is_owed_a_place_and_yields_starts_at_once_and_computes_its_prompt_behind_others() -> None:
    engine = Engine("fcfs", max_batch=4, blocks=400)
    for name in ("f0", "f1", "f2", "f3", "f4"):
        engine.arrives(name)
    engine.step()
    engine.arrives("heavy", owed=True, yields=True, prompt=100 * BLOCK_TOKENS)
    assert engine.step() == ({"heavy"}, {"f3"})
    chunk = 2 * LIMITS.step_s / LIMITS.prefill_s
    computed = [engine.computed("heavy")]
    while computed[-1] < 100 * BLOCK_TOKENS:
        engine.step()
        computed.append(engine.computed("heavy"))
    assert max(after - before for before, after in zip([0, *computed], computed, strict=False)) <= chunk + 2
    assert engine.computed("f0", "f1", "f2") > 3 * (PROMPT + len(computed) - 2), "they decode in each step"


def test_nothing_yields_to_a_call_that_is_owed_none_or_to_one_that_could_not_start_even_so() -> None:
    engine = Engine("fcfs", max_batch=2)
    engine.arrives("f0")
    engine.arrives("f1")
    engine.step()
    engine.arrives("f2")
    assert engine.step() == (set(), set())
    engine.arrives("huge", owed=True, prompt=BLOCKS * BLOCK_TOKENS)
    assert engine.step() == (set(), set())


def test_others_yield_again_to_a_call_that_has_not_started_four_steps_later() -> None:
    """Another lane, or running calls that need a block in the same step, may take what they left."""
    engine = Engine("fcfs", max_batch=2)
    engine.arrives("f0")
    engine.arrives("f1")
    engine.step()
    engine.arrives("quiet", owed=True)
    core = engine.scheduler.core
    plans = [core.take_plan(engine.now).preempt for _ in range(5)]
    assert plans == [("f1",), (), (), (), ("f1",)]


def test_owed_calls_start_soon_where_all_running_calls_need_a_block_in_the_same_steps() -> None:
    engine = Engine("fcfs", max_batch=64, blocks=400)
    for number in range(60):
        engine.arrives(f"f{number}", prompt=2 * BLOCK_TOKENS)
    while engine.scheduler.kv.free_blocks > 20:
        engine.step()
    waits: list[int] = []
    for number in range(20):
        engine.arrives(f"q{number}", owed=True, prompt=40 * BLOCK_TOKENS)
        waits.append(1)
        while f"q{number}" not in engine.step()[0]:
            waits[-1] += 1
            assert waits[-1] < 40
        for _ in range(5):
            engine.step()
        engine.scheduler.abort(f"q{number}")
    assert max(waits) <= 12


def test_many_short_calls_yield_to_one_long_prompt() -> None:
    engine = Engine("fcfs", max_batch=64, blocks=130)
    for number in range(60):
        engine.arrives(f"f{number}", prompt=BLOCK_TOKENS)
    while engine.scheduler.kv.free_blocks >= 4:
        engine.step()
    engine.arrives("quiet", owed=True, prompt=40 * BLOCK_TOKENS)
    started = [engine.step()[0] for _ in range(6)]
    assert "quiet" in set().union(*started)


def test_a_step_for_owed_calls_does_not_delay_the_first_one_after_a_while_without_any() -> None:
    engine = Engine("fcfs")
    engine.compute_long_prompt(6 * PROMPT)
    for name in ("quiet", "second"):
        engine.arrives(name, owed=True)
        assert engine.step()[0] == {name}
        engine.scheduler.abort(name)
        engine.step()


def test_a_call_that_has_made_no_progress_since_its_preemption_does_not_yield_again() -> None:
    engine = Engine("fcfs", max_batch=1)
    engine.arrives("f0")
    engine.step()
    engine.arrives("quiet", owed=True)
    assert engine.step() == ({"quiet"}, {"f0"})
    engine.scheduler.abort("quiet")
    assert engine.step()[0] == {"f0"}
    known = engine.scheduler.core._calls[CallId("f0")]
    known.preempted_at_output = known.output_tokens
    engine.arrives("third", owed=True)
    assert engine.step() == (set(), set())


@pytest.mark.parametrize("policy", ["fcfs", "urgency", "sjf", "wfq"])
def test_owed_calls_yield_memory_last(policy: str) -> None:
    engine = Engine(policy)
    for name in ("quiet", "f0", "f1", "second", "f2"):
        engine.arrives(name, owed=name in ("quiet", "second"))
    preempted: list[str] = []
    while len(preempted) < 2 and engine.now < 10.0:
        preempted += sorted(engine.step()[1])
    assert len(set(preempted) & {"f0", "f1", "f2"}) == 2


def test_a_partly_computed_prompt_pauses_for_an_owed_call_and_not_in_two_steps_in_a_row() -> None:
    engine = Engine("fcfs")
    engine.compute_long_prompt(5 * PROMPT)
    for name in ("quiet", "second", "third"):
        engine.arrives(name, owed=True)
    engine.arrives("f0")
    before = engine.computed("long")
    assert engine.step()[0] == {"quiet"}
    assert engine.computed("long") == before
    started = [engine.step()[0]]
    assert engine.computed("long") > before
    started += [engine.step()[0] for _ in range(7)]
    assert {"second", "third"} <= set().union(*started[:3])
    assert "f0" not in started[0]


def test_an_owed_call_starts_beside_a_long_prompt_that_runs_alone() -> None:
    engine = Engine("fcfs", blocks=400)
    engine.arrives("long", prompt=5000)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=2048)
    engine.step()
    engine.arrives("quiet", owed=True)
    assert engine.step()[0] == {"quiet"}


def test_while_an_owed_call_decodes_other_prompts_get_a_small_part_of_each_step() -> None:
    engine = Engine("fcfs", blocks=1000)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=2048)
    engine.arrives("quiet", owed=True)
    engine.step()
    for name in ("long", "second"):
        engine.arrives(name, prompt=5000)
    chunk = round(owed_calls.CHUNK_STEPS * LIMITS.step_s / LIMITS.prefill_s)
    for _ in range(4):
        before = engine.computed("long", "second")
        engine.step()
        assert engine.computed("long", "second") - before == chunk
    engine.scheduler.abort("quiet")
    before = engine.computed("long", "second")
    engine.step()
    assert engine.computed("long", "second") - before == 2048


@pytest.mark.parametrize("mark", ["owed", "yields"])
def test_calls_that_start_beside_a_long_prompt_get_a_token_in_every_step(mark: str) -> None:
    """vLLM gives the tokens of a step first to the prompt, which started before them."""
    engine = Engine("fcfs", blocks=8000)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=2048)
    engine.arrives("long", prompt=60_000, yields=mark == "yields")
    engine.step()
    engine.arrives("quiet", owed=mark == "owed")
    engine.arrives("plain")
    for _ in range(12):
        engine.step()
    before = [engine.scheduler.requests[name].output for name in ("quiet", "plain")]
    for _ in range(5):
        engine.step()
    assert [engine.scheduler.requests[name].output for name in ("quiet", "plain")] == [done + 5 for done in before]
    engine.scheduler.abort("quiet")
    for _ in range(5):
        engine.step()
    assert engine.scheduler.requests["plain"].output == before[1] + 10, "also when no marked call is left"


def test_where_a_part_of_a_step_is_more_than_a_step_an_owed_call_still_finds_tokens() -> None:
    engine = Engine("fcfs", blocks=4000)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=snapshot.LEAST_CHUNK * 8)
    engine.arrives("long", prompt=30_000)
    engine.step()
    engine.arrives("quiet", owed=True)
    assert engine.step()[0] == {"quiet"}


def test_an_owed_call_starts_beside_two_long_prompts_of_which_one_computes_at_a_time() -> None:
    engine = Engine("fcfs", blocks=8000)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=2048)
    engine.arrives("first", prompt=30_000)
    engine.step()
    engine.arrives("owed", owed=True, prompt=1500)
    engine.arrives("short", prompt=20_000)
    while engine.scheduler.requests["short"].computed == 0:
        engine.step()
    engine.scheduler.abort("owed")
    engine.arrives("quiet", owed=True)
    waits = 1
    while "quiet" not in engine.step()[0]:
        waits += 1
    assert waits <= 2
    before = [engine.computed(name) for name in ("first", "short")]
    for _ in range(4):
        engine.step()
    assert all(engine.computed(name) > done for name, done in zip(("first", "short"), before, strict=True))


def test_a_call_that_is_ahead_of_long_prompts_takes_no_memory_and_no_place() -> None:
    engine = Engine("fcfs", max_batch=2)
    for name in ("f0", "f1"):
        engine.arrives(name)
    engine.step()
    engine.arrives("quiet", ahead=True)
    assert engine.step() == (set(), set())
    engine.scheduler.abort("f0")
    engine.arrives("long", prompt=10 * PROMPT)
    assert engine.step()[0] == {"quiet"}


def test_no_step_is_empty_because_all_prompts_pause() -> None:
    engine = Engine("fcfs", max_batch=2)
    engine.arrives("long", prompt=10 * PROMPT)
    engine.scheduler.core.set_controls(max_running=None, max_step_tokens=PROMPT)
    engine.step()
    engine.arrives("huge", owed=True, prompt=BLOCKS * BLOCK_TOKENS)
    for _ in range(5):
        engine.step()
        assert engine.scheduler.requests["long"].computed > 0
    assert engine.scheduler.requests["long"].computed >= 6 * PROMPT
