"""The errors of relQueries: rows that have no result, a gateway that stays away, and an id that is taken."""

import time

import openai

RESUME_S = 60.0
"""For so long a relQuery waits for a gateway that answered before, such as one that restarts."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 5.0
AWAY = frozenset({502, 503, 504})
"""Answers of a gateway that stops or starts, or of a proxy in front of it."""


class RelQueryIncomplete(openai.OpenAIError):
    """The relQuery ended before each row had a result: it expired, was cancelled, or failed."""

    def __init__(self, id: str, status: str, *, missing: int, total: int) -> None:
        self.id, self.status, self.missing, self.total = id, status, missing, total
        rows = "1 row has" if missing == 1 else f"{missing} rows have"
        reason = {
            "expired": "it reached its deadline",
            "cancelled": "a request cancelled it",
            "failed": "its results have more bytes than relqueries.resultBytes of the gateway allows",
        }.get(status, "its results are no longer complete")
        super().__init__(
            f"relQuery {id!r} ended as {status} ({reason}), and {rows} no result, of {total}; ask these again under"
            " another id"
        )


class Patience:
    """Says how long to wait before the next attempt to read a relQuery, and when to give up."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._address = address
        self._since_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def answered(self) -> None:
        self._since_s, self._pause_s = None, FIRST_PAUSE_S

    def pause_s(self, error: openai.APIError) -> float:
        """Seconds until the next attempt. Raises the error with its explanation if there is none."""
        now = time.monotonic()
        self._since_s = now if self._since_s is None else self._since_s
        if not _is_away(error) or now >= self._since_s + RESUME_S:
            raise explained(error, self._name, self._address) from error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MOST_PAUSE_S)
        return pause_s


def explained(error: openai.APIError, name: str, address: str) -> openai.APIError:
    """The same error in the words of this package's arguments, where it knows better ones."""
    resume = f"run the same relquery with id={name!r} again to go on; no row is asked twice"
    if isinstance(error, openai.APIConnectionError):
        sentence = f"the gateway at {address} cannot be reached: {error.__cause__ or error}; {resume}"
        return openai.APIConnectionError(message=sentence, request=error.request)
    if isinstance(error, openai.UnprocessableEntityError) and error.code == "idempotency_key_reused":
        sentence = (
            f"the id {name!r} belongs to a relQuery with another question: its rows, template, model, deadline and fields"
            " must be the same to go on with it; choose another id for another question"
        )
        return openai.UnprocessableEntityError(sentence, response=error.response, body=error.body)
    if isinstance(error, openai.InternalServerError) and _is_away(error):
        sentence = f"the gateway at {address} answers with status {error.status_code}: {error.message}; {resume}"
        return openai.InternalServerError(sentence, response=error.response, body=error.body)
    return error


def _is_away(error: openai.APIError) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in AWAY and error.response.headers.get("x-should-retry") != "false"
    return isinstance(error, openai.APIConnectionError)
