"""What computes the steps: a model with random weights, and the limits of its engine."""

import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate_engine import checkpoints
from tidegate_policy.cost import CostModel

LLAMA_8B = checkpoints.DUMMY_CONFIG | {
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
"""The shape of Llama-3.1-8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model and the limits of its engine."""

    checkpoint: Callable[[], pathlib.Path]
    dtype: str
    block: int
    """Tokens of a KV block."""
    blocks: int
    sequences: int
    step_tokens: int
    model_length: int
    short_texts: bool = True
    """Whether texts are shorter than in the suites."""
    tool_factor: float = 0.01
    """Seconds of a tool over those in the suite."""
    first_cost: CostModel
    """The cost model of the first run of a case, which refines it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


def _llama_8b() -> pathlib.Path:
    target = pathlib.Path(tempfile.mkdtemp(prefix="llama-8b-"))
    (target / "config.json").write_text(json.dumps(LLAMA_8B, indent=2))
    return target


def saturated(setup: Setup) -> Setup:
    """The engine with vLLM's own batch and, on a GPU, with vLLM's scheduling ahead of the device."""
    if setup is SETUPS["cpu"]:
        return setup
    return replace(setup, sequences=256, options={**setup.options, "async_scheduling": True})


SETUPS = {
    "cpu": Setup(
        checkpoint=checkpoints.dummy,
        dtype="float32",
        block=32,
        blocks=129,
        sequences=8,
        step_tokens=256,
        model_length=1024,
        first_cost=CostModel(
            step_s=0.008, prefill_s=1e-4, decode_s=3e-4, kv_tokens=128 * 32, max_batch=8, max_step_tokens=256
        ),
        options={"enforce_eager": True},
    ),
    # A card with little memory for KV and a batch of 32, so that calls wait and are preempted within seconds.
    "gpu": Setup(
        checkpoint=_llama_8b,
        dtype="bfloat16",
        block=16,
        blocks=4097,
        sequences=32,
        step_tokens=2048,
        model_length=16384,
        short_texts=False,
        tool_factor=0.2,
        first_cost=CostModel(
            step_s=0.007,
            prefill_s=3e-5,
            decode_s=1.5e-5,
            kv_tokens=4096 * 16,
            max_batch=32,
            max_step_tokens=2048,
        ),
        options={
            "async_scheduling": False,  # the tokens of a step are replaced before the next one is scheduled
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "gpu_memory_utilization": 0.8,
        },
    ),
}
