"""JSON bodies of calls, workflows and relQueries, from their bytes to the answer. The first byte chooses the path,
and whether the body begins with so many blanks that it is read as a large one.

Property: a body gets an answer, or an error with a status below 500; 503 where the store is missing.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import orjson
from fuzzing import memory_gateway

from tidegate_gateway.edge import call_requests, http_listener, http_messages
from tidegate_gateway.openai import engine_fields, error_table

_TEXT = {"role": "user", "content": "x"}
_PARTS = [
    {"type": "text", "text": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_INVOKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x" * 2000, "max_tokens": 2, "stop": ["a"], "seed": 1, "logprobs": 2}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "suffix": "s", "best_of": 1, "cache_salt": "t", "echo": True}),
    ("/v1/chat/completions", {"messages": [_TEXT, {"role": "user", "content": _PARTS}], "max_completion_tokens": 3}),
    ("/v1/chat/completions", {"messages": [_TEXT, _INVOKED], "tools": [_TOOL], "functions": [], "stream": True}),
    ("/v1/chat/completions", {"messages": [_TEXT], "response_format": {"type": "json_schema", "json_schema": {}}}),
    ("/v1/chat/completions", {"messages": [_TEXT], "vllm_xargs": {"tg.urgency": 1}, "priority": 1, "bad_words": ["a"]}),
    ("/v1/chat/completions", {"messages": [_TEXT], "chat_template_kwargs": {"a": 1}, "stop_token_ids": [1, 2]}),
    ("/v1/responses", {"input": "x", "instructions": "y", "max_output_tokens": 2, "stream": True}),
    ("/v1/responses", {"input": [_TEXT, {"type": "message", "content": _PARTS}], "tools": [{"type": "function"}]}),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}", "output": [_PARTS[0]]}], "text": {}}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "float", "dimensions": 4}),
    ("/v1/workflows", {"deadline_ms": 5000, "id": "w", "tenant": "a", "stages": [{"name": "a"}]}),
    (
        "/v1/workflows",
        {
            "deadline_ms": 500.5,
            "stages": [
                {"name": "a", "after": [], "parallel": 3},
                {"name": "b", "after": ["a"], "repeat": 2},
                {"name": "c", "after": ["a", "b"]},
            ],
        },
    ),
    ("/v1/workflows", {"template": "t"}),
    ("/v1/relqueries", {"template": "{{a}} {{b}}", "rows": [{"a": "1", "b": 2}, {"a": None, "b": True}], "id": "q"}),
    ("/v1/relqueries", {"template": [{"role": "user", "content": "{{a}}"}], "rows": [{"a": 1.5}], "deadline_ms": 9000}),
    ("/v1/relqueries", {"template": "{{a}}", "endpoint": "/v1/completions", "rows": [{"a": ""}], "stream": False}),
    ("/v1/relqueries", {"template": "{{a}}", "rows_url": "https://host/a.csv", "max_tokens": 2}),
    ("/v1/workflows/w/complete", {}),
    ("/v1/workflows/w/stages/s/complete", {}),
]
PATHS = list(dict.fromkeys(path for path, _ in BODIES))
_LARGE = 0x80
LARGE_BYTES = call_requests.LARGE_BODY_BYTES + 1
SEEDS = [
    bytes((large | PATHS.index(path),))
    + orjson.dumps(body if path.startswith("/v1/workflows") else {"model": "fake", **body})
    for path, body in BODIES
    for large in (0, _LARGE)
]


def _names(value: object) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(_names, inner))


NAMES = sorted(
    _names([body for _, body in BODIES])
    | {
        *engine_fields._CHECKS,
        "url",
        "server_url",
        "prompt_embeds",
        "previous_response_id",
        "background",
        "user",
        "role",
    }
)
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308, 1e-308),
    *("", "x", "fake", "x" * 3000, "\u0000", "\ud7ff\U0010ffff", "{{a}}", "{{", "http://a", "data:,", "file:///a"),
    *([], {}, [[]], [{}], [None], {"": ""}, [[[[[[[[]]]]]]]], list(range(300)), ["x"] * 300, [[1], "x", {}]),
]
DICTIONARY = (
    *(f'"{name}":' for name in NAMES),
    "null", "true", "1e999", "-0", "\\\\ud800", "[[[[", '{"":', "18446744073709551616", "\\xef\\xbb\\xbf", "\\xff",
)  # fmt: skip

_routes = memory_gateway.HANDLERS.routes()
_server = http_listener.Server(_routes, memory_gateway.GATEWAY.settings.limits, leaving=lambda: False)


class _Client:
    """Takes a stream."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        pass

    async def write(self, block: bytes, *, last: bool = False) -> None:
        pass

    def release_body(self) -> None:
        pass


def try_input(data: bytes) -> None:
    if data:
        memory_gateway.run(_answer(data))


async def _answer(data: bytes) -> None:
    path, blanks = PATHS[data[0] % _LARGE % len(PATHS)], LARGE_BYTES if data[0] & _LARGE else 0
    headers = [("host", "x"), ("content-type", "application/json")]
    request = http_messages.Request(method="POST", target=path, headers=headers, body=b" " * blanks + data[1:])
    try:
        _server.find(request)
        response = await _server.answer(request, _Client())  # type: ignore[arg-type]
        status = 200 if response is None else response.status
    except error_table.GatewayError as error:
        orjson.loads(error.body())
        status = error.row.status
    await memory_gateway.settled(lambda: True)
    if status >= 500 and status != 503:
        raise memory_gateway.Finding(f"the answer has the status {status}")


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """An input like this one: its JSON with another value or name somewhere, or its bytes changed."""
    chosen = random.Random(seed)
    try:
        document = json.loads(data[1:]) if chosen.random() < 0.7 else None
    except (ValueError, RecursionError):
        document = None
    if document is None:
        import atheris  # nothing is mutated without it

        return bytes(atheris.Mutate(data, most))
    path = data[:1] if chosen.random() < 0.95 else bytes((chosen.randrange(256),))
    changed = _changed(document, chosen)
    try:
        return (path + json.dumps(changed).encode("utf-8", "surrogatepass"))[:most]
    except (ValueError, RecursionError):
        return data[:most]


def _changed(value: Any, chosen: random.Random) -> Any:
    """The value with a change at one place in it."""
    if isinstance(value, dict) and value and chosen.random() < 0.8:
        return _changed_object(value, chosen)
    if isinstance(value, list) and value and chosen.random() < 0.8:
        at = chosen.randrange(len(value))
        match chosen.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * chosen.choice((2, 3, 70)) + value[at:]
            case _:
                return [*value[:at], _changed(value[at], chosen), *value[at + 1 :]]
    return chosen.choice((chosen.choice(VALUES), [value], {chosen.choice(NAMES): value}))


def _changed_object(value: dict[str, Any], chosen: random.Random) -> dict[str, Any]:
    name = chosen.choice(list(value))
    match chosen.randrange(6):
        case 0:
            return {key: item for key, item in value.items() if key != name}
        case 1:
            return {**value, chosen.choice(NAMES): chosen.choice(VALUES)}
        case 2:
            return {chosen.choice(NAMES) if key == name else key: item for key, item in value.items()}
        case _:
            return {**value, name: _changed(value[name], chosen)}
