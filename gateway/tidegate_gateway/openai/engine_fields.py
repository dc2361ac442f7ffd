"""Which fields of a request may reach an engine, and with which values? (docs/decisions/0021)

Fields of OpenAI's API and unknown fields pass unchanged within the bounds below. A field that makes an engine fetch an
address, run a template of the client or take tensors is an error, unless a switch permits it: `allow` in the settings, for
all calls or for those of a class. Engines convert texts to numbers and flags, so types are compared exactly.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import orjson

from tidegate_gateway.openai import endpoint, media_address
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.admit import entitlements

LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**63 - 1
MOST_LOGPROBS = 20
MOST_STREAM_INTERVAL = 64
"""Tokens in one block of a stream. With more, an engine that generates would seem to have stopped."""
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_TOKEN_IDS = 1024
"""Ids in `stop_token_ids` and the like, and entries of `bad_words`."""
SCHEMA_BYTES, TOOLS_BYTES, SUFFIX_BYTES, OTHER_BYTES = 64 * 1024, 512 * 1024, 1024 * 1024, 64 * 1024
"""The JSON of a field: a schema or grammar, the tools, the text behind a completion, any other field."""
SHORT_TEXT = OTHER_BYTES // 6
"""A text with so many characters fits, however JSON escapes it."""
MOST_MEDIA_VALUES = 20_000
"""Values in the parts of messages that are not plain text, all parts together: the gateway looks at each."""
NESTING = 64
"""Levels of lists and objects in a field."""
MOST_BRACKETS = 4096
"""Lists and objects in a field; brackets in its texts count too."""

Allowed = Collection[entitlements.Feature]
Check = Callable[[str, Any, Allowed], None]
"""Takes the name and the value of a field, which is not null, and the features that are permitted."""
LEAST_ENTRY_BYTES = 2
"""Of an entry of a list or an object, in JSON."""
_CONTAINERS = frozenset({list, dict})
_PLAIN = frozenset({bool, float, type(None)})


class EngineFields:
    """The rules of one gateway."""

    def __init__(
        self, classes: Iterable[entitlements.SloClass], default_class: str | None, allow: Iterable[entitlements.Feature]
    ) -> None:
        self._everywhere = frozenset(allow)
        self.set_classes(classes, default_class)

    @property
    def classes(self) -> Collection[str]:
        """The names of the classes."""
        return self._by_class.keys()

    def set_classes(self, classes: Iterable[entitlements.SloClass], default_class: str | None) -> None:
        """Replaces the classes."""
        self._by_class = {item.name: self._everywhere.union(item.allow) for item in classes}
        self._default_class = default_class or ""

    def check(self, kind: endpoint.Endpoint, body: Mapping[str, Any], slo_class: str | None) -> None:
        """Raises `BadRequest` that names the first field that may not reach an engine."""
        allowed = self._by_class.get(slo_class or self._default_class, self._everywhere)
        prompt = kind.prompt_field
        for name, value in body.items():
            check = _CHECKS.get(name)
            if check is None:
                kind_of = type(value)
                if kind_of not in _PLAIN and (kind_of is not str or len(value) > SHORT_TEXT):
                    _any(name, value, allowed)
            elif name == prompt:
                _media(name, value, allowed)
            elif value is not None:
                check(name, value, allowed)


def _any(name: str, value: Any, allowed: Allowed) -> None:
    """A field without a rule of its own."""
    if type(value) is int:
        _integer(name, value, allowed)
    else:
        _other(name, value, allowed)


def _integer(name: str, value: Any, allowed: Allowed) -> None:
    if type(value) is not int or not LEAST_INTEGER <= value <= MOST_INTEGER:
        raise BadRequest(f"{name[:64]} must be a whole number of 64 bits with a sign", param=name[:64])


def _logprobs(name: str, value: Any, allowed: Allowed) -> None:
    if type(value) is not bool and (type(value) is not int or not 0 <= value <= MOST_LOGPROBS):
        raise BadRequest(f"{name} must be true, false, or a whole number from 0 to {MOST_LOGPROBS}", param=name)


def _stop(name: str, value: Any, allowed: Allowed) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MOST_STOPS:
        raise BadRequest(f"{name} must be text, or a list of at most {MOST_STOPS} texts", param=name)
    for text in texts:
        if not isinstance(text, str) or len(text) > LONGEST_STOP:
            raise BadRequest(f"{name}: a text must have at most {LONGEST_STOP} characters", param=name)


def _list(most: int) -> Check:
    """A check that a field is a list of at most so many entries."""

    def check(name: str, value: Any, allowed: Allowed) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise BadRequest(f"{name} must be a list of at most {most} entries", param=name)
        _any(name, value, allowed)

    return check


def _stream_interval(name: str, value: Any, allowed: Allowed) -> None:
    endpoint.count({name: value}, name, high=MOST_STREAM_INTERVAL)


def _sized(most_bytes: int) -> Check:
    """A check that a field's JSON has at most so many bytes, and at most `NESTING` levels."""

    def check(name: str, value: Any, allowed: Allowed) -> None:
        if type(value) is str and 6 * len(value) <= most_bytes:
            return
        too_many = type(value) in _CONTAINERS and LEAST_ENTRY_BYTES * len(value) > most_bytes
        try:
            raw = b"" if too_many else orjson.dumps(value)
        except orjson.JSONEncodeError as error:
            raise BadRequest(f"{name[:64]} is nested too deeply", param=name[:64]) from error
        if too_many or len(raw) > most_bytes:
            raise too_large(name, most_bytes)
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets > MOST_BRACKETS and type(value) in _CONTAINERS:
            raise BadRequest(f"{name[:64]} has more than {MOST_BRACKETS} lists and objects", param=name[:64])
        if brackets > NESTING and _levels(value) > NESTING:
            raise BadRequest(f"{name[:64]} has more than {NESTING} levels of lists and objects", param=name[:64])

    return check


def too_large(name: str, most_bytes: int) -> BadRequest:
    """The JSON of a field has more bytes than it may have."""
    return BadRequest(f"{name[:64]} is larger than {most_bytes} bytes", param=name[:64])


def _levels(value: Any) -> int:
    """The levels of lists and objects in a value, `NESTING + 1` at most."""
    level, items = 0, [value]
    while level <= NESTING:
        inner: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            break
        level, items = level + 1, inner
    return level


def _templates(name: str, value: Any, allowed: Allowed) -> None:
    """`chat_template_kwargs`, which must not bring a template by another way."""
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    if "chat_template" in value:
        _chat_template(f"{name}.chat_template", value["chat_template"], allowed)
    _any(name, value, allowed)


def _tools(name: str, value: Any, allowed: Allowed) -> None:
    _tools_size(name, value, allowed)
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        if isinstance(tool, dict) and (tool.get("server_url") or tool.get("type") == "mcp"):
            where = f"{name}[{i}].server_url"
            raise BadRequest(f"{where}: engines must not call servers that a client names", param=where)


def _switched(feature: entitlements.Feature, *, harmless: tuple[object, ...] = ()) -> Check:
    """A check that a field has a value without effect, or that its switch is on."""

    def check(name: str, value: Any, allowed: Allowed) -> None:
        if any(value is item for item in harmless):
            return
        if feature not in allowed:
            raise BadRequest(
                f"{name} is not permitted here; the settings of the gateway permit it with allow: [{feature}], for all"
                " calls or for those of a class",
                param=name,
            )
        if type(value) is int:
            endpoint.count({name: value}, name, low=0, high=endpoint.BOUND_CHOICES)

    return check


def _never(name: str, value: Any, allowed: Allowed) -> None:
    raise BadRequest(f"{name} is not permitted: it names code of the engine", param=name)


def _other_prompt(name: str, value: Any, allowed: Allowed) -> None:
    """The prompt of another endpoint. An engine may read it, so it is bounded and its media are checked."""
    _any(name, value, allowed)
    _media(name, value, allowed)


def _media(name: str, value: Any, allowed: Allowed) -> None:
    """The addresses and tensors in the parts of messages."""
    if type(value) is not list or type(value[0] if value else None) is not dict:
        return  # texts or token ids; the endpoint has checked that all entries are alike
    seen = 0
    for i, message in enumerate(value):
        if type(message) is dict and len(message) == 2 and "role" in message and type(message.get("content")) is str:
            continue
        for key, content in message.items() if type(message) is dict else ():
            kind = type(content)
            if kind is str:
                if key[-3:] == "url":
                    media_address.check(content, f"{name}[{i}].{key}", allowed)
            elif kind is list and (key == "content" or key == "output"):
                for part in content:
                    if not _is_text(part):
                        seen = _part(part, f"{name}[{i}].{key}", allowed, seen)
            elif kind is dict and (key in ("content", "output") or key[-3:] == "url"):
                seen = _part({key: content}, f"{name}[{i}]", allowed, seen)


def _is_text(part: Any) -> bool:
    """The part has a text and its type, and nothing else. An engine reads an address without a type too."""
    return type(part) is dict and len(part) == 2 and type(part.get("text")) is str and type(part.get("type")) is str


_NO_MEDIA = frozenset({"text", "type", "refusal", "thinking", "annotations", "logprobs"})


def _part(part: Any, where: str, allowed: Allowed, seen: int) -> int:
    """One part of a message that may be an image, a sound or tensors. Takes and gives the values that were looked at."""
    left: list[tuple[str, Any]] = [("", part)]
    while left:
        key, value = left.pop()
        seen += 1
        if seen + len(left) > MOST_MEDIA_VALUES:
            raise BadRequest(
                f"{where}: the parts that are not text have more than {MOST_MEDIA_VALUES} values", param=where
            )
        if key.endswith("_embeds") and value is not None:
            _prompt_embeds(f"{where}: {key[:64]}", value, allowed)
        if isinstance(value, str):
            media_address.check(value, where, allowed, only_fetched=not key.endswith("url"))
        elif isinstance(value, dict):
            left += [(name, item) for name, item in value.items() if name not in _NO_MEDIA]
        elif isinstance(value, list):
            left += [(key, item) for item in value]
    return seen


_other, _schema, _text = _sized(OTHER_BYTES), _sized(SCHEMA_BYTES), _sized(SUFFIX_BYTES)
_tools_size = _sized(TOOLS_BYTES)
_token_ids, _logprob_token_ids = _list(MOST_TOKEN_IDS), _list(MOST_LOGPROBS)
_chat_template, _prompt_embeds = _switched("chat_template"), _switched("prompt_embeds")
_CHECKS: dict[str, Check] = {
    "seed": _integer,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "logprob_token_ids": _logprob_token_ids,
    "prompt_logprob_token_ids": _logprob_token_ids,
    "stream_interval": _stream_interval,
    "stop": _stop,
    "bad_words": _stop,
    "stop_token_ids": _token_ids,
    "allowed_token_ids": _token_ids,
    "response_format": _schema,
    "structured_outputs": _schema,
    "guided_json": _schema,
    "guided_regex": _schema,
    "guided_grammar": _schema,
    "guided_choice": _schema,
    "tools": _tools,
    "functions": _tools,
    "suffix": _text,
    "instructions": _text,
    "chat_template": _chat_template,
    "chat_template_kwargs": _templates,
    "prompt_embeds": _prompt_embeds,
    "use_beam_search": _switched("beam_search", harmless=(False,)),
    "best_of": _switched("beam_search", harmless=(1,)),
    "mm_processor_kwargs": _switched("media_options"),
    "media_io_kwargs": _switched("media_options"),
    "logits_processors": _never,
    "messages": _other_prompt,
    "input": _other_prompt,
    "prompt": _other_prompt,
}
_SIZES = {_other: OTHER_BYTES, _stop: OTHER_BYTES, _schema: SCHEMA_BYTES, _tools: TOOLS_BYTES, _text: SUFFIX_BYTES}
LEAST_TEXT_BYTES: int = min(_SIZES.values())
"""A field of a body whose text has no more bytes is not too large."""


def most_text_bytes(name: str) -> int:
    """The bytes of the longest text in a field of a body, in JSON. More than any body has for a prompt, and for fields
    whose other rules find a long text."""
    return _SIZES.get(_CHECKS.get(name, _other), sys.maxsize)
