"""The size of a dense decoder model by its Hugging Face `config.json`.

Models with experts, or with other caches than keys and values of each head, are refused: the roofline is for dense models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GATED = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Types of models whose blocks are attention and a gated MLP, so that the parameters can be counted."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
OTHER_CACHES = ("kv_lora_rank", "ssm_cfg", "mamba_d_state", "linear_num_key_heads")
KV_BYTES = 2
"""Of one number in the KV cache."""
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
}


class UnknownSize(ValueError):
    """The configuration does not tell the size; the message says what to give by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    parameters: float
    layers: int
    hidden: int
    kv_bytes_a_token: float
    """On all cards together."""


def of_config(config: Mapping[str, Any], *, cards: int, parameters: float | None = None) -> ModelSize:
    """The size of a model on `cards` cards. `parameters` is their number where the configuration does not tell it. Raises
    `UnknownSize`."""
    text = config.get("text_config")
    if isinstance(text, dict):
        if parameters is None:
            raise UnknownSize(
                "the model has more parts than its text_config: give the number of parameters (--parameters)"
            )
        config = text
    for name in EXPERTS:
        if isinstance(config.get(name), int) and config[name] > 1:
            raise UnknownSize("the model has experts, and the estimate is for dense models; measure an engine (--url)")
    for name in OTHER_CACHES:
        if config.get(name) is not None:
            raise UnknownSize(f"the model's cache ({name}) is not one of keys and values; measure an engine (--url)")
    layers, hidden, heads = (_count(config, names) for names in _NAMES.values())
    kv_heads = _count(config, ("num_key_value_heads",), default=heads)
    head = _count(config, ("head_dim",), default=hidden // heads)
    counted = (
        _parameters(config, layers, hidden, (2 * heads + 2 * kv_heads) * head) if parameters is None else parameters
    )
    # More cards than KV heads: each card has a copy of one.
    return ModelSize(
        parameters=counted,
        layers=layers,
        hidden=hidden,
        kv_bytes_a_token=2 * layers * max(kv_heads, cards) * head * KV_BYTES,
    )


def weight_bytes(config: Mapping[str, Any]) -> float:
    """The bytes of a parameter. Raises `UnknownSize`."""
    if config.get("quantization_config") is not None:
        raise UnknownSize("the weights are quantised: give the bytes of a parameter, such as --weight-bytes 1")
    kind = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    known = {"bfloat16": 2.0, "float16": 2.0, "float32": 2.0}  # vLLM serves float32 weights in 16 bits
    if kind not in known:
        raise UnknownSize(f"the weights are {kind}: give the bytes of a parameter, such as --weight-bytes 1")
    return known[kind]


def _parameters(config: Mapping[str, Any], layers: int, hidden: int, attention: int) -> float:
    """`attention` is the width of all projections of a layer together."""
    if "model_type" not in config:
        raise UnknownSize("the file has no model_type, so it may be no model's config.json: give --parameters")
    kind = str(config["model_type"])
    if kind not in GATED:
        raise UnknownSize(f"the parameters of a model of type {kind!r} are not counted here: give --parameters")
    inner, vocabulary = _count(config, ("intermediate_size",)), _count(config, ("vocab_size",))
    tied = config.get("tie_word_embeddings", kind.startswith("gemma"))  # the defaults of these types
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return float(embeddings + layers * (hidden * attention + 3 * hidden * inner))


def _count(config: Mapping[str, Any], names: tuple[str, ...], *, default: int | None = None) -> int:
    found = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 10**9:
        raise UnknownSize(f"config.json has no usable {names[0]}: it is {found!r}")
    return found
