"""What is an OpenAI endpoint? One value: its path, how its requests are sized, how its answers are checked and counted.

`chat_completions` and `completions` each define one endpoint, and `endpoint_registry` lists them. The HTTP routes,
the paths at the engines, the names of traces and the checks of answers follow from these values. An endpoint opens no
socket.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy import immutable

MOST_TOKENS = 10_000_000
"""No prompt and no sequence has more tokens; a larger number in a request or in an answer is a mistake."""
BOUND_CHOICES = 16
"""The default bound on the sequences of one call (`limits.choices`)."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """How large a request is, as far as its body tells."""

    prompts: int = 1
    characters: int = 0
    """The characters of the texts of all prompts; the token estimate starts from this number and from `media`."""
    media: int = 0
    """The images and sounds of all prompts, `MOST_MEDIA` at most."""
    messages: int = 0
    choices: int = 1
    """Sequences that the engine generates: prompts times `n`."""
    max_tokens: int | None = None
    """The client's bound on the tokens of each sequence."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class NamedEvent:
    """What an event with a name says."""

    text: bool = False
    """It carries a part of the output."""
    last: bool = False
    """It ends the stream."""
    failed: bool = False
    """It reports a failure of the engine."""
    usage: Any = None
    tool: str = ""
    """The tool that the answer invokes, where the event carries the whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDialect:
    """How the server-sent events of a streamed answer are read."""

    named: bool = False
    """Each event has a name (`event: NAME`), and `read_named` reads it. The markers do not count then."""

    end_marker: bytes = b"[DONE]"
    """The payload of the last event."""
    usage_markers: tuple[bytes, ...] = (b'"choices":[]', b'"choices": []')
    """An event whose payload contains one of these carries the usage and no text."""
    error_markers: tuple[bytes, ...] = (b'{"error"', b'{"object":"error"')
    """An event whose payload starts with one of these reports a failure of the engine."""
    tool_marker: bytes = b""
    """Stands in each event that names the tool that the answer invokes; b"" = the endpoint has none such."""
    read_tool: Callable[[bytes], str] = lambda payload: ""
    """The tool that the payload of such an event names; "" = none."""

    @property
    def end_event(self) -> bytes:
        return b"data: " + self.end_marker + b"\n\n"

    def read_named(self, name: bytes, payload: bytes) -> NamedEvent:
        """Reads an event with a name. Raises `ValueError` if its payload cannot be read."""
        return NamedEvent(text=True)

    def error_events(self, body: bytes) -> bytes:
        """The last bytes of a stream that failed: an event with the error object, then the end marker."""
        return b"data: " + body + b"\n\n" + self.end_event


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint that the gateway serves and its engines have."""

    name: str
    path: str
    operation: str
    """`gen_ai.operation.name` of its traces."""
    read_size: Callable[[Mapping[str, Any], int], RequestSize]
    """Takes a request's body and the bound on its choices. Raises `BadRequest` for fields that cannot be sized."""
    is_answer: Callable[[Mapping[str, Any]], bool]
    """Whether a JSON object is a whole answer of this endpoint."""
    prompt_parts: Callable[[Mapping[str, Any]], Iterable[object]] = lambda body: ()
    """The JSON values of a checked body that make its prompt, in the order in which the engine renders them. Engines reuse
    the KV of equal beginnings."""
    prompt_field: str
    """The field of the body that `read_size` bounds as the prompt."""
    stream: StreamDialect | None = None
    """None = answers of this endpoint are never streamed."""
    invoked_tool: Callable[[Mapping[str, Any]], str] = lambda answer: ""
    """The name of the tool that a whole answer invokes; "" = none."""
    asks_for_usage: bool = True
    """Streams carry their usage only if the request asks for it (`stream_options`)."""
    prompt_usage: str = "prompt_tokens"
    """The field of a usage object that counts the tokens of the prompts."""
    output_usage: str | None = "completion_tokens"
    """The field of a usage object that counts generated tokens; None = the endpoint generates none."""

    def read_usage(
        self, usage: object, *, choices: int, max_tokens: int | None, most_prompt: int = MOST_TOKENS
    ) -> tuple[int, int] | None:
        """Prompt and output tokens of a usage object, no more than the request can have; None if they cannot be used."""
        if not isinstance(usage, dict):
            return None
        prompt = usage.get(self.prompt_usage)
        output = 0 if self.output_usage is None else usage.get(self.output_usage)
        if not is_count(prompt) or not is_count(output):
            return None
        bound = choices * (MOST_TOKENS if max_tokens is None else min(max_tokens, MOST_TOKENS))
        return min(prompt, most_prompt, MOST_TOKENS), min(output, bound)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def has_choices(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is one of the two completion endpoints'."""
    choices = answer.get("choices")
    return isinstance(choices, list) and bool(choices) and all(isinstance(choice, dict) for choice in choices)


def count(body: Mapping[str, Any], key: str, *, low: int = 1, high: int = MOST_TOKENS) -> int | None:
    """The whole number at `key`, None if it is absent. Raises `BadRequest`."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{key} must be a whole number from {low} to {high}", param=key)
    return value


def choices(body: Mapping[str, Any], prompts: int, most: int) -> int:
    """The sequences of a request: `n` times its prompts. Raises `BadRequest` for more than `most`."""
    found = prompts * (count(body, "n", high=most) or 1)
    if found > most:
        sentence = f"n times the number of prompts must be at most {most}, not {found}; send several calls"
        raise BadRequest(sentence, param="prompt")
    return found
