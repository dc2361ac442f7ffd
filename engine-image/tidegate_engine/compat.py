"""Checks that the installed vLLM has every attribute that Tidegate's scheduler uses.

vLLM declares its scheduler interface non-public. This module names every attribute of vLLM that the scheduler uses. When a
release moves one of them, the contract test fails first, and an engine rejects Tidegate's scheduler with a sentence at
start instead of failing in the middle of a step. `plugin` calls `problem` once, before it builds the scheduler.
"""

import importlib
import inspect
import re
from dataclasses import dataclass

TESTED = ("0.31", "0.32")
"""The versions of vLLM that run, the pinned one last. `docs/operations.md` states what was tested on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """The attributes of one vLLM class that the package uses."""

    module: str
    name: str
    members: tuple[str, ...] = ()
    """Methods, properties and enum members: found on the class."""
    fields: tuple[str, ...] = ()
    """Instance attributes: set in `__init__`, or fields of the dataclass."""


TOUCHED = (
    Touched(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler",
        members=(
            "schedule",
            "add_request",
            "update_from_output",
            "finish_requests",
            "reset_prefix_cache",
            "shutdown",
            "get_kv_cache_usage",
            "_free_request",
            "_free_blocks",
            "_enqueue_waiting_request",
            "_handle_stopped_request",
            "_preempt_request",
            "_request_blocks_can_be_freed",
            "_update_request_as_session",
            "_is_blocked_waiting_status",
            "pause_state",
        ),
        fields=(
            "waiting",
            "kv_holding_waiting",
            "running",
            "requests",
            "policy",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "max_model_len",
            "block_size",
            "kv_cache_config",
            "num_spec_tokens",
            "num_prefill_lookahead",
            "max_num_encoder_input_tokens",
            "adaptive_long_prefill_threshold",
            "num_waiting_for_streaming_input",
            "need_mamba_block_aligned_split",
            "prev_step_scheduled_req_ids",
            "finished_recving_kv_req_ids",
            "lora_config",
            "scheduler_config",
            "kv_cache_manager",
            "current_step",
        ),
    ),
    Touched(module="vllm.v1.core.sched.async_scheduler", name="AsyncScheduler"),
    Touched(module="vllm.v1.core.sched.interface", name="SchedulerInterface"),
    Touched(module="vllm.v1.core.sched.interface", name="PauseState", members=("UNPAUSED", "PAUSED_ALL")),
    Touched(
        module="vllm.config",
        name="SchedulerConfig",
        members=("get_scheduler_cls",),
        fields=(
            "async_scheduling",
            "disable_chunked_mm_input",
            "enable_chunked_prefill",
            "long_prefill_token_threshold",
            "policy",
            "scheduler_cls",
        ),
    ),
    Touched(module="vllm.config", name="VllmConfig", fields=("scheduler_config", "parallel_config")),
    Touched(module="vllm.config", name="ParallelConfig", fields=("data_parallel_rank_local",)),
    Touched(module="vllm.sampling_params", name="SamplingParams", fields=("extra_args",)),
    Touched(
        module="vllm.v1.core.sched.request_queue",
        name="RequestQueue",
        members=(
            "add_request",
            "pop_request",
            "peek_request",
            "prepend_request",
            "prepend_requests",
            "remove_request",
            "remove_requests",
            "__bool__",
            "__len__",
            "__iter__",
        ),
    ),
    Touched(module="vllm.v1.core.sched.request_queue", name="SchedulingPolicy", members=("FCFS", "PRIORITY")),
    Touched(
        module="vllm.v1.core.sched.output",
        name="SchedulerOutput",
        fields=(
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "scheduled_spec_decode_tokens",
        ),
    ),
    Touched(module="vllm.v1.core.sched.output", name="NewRequestData", fields=("req_id",)),
    Touched(module="vllm.v1.core.sched.output", name="CachedRequestData", fields=("resumed_req_ids",)),
    Touched(
        module="vllm.v1.core.kv_cache_manager",
        name="KVCacheManager",
        members=("allocate_slots", "get_blocks", "prefix_cache_lookup_enabled"),
        fields=("block_pool", "coordinator"),
    ),
    Touched(module="vllm.v1.core.kv_cache_manager", name="KVCacheBlocks", fields=("blocks",)),
    Touched(module="vllm.v1.core.kv_cache_coordinator", name="KVCacheCoordinator", members=("find_longest_cache_hit",)),
    Touched(
        module="vllm.v1.core.block_pool",
        name="BlockPool",
        members=("touch", "free_blocks", "get_num_free_blocks"),
        fields=("num_gpu_blocks",),
    ),
    Touched(
        module="vllm.v1.core.kv_cache_utils",
        name="KVCacheBlock",
        members=("block_hash",),
        fields=("is_null", "ref_cnt"),
    ),
    Touched(
        module="vllm.v1.request",
        name="Request",
        members=("is_finished", "num_output_tokens", "num_tokens"),
        fields=(
            "request_id",
            "arrival_time",
            "priority",
            "status",
            "sampling_params",
            "max_tokens",
            "num_prompt_tokens",
            "num_computed_tokens",
            "block_hashes",
            "next_decode_eligible_step",
            "num_stale_output_tokens",
            "drop_stale_output",
            "structured_output_request",
            "lora_request",
        ),
    ),
    Touched(
        module="vllm.v1.request",
        name="RequestStatus",
        members=(
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
            "FINISHED_REPETITION",
            "RUNNING",
            "WAITING_FOR_REMOTE_KVS",
            "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        ),
    ),
    Touched(module="vllm.v1.request", name="StreamingUpdate"),
    Touched(
        module="vllm.v1.structured_output.request",
        name="StructuredOutputRequest",
        members=("grammar",),
        fields=("_grammar",),
    ),
    Touched(module="vllm.v1.kv_cache_interface", name="KVCacheConfig", fields=("num_blocks", "kv_cache_tensors")),
    Touched(module="vllm.v1.kv_cache_interface", name="KVCacheTensor", fields=("size",)),
    Touched(module="vllm.distributed.kv_transfer.kv_connector.v1", name="KVConnectorRole", members=("SCHEDULER",)),
    Touched(module="vllm.v1.engine", name="EngineCoreOutputs", fields=("outputs",)),
    Touched(module="vllm.v1.engine", name="EngineCoreOutput", fields=("request_id", "new_token_ids")),
)


def problem() -> str | None:
    """The reason why Tidegate's scheduler cannot run in the installed vLLM, in one sentence; None when it can."""
    try:
        version = importlib.import_module("vllm").__version__
    except ImportError as error:
        return f"vLLM cannot be imported: {error}"
    if release_of(version) not in TESTED:
        return f"vLLM {version} is not one that Tidegate is tested with ({', '.join(TESTED)})"
    absent = missing()
    return f"this vLLM lacks {', '.join(absent)}, which Tidegate's scheduler needs" if absent else None


def release_of(version: str) -> str:
    """Major and minor number of a version such as `0.32.0+cpu`, or the text itself if it has none."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def missing() -> list[str]:
    """Every name in `TOUCHED` that the installed vLLM lacks."""
    absent: list[str] = []
    for touched in TOUCHED:
        where = f"{touched.module}.{touched.name}"
        owner = getattr(importlib.import_module(touched.module), touched.name, None)
        if owner is None:
            absent.append(where)
            continue
        absent += [f"{where}.{name}" for name in touched.members if not hasattr(owner, name)]
        present = _fields(owner)
        absent += [f"{where}.{name}" for name in touched.fields if name not in present]
    return absent


def _fields(owner: type) -> set[str]:
    """The names of instance attributes: annotated, or assigned in `__init__`."""
    annotated = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    code = getattr(inspect.getattr_static(owner, "__init__"), "__code__", None)
    return annotated | {*getattr(owner, "__struct_fields__", ())} | {*(code.co_names if code else ())}
