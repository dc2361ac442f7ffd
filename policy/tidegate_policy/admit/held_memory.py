"""How much KV memory do the calls of a tenant take at engines, in the mean over their time there?

A call holds the tokens of its prompt, and half of its answer in the mean. Calls whose prompts begin alike share the memory
of the blocks that they have in common (`prompt_blocks`), so each of these counts once. The count assumes one engine: it is
too low for calls at several engines, which share less.
"""

from dataclasses import dataclass, field

from tidegate_policy.model import Call, CallId


def tokens_of(call: Call) -> int:
    """KV tokens that the call takes if it shares none, in the mean."""
    return call.prompt_tokens + call.sequences * call.output_predicted // 2


@dataclass(slots=True)
class HeldMemory:
    """The KV memory of the calls of one tenant, in whole tokens, so that it returns to exactly zero."""

    tokens: int = 0
    _own: dict[CallId, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Of each call the tokens that it shares with no other one, and the blocks that it may share."""
    _blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each block the calls that have it, and its tokens."""

    def add(self, call: Call) -> int:
        """The call enters; returns the tokens that it adds. Takes time in proportion to its blocks."""
        before, each = self.tokens, round(call.block_tokens)
        if call.id in self._own:
            self.remove(call.id)
        own = max(tokens_of(call) - each * len(call.blocks), 0)
        self._own[call.id] = own, call.blocks
        self.tokens += own
        blocks = self._blocks
        for block in call.blocks:
            calls, tokens = blocks.get(block, (0, each))
            blocks[block] = calls + 1, tokens
            if not calls:
                self.tokens += tokens
        return self.tokens - before

    def remove(self, call: CallId) -> int:
        """The call leaves; returns the tokens that it frees."""
        before = self.tokens
        own, shared = self._own.pop(call, (0, ()))
        self.tokens -= own
        blocks = self._blocks
        for block in shared:
            calls, tokens = blocks[block]
            if calls > 1:
                blocks[block] = calls - 1, tokens
            else:
                del blocks[block]
                self.tokens -= tokens
        return before - self.tokens
