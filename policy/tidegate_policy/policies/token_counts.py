"""The tokens of each call, counted at little cost in each step.

In most steps almost every call gets one output token. Such calls are counted by one pass in C, and only the others are
looked at one by one. The engine core and the policies derive work from the counts when they need it, not in each step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, repeat

from tidegate_policy.model import CallId
from tidegate_policy.policies.policy_contract import ONE_OUTPUT, Computed


class TokenCounts:
    """Tokens by call."""

    def __init__(self) -> None:
        self._outputs: Counter[CallId] = Counter()
        """The calls that got output tokens, in the order of their first one."""
        self._prompts: dict[CallId, int] = {}
        self._newest = 0
        """The number of calls to which the last step gave their first output token."""

    def add(self, computed: Mapping[CallId, Computed]) -> list[CallId]:
        """The tokens of a step; returns the calls that got other tokens than one output token."""
        outputs = self._outputs
        before = len(outputs)
        outputs.update(computed.keys())
        others = [call_id for call_id, tokens in computed.items() if tokens is not ONE_OUTPUT and tokens != ONE_OUTPUT]
        for call_id in others:
            prompt_tokens, output_tokens = computed[call_id]
            outputs[call_id] += output_tokens - 1
            if not outputs[call_id]:
                del outputs[call_id]
            if prompt_tokens:
                self._prompts[call_id] = self._prompts.get(call_id, 0) + prompt_tokens
        self._newest = len(outputs) - before
        return others

    def newest(self) -> list[CallId]:
        """The calls to which the last step gave their first output token. Call it before any call is forgotten."""
        return list(islice(reversed(self._outputs), self._newest))[::-1]

    def of(self, call_id: CallId) -> Computed:
        """All tokens of a call."""
        return Computed(self._prompts.get(call_id, 0), self._outputs.get(call_id, 0))

    def outputs(self, call_id: CallId) -> int:
        return self._outputs.get(call_id, 0)

    def outputs_of(self, call_ids: Iterable[CallId]) -> Iterator[int]:
        """`outputs` of each of these calls."""
        return map(self._outputs.get, call_ids, repeat(0))

    def prompts(self, call_id: CallId) -> int:
        return self._prompts.get(call_id, 0)

    def forget(self, call_id: CallId) -> None:
        self._outputs.pop(call_id, None)
        self._prompts.pop(call_id, None)

    def __iter__(self) -> Iterator[CallId]:
        """The calls that got tokens; some come twice."""
        return chain(self._outputs, self._prompts)
