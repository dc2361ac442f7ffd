"""The tokens of each call, counted at little cost in each step.

In most steps almost every call gets one output token. Such calls are counted by one pass in C, and only the others are
looked at one by one. Policies derive work from the counts when they need it, not in each step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from tidegate_policy.model import CallId
from tidegate_policy.policies.policy_contract import Computed

_ONE_OUTPUT = (0, 1)
_NONE = Computed()


class TokenCounts:
    """Tokens by call."""

    def __init__(self) -> None:
        self._outputs: Counter[CallId] = Counter()
        self._prompts: dict[CallId, int] = {}

    def add(self, computed: Mapping[CallId, Computed]) -> list[CallId]:
        """The tokens of a step; returns the calls that got other tokens than one output token."""
        self._outputs.update(computed.keys())
        others = [row for row in computed.items() if row[1] != _ONE_OUTPUT]
        for call_id, tokens in others:
            self._outputs[call_id] += tokens.output_tokens - 1
            if tokens.prompt_tokens:
                self._prompts[call_id] = self._prompts.get(call_id, 0) + tokens.prompt_tokens
        return [call_id for call_id, _ in others]

    def of(self, call_id: CallId) -> Computed:
        """All tokens of a call."""
        output_tokens = self._outputs.get(call_id)
        return _NONE if output_tokens is None else Computed(self._prompts.get(call_id, 0), output_tokens)

    def outputs(self, call_id: CallId) -> int:
        return self._outputs.get(call_id, 0)

    def prompts(self, call_id: CallId) -> int:
        return self._prompts.get(call_id, 0)

    def forget(self, call_id: CallId) -> None:
        self._outputs.pop(call_id, None)
        self._prompts.pop(call_id, None)

    def __iter__(self) -> Iterator[CallId]:
        """The calls that got tokens."""
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)
