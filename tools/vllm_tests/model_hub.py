"""The part of a model hub's cache that vLLM's scheduler tests read: configurations without weights.

The tests name models only to have their sizes and kinds. A configuration with the defaults of its class serves as well. The
model with images has a tokenizer of numbered words too, because vLLM computes from it how many tokens an image takes.
"""

import json
import pathlib
import struct

import tokenizers
import transformers

REVISION = "0" * 40
IMAGE_MODEL = "llava-hf/llava-1.5-7b-hf"
MODELS = {
    "facebook/opt-125m": (transformers.OPTConfig, "OPTForCausalLM"),
    "facebook/opt-350m": (transformers.OPTConfig, "OPTForCausalLM"),
    "Qwen/Qwen2.5-VL-3B-Instruct": (transformers.OPTConfig, "OPTForCausalLM"),  # a test that sends texts only
    "Qwen/Qwen3-0.6B": (transformers.Qwen3Config, "Qwen3ForCausalLM"),
    IMAGE_MODEL: (transformers.LlavaConfig, "LlavaForConditionalGeneration"),
}
WORDS = 32_000
NO_TENSORS = b"{}"


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the cache, unless it is there. Returns the folder, for HF_HOME."""
    for name, (config_class, architecture) in MODELS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / REVISION
        if (model / "refs" / "main").exists():
            continue
        snapshot.mkdir(parents=True, exist_ok=True)
        config = config_class()
        config.architectures = [architecture]
        config.save_pretrained(snapshot)
        written = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps({**written, "dtype": "float16"}))
        (snapshot / "model.safetensors").write_bytes(struct.pack("<Q", len(NO_TENSORS)) + NO_TENSORS)
        if name == IMAGE_MODEL:
            _write_processor(snapshot)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(REVISION)
    return folder


def _write_processor(snapshot: pathlib.Path) -> None:
    """The tokenizer and the image processor of the model with images."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"t{number}": number for number in range(3, WORDS)}}
    words |= {"<image>": WORDS, "<pad>": WORDS + 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    tokenizer.save_pretrained(snapshot)
    made = {
        "tokenizer_config.json": {
            **json.loads((snapshot / "tokenizer_config.json").read_text()),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "LlavaProcessor",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor", "resample": 3,
            "crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336},
            "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 14,
            "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
        },
    }  # fmt: skip
    for name, content in made.items():
        (snapshot / name).write_text(json.dumps(content))
