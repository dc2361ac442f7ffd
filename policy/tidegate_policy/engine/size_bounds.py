"""Sizes that no call in the engine exceeds, so that a step needs to look at no call while all of them are small.

A bound rises at once. It falls late: after as many calls as the engine holds have come, it is found again.
"""

from collections.abc import Collection

from tidegate_policy.engine.known_call import KnownCall


class SizeBounds:
    """The bounds."""

    def __init__(self) -> None:
        self.context_tokens = 1
        """Tokens that a waiting call has to compute at its start: its prompt, and its output so far if it ran before."""
        self.output_tokens = 1
        """The output that is predicted for a call, or that the gateway bounds."""
        self._added = 0

    def add(self, known: KnownCall, calls: Collection[KnownCall]) -> None:
        """A call waits. `calls` are the calls in the engine."""
        self._added += 1
        if self._added > len(calls):
            self._added = self.context_tokens = self.output_tokens = 1
            for each in calls:
                self._raise(each)
        self._raise(known)

    def _raise(self, known: KnownCall) -> None:
        call = known.call
        self.context_tokens = max(self.context_tokens, call.prompt_tokens + known.output_tokens)
        self.output_tokens = max(self.output_tokens, call.output_predicted, call.output_upper)
