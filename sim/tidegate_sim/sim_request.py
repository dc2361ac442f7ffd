"""A client's request to a simulated engine: vLLM's request bodies go in, a `SimRequest` comes out.

It reads the fields that decide the amount of work (prompts, `n`, token limits) and the form of the answer, and ignores
all others. It rejects the bodies that vLLM rejects.
"""

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_policy import labels
from tidegate_policy.model import Call, CallId
from tidegate_sim import prompt_content, stub_answers
from tidegate_sim.engine_limits import Prefix
from tidegate_sim.prompt_content import CHARACTERS_A_TOKEN

DEFAULT_OUTPUT_TOKENS = 48
MAX_CHOICES = 16_384
"""The default of vLLM's VLLM_MAX_N_SEQUENCES."""
GREEDY = 1e-5
"""vLLM samples greedily below this temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A validated request body."""

    model: str
    calls: tuple[Call, ...]
    """One for each choice of the answer: `n` for the first prompt, `n` for the second, and so on."""
    contents: tuple[Iterator[Prefix], ...]
    """The content of the prompt of each call, to be read once."""
    output_tokens: int
    """Tokens of each choice."""
    prompt_tokens: int
    """Tokens of all prompts, each prompt counted once."""
    chat: bool
    stream: bool
    include_usage: bool
    limited: bool
    """Whether `max_tokens` ends the answer."""
    stub: stub_answers.Stub | None = None
    """The answer in the form that the request asks for; None = filler."""


class BadRequest(ValueError):
    """The body is not a request that vLLM would accept."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse(body: bytes, *, chat: bool, models: Sequence[str]) -> SimRequest:
    """The request in `body`, to an engine that serves `models`, of which the first is the default. Raises `BadRequest`."""
    fields, model = of_model(body, models)
    lengths = [_chat_tokens(fields.get("messages"))] if chat else prompt_lengths(fields.get("prompt"))
    texts = [_chat_text(fields["messages"])] if chat else prompts_of(fields["prompt"])
    limit = at_least_1(fields, "max_completion_tokens") if chat else None
    if limit is None:
        limit = at_least_1(fields, "max_tokens")
    choices = _choices(fields)
    if len(lengths) * choices > MAX_CHOICES:
        raise BadRequest(f"an answer has at most {MAX_CHOICES} choices", param="n")
    try:
        stub = stub_answers.of(fields)
    except stub_answers.NoStub as error:
        raise BadRequest(str(error), param=error.param) from error
    output_tokens = limit or DEFAULT_OUTPUT_TOKENS
    if stub is not None:
        output_tokens = min(limit or len(stub.pieces), len(stub.pieces))
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    return SimRequest(
        model=model,
        calls=calls_of(fields, [length for length in lengths for _ in range(choices)], max_tokens=output_tokens),
        contents=contents_of(fields, model, [text for text in texts for _ in range(choices)]),
        output_tokens=output_tokens,
        prompt_tokens=sum(lengths),
        chat=chat,
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        limited=limit is not None if stub is None else output_tokens < len(stub.pieces),
        stub=stub,
    )


def of_model(body: bytes, models: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The fields of a body, and the model that it names or the first one. Raises `BadRequest`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    model = fields.get("model") or models[0]
    if model not in models:
        raise BadRequest(f"this engine serves {', '.join(map(repr, models))}, not {model!r}", param="model")
    return fields, model


def _choices(fields: dict[str, object]) -> int:
    choices = at_least_1(fields, "n") or 1
    temperature = fields.get("temperature")
    if choices > 1 and isinstance(temperature, int | float) and temperature < GREEDY:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {choices}.")
    return choices


def at_least_1(fields: dict[str, Any], name: str) -> int | None:
    """The whole number in the field `name`; None if it is absent. Raises `BadRequest`."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name} must be an integer", param=name)
    if value < 1:
        raise BadRequest(f"{name} must be at least 1, got {value}.", param=name)
    return value


def _chat_tokens(messages: object) -> int:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of messages", param="messages")
    return sum(_tokens(message.get("content") or "") for message in messages) or 1


def _chat_text(messages: list[dict[str, Any]]) -> str:
    """The messages in the order of a prompt, without what a chat template adds."""
    return "".join(_text(message.get("content") or "") for message in messages)


def prompts_of(prompt: Any) -> list[Any]:
    """The prompts in a field: a text, a list of token ids, or a list of either."""
    return prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]


def contents_of(fields: dict[str, Any], model: str, prompts: Iterable[str | list[int]]) -> tuple[Iterator[Prefix], ...]:
    """The content of each prompt, as the prefix cache of an engine with this model compares it."""
    salt = (model, orjson.dumps(fields.get("cache_salt")), orjson.dumps(fields.get("tools")))
    return tuple([prompt_content.of(prompt, salt) for prompt in prompts])


def prompt_lengths(prompt: object, name: str = "prompt") -> list[int]:
    """Tokens of each prompt in the field `name`. Raises `BadRequest`."""
    prompts = prompts_of(prompt)
    if not prompts or not all((isinstance(item, str) and item) or is_ids(item) for item in prompts):
        raise BadRequest(f"{name} must be a text, token ids, or a list of either, and not empty", param=name)
    return [max(_tokens(item), 1) for item in prompts]


def is_ids(prompt: object) -> bool:
    """Whether a prompt is a list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _tokens(content: object) -> int:
    if is_ids(content):
        return len(content)  # type: ignore[arg-type]  # a list, which `is_ids` has seen
    return len(_text(content)) // CHARACTERS_A_TOKEN


def _text(content: object) -> str:
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def calls_of(fields: dict[str, Any], prompt_lengths: Iterable[int], *, max_tokens: int) -> tuple[Call, ...]:
    """A call with the labels of the body for each prompt, whose lengths are in tokens."""
    sent = fields.get("vllm_xargs")
    now = asyncio.get_running_loop().time()
    return tuple(
        labels.read(
            now,
            sent if isinstance(sent, dict) else {},
            call_id=CallId(uuid.uuid4().hex),
            prompt_tokens=length,
            max_tokens=max_tokens,
        )
        for length in prompt_lengths
    )
