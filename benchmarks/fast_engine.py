"""A minimal engine for benchmarks of the gateway: it answers chat requests with fixed bytes, so its own cost is small.

    python benchmarks/fast_engine.py --port PORT [--tokens N] [--block-tokens N] [--pace-ms MS] [--paced-tokens N]

A streamed answer has N events with one token each and a usage event. Each write carries `--block-tokens` events; 0 puts the
whole stream into one write. `--pace-ms` separates two writes, so that each write reaches the gateway as one block. A stream
whose request has a `max_tokens` of at most `--paced-tokens` has so many events, each in a write of its own.
"""

import argparse
import asyncio
import json
import math
import re
from typing import cast

import uvloop

MODEL = "fast"
PROMPT_TOKENS = 16
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""No JSON of the benchmarks contains it."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Answers:
    """The bytes of every answer, built once."""

    def __init__(self, tokens: int, block_tokens: int, pace_s: float, paced_tokens: int) -> None:
        self.pace_s = pace_s
        self.paced_tokens = paced_tokens
        text = "".join(f"w{i} " for i in range(tokens))
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
        self.whole = _page(
            b"application/json",
            _json(
                {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": _usage(tokens)}
            ),
        )
        self.stream = _stream(tokens, block_tokens or tokens, apart=bool(block_tokens))
        self.paced = _stream(paced_tokens, 1, apart=True) if paced_tokens else []
        self.pages = {
            b"/health": _page(b"text/plain", b""),
            b"/metrics": _page(b"text/plain", b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"),
            b"/v1/models": _page(
                b"application/json", _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            ),
        }


class Connection(asyncio.Protocol):
    """One connection of the gateway; requests come one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._transport: asyncio.WriteTransport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head_end = self._data.find(b"\r\n\r\n")
        if head_end < 0:
            return
        start = head_end + 4
        if CHUNKED.search(self._data, 0, head_end):
            end = self._data.find(LAST_CHUNK, start) + len(LAST_CHUNK)
            if end < start + len(LAST_CHUNK):
                return
            body = _joined(self._data[start:end])
        else:
            length = LENGTH.search(self._data, 0, head_end)
            end = start + (int(length[1]) if length else 0)
            if len(self._data) < end:
                return
            body = self._data[start:end]
        path, self._data = self._data.split(b" ", 2)[1], self._data[end:]
        self._answer(path, body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if self._transport is None:
            return
        if path != b"/v1/chat/completions":
            self._transport.write(self._answers.pages.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
            return
        asked = json.loads(body)
        if asked.get("stream"):
            paced = asked.get("max_tokens", math.inf) <= self._answers.paced_tokens
            self._write(self._answers.paced if paced else self._answers.stream, 0)
        else:
            self._transport.write(self._answers.whole)

    def _write(self, blocks: list[bytes], block: int) -> None:
        """Writes one block of a stream and plans the next one."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(blocks[block])
        if block + 1 < len(blocks):
            asyncio.get_running_loop().call_later(self._answers.pace_s, self._write, blocks, block + 1)


def _joined(chunks: bytes) -> bytes:
    """The body that comes in these chunks."""
    parts, at = [], 0
    while size := int(chunks[at : (line := chunks.index(b"\r\n", at))], 16):
        parts.append(chunks[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(parts)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def _stream(tokens: int, size: int, *, apart: bool) -> list[bytes]:
    """The writes of a stream with so many events in each. The usage has a write of its own if they are `apart`."""
    events = [_event([{"index": 0, "delta": {"content": f"w{i} "}, "finish_reason": None}]) for i in range(tokens)]
    last = _event([], _usage(tokens)) + b"data: [DONE]\n\n"
    blocks = [b"".join(events[i : i + size]) for i in range(0, tokens, size)]
    blocks = [*blocks, last] if apart else [blocks[0] + last]
    stream = [b"%x\r\n%s\r\n" % (len(block), block) for block in blocks]
    stream[0] = STREAM_HEAD + stream[0]
    stream[-1] += b"0\r\n\r\n"
    return stream


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(choices: list[object], usage: object = None) -> bytes:
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": choices}
    return b"data: " + _json(event if usage is None else {**event, "usage": usage}) + b"\n\n"


def _page(kind: bytes, body: bytes) -> bytes:
    return HEAD % (kind, len(body)) + body


async def serve(options: argparse.Namespace) -> None:
    answers = Answers(options.tokens, options.block_tokens, options.pace_ms / 1000, options.paced_tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", options.port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--block-tokens", type=int, default=1)
    parser.add_argument("--pace-ms", type=float, default=2.0)
    parser.add_argument("--paced-tokens", type=int, default=0)
    uvloop.run(serve(parser.parse_args()))
