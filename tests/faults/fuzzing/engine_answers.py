"""Answers of an engine: HTTP/1.1, whole answers, and event streams.

The first byte of an input chooses the call, the second one the pieces in which the answer arrives.

Property: the call ends with an answer or with `EngineTrouble`, `Shed` or `BadRequest`; a stream goes to the client in whole
events and no further than the request allows; a row of a relQuery and a gRPC client get something that can be read.
"""

import asyncio
from typing import Any

import orjson
from fuzzing import memory_gateway

from tidegate_gateway.edge import grpc_inference
from tidegate_gateway.lifecycle import engine_client
from tidegate_gateway.openai import endpoint_registry, error_table, parsed_request, request_fields
from tidegate_gateway.relqueries import row_results

_FIELDS = request_fields.RequestFields()
_INPUTS: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}


def _calls() -> list[parsed_request.ParsedRequest]:
    found = []
    for kind in endpoint_registry.ENDPOINTS:
        for stream in (False, True) if kind.stream is not None else (False,):
            body = {"model": "fake", kind.prompt_field: _INPUTS[kind.prompt_field], "stream": stream}
            body |= {"tools": [{"type": "function"}], "stream_options": {} if stream else None, "max_tokens": 20}
            found.append(parsed_request.from_body(kind, parsed_request.decoded(orjson.dumps(body)), _FIELDS))
    return found


CALLS = _calls()
_NAMES = [f"{call.endpoint.name}{' stream' if call.stream else ''}" for call in CALLS]
_USAGE = b'"usage":{"prompt_tokens":3,"completion_tokens":2,"input_tokens":3,"output_tokens":2}'
_TOOL = b'"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]'
_CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\ndata: {"choices":[{"delta":{"content":"a"},"index":0}]}\n\n'
    b': silence\n\ndata: {"choices":[{"delta":{%s},"finish_reason":"stop"}]}\n\ndata: {"choices":[],%s}\n\ndata: [DONE]\n\n'
) % (_TOOL, _USAGE)
_RESPONSE = (
    b'event: response.created\ndata: {"response":{}}\n\nevent: response.output_text.delta\ndata: {"delta":"a"}\n\n'
    b'event: response.completed\ndata: {"response":{"output":[{"type":"function_call","name":"f"}],%s}}\n\n'
) % _USAGE
_WHOLE = (
    b'{"object":"response","output":[{"type":"function_call","name":"f"}],"data":[{"embedding":[0.5]}],'
    b'"choices":[{"text":"a","message":{"content":"a",%s},"logprobs":{},"finish_reason":"stop"}],%s}'
) % (_TOOL, _USAGE)
_ERROR = b'{"error":{"message":"too long","param":"prompt","code":400}}'
_JSON, _SSE = b"application/json", b"text/event-stream; charset=utf-8"


def _answer(content: bytes) -> bytes:
    return memory_gateway.answer(content, _SSE)


ANSWERS = [
    *((name, memory_gateway.answer(_WHOLE, _JSON)) for name in _NAMES if not name.endswith("stream")),
    ("chat_completions stream", _answer(_CHAT)),
    ("chat_completions stream", _answer(_CHAT.replace(b"\n", b"\r\n"))),
    ("chat_completions stream", memory_gateway.chunked(_CHAT, _SSE)),
    ("chat_completions stream", _answer(_CHAT[:70] + b'data: {"error":{"message":"x"}}\n\n')),
    ("chat_completions", memory_gateway.answer(_ERROR, _JSON, b"400 Bad Request")),
    ("chat_completions", b"HTTP/1.1 100 Continue\r\n\r\n" + memory_gateway.chunked(_WHOLE, _JSON)),
    ("completions stream", _answer(b'data: {"choices":[{"text":"a"}]}\n\n' * 3 + b"data: [DONE]\n\n")),
    ("completions", memory_gateway.answer(b"", _JSON, b"503 Service Unavailable")),
    ("completions", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_WHOLE), _WHOLE)),
    ("responses stream", _answer(_RESPONSE)),
    ("responses stream", memory_gateway.chunked(b'event: error\ndata: {"type":"error"}\n\n', _SSE)),
]
SEEDS = [bytes((_NAMES.index(name), mode)) + answer for name, answer in ANSWERS for mode in (0, 9)]
DICTIONARY = (
    "data: ", "event: ", "id: 1", "retry: 1", ": ", "\\x0a\\x0a", "\\x0d\\x0a\\x0d\\x0a", "[DONE]",
    "data: [DONE]\\x0a\\x0a", '"choices":[]', '{"error"', '"usage":{', '"name":"', '"delta":{', '"message":',
    '"text":', "event: response.completed", "event: response.failed", "event: error", ".delta", "null", "1e999", "-1",
    "[[[[", "Content-Length: ", "Transfer-Encoding: chunked", "Content-Type: text/event-stream", "Connection: close",
    "HTTP/1.1 101 Switching", "HTTP/1.1 204 No", "HTTP/1.1 404 Not", "HTTP/1.0 200 OK", "\\x0d\\x0a0\\x0d\\x0a",
)  # fmt: skip


async def _read(connections: memory_gateway.Peer, call: parsed_request.ParsedRequest) -> None:
    """Reads the answer as an edge does. Raises `GatewayError` and `Finding`."""
    client = engine_client.EngineClient(connections, limits=memory_gateway.GATEWAY.settings.limits)  # type: ignore[arg-type]
    reply = await client.open("http://127.0.0.1:9", call, b"{}", {})
    try:
        if not reply.streamed:
            orjson.loads(row_results.read(0, reply).text)
            error_table.rejected(reply.first).body()
            return
        block = reply.take_first()
        while block:
            if block[len(block.rstrip(b"\r\n")) :].count(b"\n") < 2:  # further blank lines do no harm
                raise memory_gateway.Finding(f"a block ends within an event: {block[-40:]!r}")
            if not call.endpoint.asks_for_usage:
                list(grpc_inference._payloads(block, call.endpoint))
            else:
                list(grpc_inference._pieces(block, call))
            block = await reply.next_block()
        if reply.meter.tokens > reply.meter.most_events:
            raise memory_gateway.Finding("a stream has more events than its request allows")
        await reply.rest()
    finally:
        reply.close()


async def _try(data: bytes) -> None:
    call, connections = CALLS[data[0] % len(CALLS)], memory_gateway.Peer()
    reading = asyncio.ensure_future(_read(connections, call))
    await asyncio.sleep(0)
    await connections.feed(data[1:])
    await memory_gateway.settled(reading.done)
    try:
        reading.result()
    except error_table.EngineTrouble as error:
        error.body()
    except (error_table.Shed, error_table.BadRequest):
        pass


def try_input(data: bytes) -> None:
    if len(data) >= 2:
        memory_gateway.run(_try(data))
