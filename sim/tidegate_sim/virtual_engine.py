"""One engine in virtual time: vLLM's scheduler and KV-cache manager as they are, a cost model in place of the model. It
is one file because it alone imports vLLM.

The scheduler is the class that production loads with `--scheduler-cls` (`tidegate_engine.scheduler`), fed with the same
labels. Only the forward pass is replaced: a step lasts as long as the cost model says, and each request whose tokens
are all computed gets one more token. The scheduler never sees the true length of an output; an output ends by a stop token.

Modelled: step time, KV capacity, batch limits. Not modelled: the network, tokenisation, async scheduling's overlap.
"""

import functools
import hashlib
import json
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tidegate_control import control_contract
from tidegate_engine import scheduler as schedulers
from tidegate_policy import labels
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import regulators as engine_regulators
from tidegate_policy.engine import session_hold
from tidegate_policy.model import Call, CallId
from tidegate_sim import virtual_time
from tidegate_sim.engine_limits import (
    BLOCK_TOKENS,
    MAX_MODEL_LEN,
    MAX_OUTPUT_TOKENS,
    EngineLoad,
    Listener,
    Prefix,
    StockKey,
    kv_blocks,
    stock_priority,
)

STOP, WORD = 0, 1
"""The two output tokens; prompts are made of greater numbers."""
_FIRST_PROMPT_TOKEN = 2


class VirtualEngine:
    """Calls go in, tokens come out, in virtual time."""

    def __init__(
        self,
        clock: virtual_time.Loop,
        cost: CostModel,
        *,
        policy: str,
        listener: Listener,
        stock: bool = False,
        prefix_cache: bool = True,
        regulators: Sequence[str] = (),
        stock_key: StockKey = "latest-start",
        prefill_first: bool = False,
        hold: session_hold.Settings | None = None,
    ) -> None:
        """`stock` runs vLLM's own scheduler class with its own policy, `fcfs` or `priority`, instead of Tidegate's."""
        self.cost = cost
        self.steps = 0
        self.busy_s = 0.0
        self.queued = 0
        """Calls that did not start at the first step after their arrival."""
        self._loop = clock
        self._listener = listener
        self._ends: dict[str, int] = {}
        self._words: dict[str, int] = {}
        """The output tokens of calls whose output later prompts repeat."""
        self._fresh: set[str] = set()
        """Calls that arrived since the last step."""
        self._stepping = False
        self.preemptions = 0
        self.starts: dict[CallId, float] = {}
        """The start of the first step of each call; the reader removes what it has read."""
        self._stock_key = stock_key
        self._prefill_first = prefill_first
        self._stock = stock
        if stock:
            self._scheduler = build(Scheduler, cost, scheduling=policy, prefix_cache=prefix_cache)
        else:
            ours = functools.partial(
                schedulers.TidegateScheduler,
                cost=cost,
                policy=policy,
                clock=clock.now,
                regulators=engine_regulators.create(regulators),
                hold=hold,
            )
            self._scheduler = build(ours, cost, prefix_cache=prefix_cache)

    def load(self) -> EngineLoad:
        """As vLLM's metrics report it."""
        scheduler = self._scheduler
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_cache_manager.usage,
        )

    def watch(self) -> control_contract.Watch:
        """The engine's QoS windows, as its control server would report them. Raises `NotControllable` for `stock`."""
        if self._stock:
            raise control_contract.NotControllable("vLLM's own scheduler class runs in this row")
        watch: control_contract.Watch = self._scheduler.watch()
        return watch

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float], *, bypass: bool = False) -> None:
        """As SetPolicy of EngineControl. Raises `NotControllable` for `stock`."""
        if self._stock:
            raise control_contract.NotControllable("vLLM's own scheduler class runs in this row")
        self._scheduler.set_policy(name, reason, parameters, bypass=bypass)

    def submit(
        self, call: Call, output_tokens: int, prefixes: Sequence[Prefix] = (), output_prefix: int | None = None
    ) -> None:
        """Receives a call as the gateway would send it. Only this method knows that it produces `output_tokens`.

        `output_prefix` is the id by which the prefixes of later calls name this call's output."""
        sent = labels.write(self._loop.now(), call)
        self._ends[call.id] = output_tokens
        if output_prefix is not None:
            self._words[call.id] = prefix_token(output_prefix)
        self._fresh.add(call.id)
        priority = stock_priority(self._stock_key, call, self.cost)
        now = self._loop.now()
        arriving = request(call.id, call.prompt_tokens, sent, prefixes, priority=priority, arrived_at_s=now)
        self._scheduler.add_request(arriving)
        if not self._stepping:
            self._stepping = True
            self._loop.after(0.0, self._step)

    def _step(self) -> None:
        output = self._schedule()
        while not output.total_num_scheduled_tokens:
            self.preemptions += len(output.preempted_req_ids or ())
            self._scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
            if not output.preempted_req_ids:
                self._stepping = False
                return
            output = self._schedule()  # the blocks of the preempted requests are free now
        self.preemptions += len(output.preempted_req_ids or ())
        now = self._loop.now()
        self.starts.update((CallId(new.req_id), now) for new in output.scheduled_new_reqs)
        self.queued += sum(new.req_id not in self._fresh for new in output.scheduled_new_reqs)
        self._fresh.clear()
        seconds = step_seconds(self.cost, output, self._scheduler.requests)
        self.steps += 1
        self.busy_s += seconds
        produced = producing(output, self._scheduler.requests)
        self._loop.after(seconds, functools.partial(self._finish, output, produced))

    def _schedule(self) -> SchedulerOutput:
        """The next step; with `prefill_first` without decodes, unless no prefill can run."""
        scheduler = self._scheduler
        if not self._prefill_first:
            return scheduler.schedule()
        decoding = [running for running in scheduler.running if not running.is_prefill_chunk]
        for running in decoding:
            running.next_decode_eligible_step = scheduler.current_step + 2
        output = scheduler.schedule()
        for running in decoding:
            running.next_decode_eligible_step = 0
        if output.total_num_scheduled_tokens:
            return output
        scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
        return scheduler.schedule()

    def _finish(self, output: SchedulerOutput, produced: Sequence[str]) -> None:
        made_up = forward(output, produced, self._scheduler.requests, self._ends, self._words)
        for batch in self._scheduler.update_from_output(output, made_up).values():
            for result in batch.outputs:
                self._tell(CallId(result.request_id), ended=result.finish_reason is not None)
        self._step()

    def _tell(self, call_id: CallId, *, ended: bool) -> None:
        if ended:
            del self._ends[call_id]
            self._words.pop(call_id, None)
            self._listener.on_end(call_id)
        else:
            self._listener.on_tokens(call_id, self._scheduler.requests[call_id].num_output_tokens)


def in_place_of(before: Scheduler, kind: Callable[..., Scheduler], **more: Any) -> Scheduler:
    """A scheduler made by `kind` with the configuration of another, for an engine core that exchanges its scheduler."""
    return kind(
        vllm_config=before.vllm_config,
        kv_cache_config=before.kv_cache_config,
        structured_output_manager=before.structured_output_manager,
        include_finished_set=False,
        log_stats=False,
        block_size=before.block_size,
        hash_block_size=before.hash_block_size,
        **more,
    )


def step_seconds(cost: CostModel, output: SchedulerOutput, requests: Mapping[str, Request]) -> float:
    """The seconds of a step, by the work that the plugin reports for it."""
    work = schedulers.step_work(output, requests)
    return cost.step_seconds(uncached=work.uncached, attended=work.attended, decodes=work.decodes, context=work.context)


def producing(output: SchedulerOutput, requests: Mapping[str, Request]) -> list[str]:
    """The requests that get a token from this step. Call it right after `schedule`, because vLLM may schedule ahead."""
    return [request_id for request_id in output.num_scheduled_tokens if not requests[request_id].is_prefill_chunk]


def forward(
    output: SchedulerOutput,
    produced: Sequence[str],
    requests: Mapping[str, Request],
    ends: Mapping[str, int],
    words: Mapping[str, int] = types.MappingProxyType({}),
) -> ModelRunnerOutput:
    """The output of a model: a token for each request in `produced`, `STOP` when the request then has `ends` tokens.

    `words` holds the output tokens of requests whose token is not `WORD`."""
    sampled: dict[str, list[int]] = {request_id: [] for request_id in output.num_scheduled_tokens}
    for request_id in produced:
        if request_id in requests:
            last = requests[request_id].num_output_tokens + 1 >= ends[request_id]
            sampled[request_id] = [STOP if last else words.get(request_id, WORD)]
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
    )


def request(
    request_id: str,
    prompt_tokens: int,
    sent: Mapping[str, labels.Label],
    prefixes: Sequence[Prefix] = (),
    *,
    priority: int = 0,
    arrived_at_s: float = 0.0,
) -> Request:
    """A vLLM request with a prompt of its own, except for the parts that `prefixes` name."""
    prompt: list[int] = []
    for prefix_id, tokens in prefixes:
        prompt += [prefix_token(prefix_id)] * tokens
    digest = hashlib.blake2b(request_id.encode(), digest_size=7).digest()
    own = _FIRST_PROMPT_TOKEN + 1 + 2 * int.from_bytes(digest)
    prompt = (prompt + [own] * prompt_tokens)[:prompt_tokens]
    params = SamplingParams(max_tokens=MAX_OUTPUT_TOKENS, stop_token_ids=[STOP], extra_args=dict(sent))
    return Request(
        request_id, prompt, params, None, arrival_time=arrived_at_s, priority=priority, block_hasher=_block_hasher()
    )


def prefix_token(prefix_id: int) -> int:
    """The token of which a shared part of a prompt consists."""
    return _FIRST_PROMPT_TOKEN + 2 * prefix_id


def build(
    scheduler_class: Callable[..., Any],
    limits: CostModel,
    *,
    scheduling: str = "priority",
    prefix_cache: bool = True,
    **ours: Any,
) -> Any:
    """A scheduler of a given class, vLLM's or Tidegate's, with the KV capacity and batch limits of a cost model. Every row
    of a comparison is built here, so base class, limits, KV size and prefix cache are equal by construction."""
    config = _vllm_config(limits.max_batch, limits.max_step_tokens, scheduling, prefix_cache)
    blocks = kv_blocks(limits.kv_tokens)
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)])
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        **ours,
    )


def _vllm_config(max_batch: int, max_step_tokens: int, scheduling: str, prefix_cache: bool) -> VllmConfig:
    model = _model_config()
    return VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_step_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            policy=scheduling,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_cache),
        device_config=DeviceConfig(device="cpu"),
    )


@functools.cache
def _model_config() -> ModelConfig:
    """A model configuration without weights. The scheduler reads its length limit and little else."""
    stand_in = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(stand_in))
        return ModelConfig(model=directory, tokenizer=directory, skip_tokenizer_init=True, dtype="bfloat16", seed=0)


@functools.cache
def _block_hasher() -> Callable[[Request], list[Any]]:
    hash_function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_function)
    hasher: Callable[[Request], list[Any]] = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, hash_function)
    return hasher
