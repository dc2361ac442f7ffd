"""The content of a prompt for a simulated engine: runs of tokens by which its prefix cache finds equal prompts.

vLLM hashes blocks of 16 tokens. A simulated engine has no tokenizer, so a block is the text of 16 tokens of 4 characters,
or 16 token ids. The salt stands for what comes before the first token: the model, the client's `cache_salt`, the tools.
"""

from collections.abc import Hashable, Iterator

from tidegate_sim.engine_limits import BLOCK_TOKENS, Prefix

CHARACTERS_A_TOKEN = 4
_POSITIVE = 2**62 - 1


def of(prompt: str | list[int], salt: Hashable) -> Iterator[Prefix]:
    """The runs of a text or of token ids, found as they are read: an engine without a prefix cache reads none."""
    size = BLOCK_TOKENS if isinstance(prompt, list) else BLOCK_TOKENS * CHARACTERS_A_TOKEN
    for begin in range(0, len(prompt) - size + 1, size):
        block = prompt[begin : begin + size]
        content = block if isinstance(block, str) else tuple(block)
        yield hash((salt, content)) & _POSITIVE, BLOCK_TOKENS
