"""vLLM's engine core in this process with a random model, behind the interface of a virtual engine."""

import functools
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",  # on a busy machine two threads wait for each other in every kernel
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

import engine_setup
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched import scheduler as vllm_scheduler

from tidegate_engine import scheduler as schedulers
from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_sim import cell, engine_limits, virtual_engine, virtual_time

VOCABULARY, STOP = 2048, 0

CLOCKS = {"wall": time.monotonic, "cpu": time.process_time}


class RealTime(virtual_time.Loop):
    """The events of a cell at their instants on a clock of this machine. An event sees the instant at which it was due, so
    an arrival during a step counts from its own instant and not from the end of the step."""

    def __init__(self, clock: str) -> None:
        super().__init__()
        self.clock = CLOCKS[clock]
        self._begun_at_s = self.clock()

    def run(self) -> None:
        self._begun_at_s = self.clock()
        while self._due:
            ahead_s = self._due[0][0] - (self.clock() - self._begun_at_s)
            if ahead_s > 0 and self.clock is time.process_time:
                self._begun_at_s -= ahead_s  # an idle process uses no CPU time
            elif ahead_s > 0:
                time.sleep(ahead_s)
            self.run_next()

    def catch_up(self) -> None:
        """Sets the time of the cell to the present instant."""
        self._now_s = self.clock() - self._begun_at_s


class RealEngine:
    """vLLM's engine core with a new scheduler, behind the interface of a virtual engine."""

    def __init__(self, llm: LLM, row: cell.Row, cost: CostModel, clock: RealTime, listener: engine_limits.Listener):
        self.steps = self.queued = self.preemptions = 0
        self.busy_s = 0.0
        self.starts: dict[str, float] = {}
        self._row, self._cost, self._clock, self._listener = row, cost, clock, listener
        self._engine = llm.llm_engine
        core = self._engine.engine_core.engine_core
        before = core.scheduler
        before.vllm_config.scheduler_config.policy = row.engine_policy if row.stock_scheduler else "fcfs"
        kind: Any = vllm_scheduler.Scheduler
        if not row.stock_scheduler:
            kind = functools.partial(
                schedulers.TidegateScheduler, policy=row.engine_policy, cost=cost, learn_cost=True, clock=clock.clock
            )
        self.scheduler = core.scheduler = virtual_engine.in_place_of(before, kind)
        self._vllms_update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._update
        self._outputs: dict[str, list[int]] = {}
        self._produced: dict[str, int] = defaultdict(int)
        self._stepping = False

    def submit(self, call, output_tokens, prefixes=(), output_prefix=None) -> None:
        """Receives a call as the gateway would send it. Only this method knows that it produces `output_tokens`."""
        prompt = [token for prefix, tokens in prefixes for token in text(prefix, tokens)]
        prompt = (prompt + text(call.id, call.prompt_tokens))[: call.prompt_tokens]
        own = f"answer of {call.id}" if output_prefix is None else output_prefix
        self._outputs[call.id] = [*text(own, output_tokens)[:-1], STOP]
        params = SamplingParams(
            temperature=0,
            max_tokens=self._engine.model_config.max_model_len,
            ignore_eos=True,
            stop_token_ids=[STOP],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=labels.write(self._clock.now(), call),
        )
        priority = engine_limits.stock_priority(self._row.stock_key, call, self._cost)
        self._engine.add_request(call.id, {"prompt_token_ids": prompt}, params, priority=priority)
        if not self._stepping:
            self._stepping = True
            self._clock.after(0.0, self._step)

    def _step(self) -> None:
        self._clock.catch_up()
        outputs = self._engine.step()
        self._clock.catch_up()
        for output in outputs:
            name = output.request_id
            self._produced[name] += len(output.outputs[0].token_ids)
            if output.finished:
                self._listener.on_end(name)
            else:
                self._listener.on_tokens(name, self._produced[name])
        self._stepping = self.scheduler.has_requests()  # also true while the worker has yet to hear of an end
        if self._stepping:
            self._clock.after(0.0, self._step)

    def _update(self, output, model):
        """vLLM's `update_from_output` with the tokens of the trace in place of the model's."""
        self.steps += bool(output.total_num_scheduled_tokens)
        self.preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.starts.setdefault(called(new.req_id), self._clock.now())
        for index, name in enumerate(model.req_ids):
            if model.sampled_token_ids[index]:
                tokens = self._outputs[called(name)]
                model.sampled_token_ids[index] = [tokens[self.scheduler.requests[name].num_output_tokens]]
        return self._vllms_update(output, model)


def called(request_id: str) -> str:
    """Our id of a request. vLLM adds a random suffix."""
    return request_id.rsplit("-", 1)[0]


def text(name: object, tokens: int) -> list[int]:
    """The first tokens of an endless text of this name."""
    drawn = random.Random(f"text {name}")
    return [drawn.randrange(STOP + 1, VOCABULARY) for _ in range(tokens)]


def answer_of(tokens: int, labels: dict[str, Any] | None = None) -> SamplingParams:
    """The model's own greedy answer of exactly so many tokens."""
    return SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=labels,
    )


def model(setup: engine_setup.Setup, more: Mapping[str, Any]) -> LLM:
    """The model with vLLM's executor, worker, model runner and KV cache."""
    return LLM(
        model=str(setup.checkpoint()),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=setup.dtype,
        max_model_len=setup.model_length,
        num_gpu_blocks_override=setup.blocks,
        block_size=setup.block,
        max_num_seqs=setup.sequences,
        max_num_batched_tokens=setup.step_tokens,
        seed=1,
        disable_log_stats=True,
        **{**setup.options, **more},
    )
