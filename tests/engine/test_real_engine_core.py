"""Every policy, regulator and held context in vLLM's engine core with a real model and a KV cache of 13 blocks.

The model is a small Llama with random weights. Its greedy answers depend on every token of the context: KV blocks that
were mixed up, lost or kept too long change an answer. One engine core serves all tests; each gets a new scheduler.
"""

import random

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import prometheus_client
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tidegate_engine import meters
from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_policy import policies
from tidegate_policy.engine import regulators, session_hold
from tidegate_policy.model import CallId
from tidegate_sim import virtual_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BLOCK = 32
CLASSES = [TidegateScheduler, TidegateAsyncScheduler]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A real engine in this process: executor, worker, model runner and KV cache are vLLM's."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=512, num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.3, **shape
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }.items():
            patch.setenv(name, value)
        return LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=320,
            enforce_eager=True,
            num_gpu_blocks_override=14,
            block_size=BLOCK,
            max_num_seqs=4,
            seed=1,
            disable_log_stats=True,
        )


class Core:
    """The engine core with a scheduler of one test."""

    def __init__(self, llm, scheduler, *, prefix_cache=True, **ours):
        self.engine = llm.llm_engine
        core = self.engine.engine_core.engine_core
        before = core.scheduler
        before.vllm_config.cache_config.enable_prefix_caching = prefix_cache
        self.scheduler = core.scheduler = virtual_engine.in_place_of(before, scheduler, **ours)
        self.answers, self.choices = {}, {}

    def add(self, name, prompt, output=30, priority=0, choices=1, **labels):
        """A greedy call; with several `choices` it samples, each choice from a seed of its own."""
        sent = {f"tg.{key}": value for key, value in labels.items()}
        sampled = {"n": choices, "seed": sum(prompt), "temperature": 1.0} if choices > 1 else {"temperature": 0}
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, detokenize=False, extra_args=sent or None, **sampled
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)

    def step(self):
        for output in self.engine.step():
            self.answers[output.request_id] = list(output.outputs[0].token_ids)
            for choice in output.outputs:
                self.choices[output.request_id, choice.index] = list(choice.token_ids)

    def drain(self):
        while self.engine.has_unfinished_requests():
            self.step()
        return self.answers

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def workload(seed=0):
    """Calls with labels of all kinds; half of the prompts share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 500) for _ in range(2 * BLOCK)]
    calls = []
    for index in range(12):
        own = [rng.randrange(5, 500) for _ in range(rng.randrange(8, 90))]
        labels = {
            "out_pred": rng.randrange(1, 60),
            "urgency": rng.randrange(5),
            "budget_ms": rng.randrange(100, 60_000),
            "tenant": rng.choice("xyz"),
            "weight": rng.choice([0.5, 1, 4]),
            "relquery": rng.choice(["g", "h", "i"]),
            "tpot_ms": rng.choice([1, 1000]),
            "session": f"s{index % 5}",
            "tool": "search",
        }
        calls.append((f"c{index}", shared + own if index % 2 else own, rng.randrange(5, 30), labels))
    return calls


def served(core, calls, at_step=lambda step: None):
    """Serves `calls`, a new one at every second step, and returns the answers."""
    waiting = list(calls)
    step = 0
    while waiting or core.engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            name, prompt, output, labels = waiting.pop(0)
            core.add(name, prompt, output, **labels)
        at_step(step)
        core.step()
        step += 1
    return core.answers


@pytest.fixture(scope="module")
def expected(llm):
    """The answers of vLLM's own scheduler."""
    return served(Core(llm, Scheduler), [(name, prompt, output, {}) for name, prompt, output, _ in workload()])


def test_the_answers_depend_on_the_whole_context(llm):
    prompt = list(range(5, 150))
    core = Core(llm, Scheduler)
    core.add("as it is", prompt)
    core.add("another first token", [200, *prompt[1:]])
    answers = core.drain()
    assert answers["as it is"] != answers["another first token"]
    assert len(set(answers["as it is"])) > 5


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_a_policy_changes_the_order_and_no_answer(llm, expected, policy):
    core = Core(llm, TidegateScheduler, policy=policy)
    free = core.free_blocks
    assert served(core, workload()) == expected
    assert core.scheduler.state().policy == policy
    assert core.free_blocks == free


@pytest.mark.parametrize("scheduler", CLASSES)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_all_regulators_together_with_holds_switches_and_aborts_change_no_answer(
    llm, expected, scheduler, prefix_cache
):
    rng = random.Random(prefix_cache)
    core = Core(
        llm,
        scheduler,
        prefix_cache=prefix_cache,
        policy="priority",
        regulators=regulators.create(sorted(regulators.REGULATORS)),
        hold=session_hold.settings(0.5),
    )
    free = core.free_blocks
    aborted = set()

    def disturb(step):
        if step % 7 == 3:
            core.scheduler.set_policy(rng.choice(sorted(policies.POLICIES)), "a switch while calls run", {})
        if step % 25 == 17 and core.scheduler.requests:
            name = rng.choice(sorted(core.scheduler.requests))
            outside = next(call for call, *_ in workload() if name.startswith(call + "-") or name == call)
            aborted.add(outside)
            core.engine.abort_request([outside])

    answers = served(core, workload(), disturb)
    finished = {name: answer for name, answer in answers.items() if name not in aborted}
    assert finished == {name: answer for name, answer in expected.items() if name not in aborted}
    assert len(finished) > 5
    core.scheduler.reset_prefix_cache()
    assert core.free_blocks == free


@pytest.mark.parametrize("hold", [None, session_hold.Settings(max_share=0.7)])
def test_a_session_gets_its_answers_after_tool_calls_with_and_without_a_hold(llm, hold):
    """Turns with a gap in which other calls need the memory. The second turn repeats the first and adds to it."""
    rng = random.Random(4)
    first = [rng.randrange(5, 500) for _ in range(140)]
    others = [[rng.randrange(5, 500) for _ in range(150)] for _ in range(4)]

    def conversation(core):
        core.add("turn1", first, 20, session="s", tool="search", tool_ms=1)
        core.drain()
        for index, prompt in enumerate(others):
            core.add(f"other{index}", prompt, 10)
        for _ in range(3):
            core.step()
        core.add("turn2", first + core.answers["turn1"] + [7, 8, 9], 20, session="s")
        return dict(core.drain())

    assert conversation(Core(llm, TidegateScheduler, policy="fcfs", hold=hold)) == conversation(Core(llm, Scheduler))


@pytest.mark.parametrize("scheduler", CLASSES)
@pytest.mark.parametrize("policy", ["fcfs", "urgency", "relquery"])
def test_each_choice_of_a_call_with_several_has_the_tokens_that_vllm_gives_it(llm, scheduler, policy):
    """vLLM makes one request of each choice. An abort of the call ends all of them."""

    def choices(core):
        free = core.free_blocks
        for name, prompt, output, labels in workload()[:6]:
            core.add(name, prompt, output, choices=3, **labels)
        for _ in range(8):
            core.step()
        assert len(core.scheduler.requests) == 18
        core.engine.abort_request(["c1", "c4"])
        assert len(core.scheduler.requests) == 12
        core.drain()
        core.scheduler.reset_prefix_cache()
        assert core.free_blocks == free
        return {key: tokens for key, tokens in core.choices.items() if key[0] not in ("c1", "c4")}

    expected = choices(Core(llm, Scheduler))
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected) == 12
    assert choices(Core(llm, scheduler, policy=policy)) == expected


@pytest.mark.parametrize("scheduler", CLASSES)
def test_calls_that_an_engine_keeps_while_it_sleeps_get_their_answers_after_it_wakes(llm, expected, scheduler):
    """A sleep of level 1 discards the KV cache: running calls compute their context again."""
    core = Core(llm, scheduler, policy="urgency", hold=session_hold.settings(0.5))
    free = core.free_blocks
    engine = core.engine.engine_core

    def sleep_and_wake(step):
        if step not in (9, 10, 20):
            return
        engine.sleep(level=1, mode="keep")
        assert engine.is_sleeping()
        assert core.free_blocks == free
        finished = len(core.answers)
        core.step()
        assert len(core.answers) == finished
        engine.wake_up()
        assert not engine.is_sleeping()

    assert served(core, workload(), sleep_and_wake) == expected
    assert core.free_blocks == free


@pytest.mark.parametrize("scheduler", CLASSES)
def test_a_sleep_that_aborts_leaves_an_engine_that_serves_new_calls(llm, expected, scheduler):
    core = Core(llm, scheduler, policy="relquery", hold=session_hold.settings(0.5))
    free = core.free_blocks
    for name, prompt, output, labels in workload():
        core.add(f"aborted {name}", prompt, output, **labels)
    for _ in range(5):
        core.step()
    core.engine.engine_core.sleep(level=1, mode="abort")
    assert core.free_blocks == free
    assert core.scheduler.get_num_unfinished_requests() == 0
    core.engine.abort_request([f"aborted {name}" for name, *_ in workload()])
    core.engine.engine_core.wake_up()
    core.answers.clear()
    assert served(core, workload()) == expected
    assert (core.scheduler.state().waiting, core.scheduler.state().running) == (0, 0)


ABSURD = {
    "urgency": -7,
    "budget_ms": "soon",
    "deadline_ms": float("nan"),
    "weight": 1e12,
    "out_pred": 0,
    "relquery": {"not": "a text"},
    "relquery_size": 1_000_000_000,
    "session": ["s"],
    "tool_ms": -5,
    "tool_return": 10_485_760,
    "invented": 1,
    "invented_too": 2,
}


def bad_labels():
    """The counter of labels without sense, by label."""
    (metric,) = [each for each in prometheus_client.REGISTRY.collect() if each.name == "tidegate_engine_bad_labels"]
    return {each.labels["label"]: each.value for each in metric.samples if each.name.endswith("_total")}


@pytest.mark.parametrize("scheduler", CLASSES)
def test_absurd_labels_get_defaults_and_each_is_counted_under_its_key(llm, scheduler):
    core = Core(llm, scheduler, policy="urgency", meter=meters.prometheus())
    before, prompt = bad_labels(), list(range(5, 40))
    core.add("absurd", prompt, tenant="acme", **ABSURD)
    core.add("plain", prompt, tenant="acme")
    core.step()
    absurd, plain = (core.scheduler._core.item(CallId(name)).call for name in sorted(core.scheduler.requests))
    for field in ("urgency", "due_at_s", "deadline_at_s", "weight", "group", "group_size", "session", "tool_s"):
        assert getattr(absurd, field) == getattr(plain, field), field
    assert (absurd.tool_return_tokens, absurd.output_predicted) == (0, plain.output_predicted)
    assert absurd.tenant == "acme", "a good label beside them counts"
    answers = core.drain()
    assert answers["absurd"] == answers["plain"]
    grown = {label: value - before.get(label, 0) for label, value in bad_labels().items()}
    expected = {f"tg.{key}": 1 for key in ABSURD if not key.startswith("invented")} | {"other": 2}
    assert {label: value for label, value in grown.items() if value} == expected
