"""The output length of a call about which the engine knows nothing.

It is the mean of the outputs that the engine has seen. A client's `max_tokens` only bounds it, because a prediction of
`max_tokens` would say nothing of the call, and a client could choose it to gain the better place.
"""

from tidegate_policy.predict import output_length

NEWEST_WEIGHT = 0.01
"""Weight of the newest output once a hundred are known."""


class OutputPrior:
    """The mean output length of finished calls."""

    def __init__(self) -> None:
        self._mean = output_length.DEFAULT_OUTPUT_TOKENS
        self._seen = 0

    @property
    def tokens(self) -> int:
        return max(round(self._mean), 1)

    def observe(self, output_tokens: int) -> None:
        """A call finished with `output_tokens`."""
        self._seen += 1
        self._mean += max(NEWEST_WEIGHT, 1 / (self._seen + 1)) * (output_tokens - self._mean)
