"""Server-sent events on their way through: whole events out, counted, never rebuilt.

Bytes from the engine are cut only at event boundaries, so that an error can be added after any block and is still well
formed. What is read on the way is the number of tokens and the usage; the one event that may be left out is the usage
that we asked for and the client did not.
"""

from dataclasses import dataclass

import orjson

LAST = b"[DONE]"
DONE = b"data: " + LAST + b"\n\n"
MAX_EVENT_BYTES = 4 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Meter:
    """What an answer has told of itself so far."""

    tokens: int = 0
    """Events with content; the engine's usage replaces it."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    done: bool = False
    """The engine said [DONE], or its whole answer is here."""
    failed: bool = False
    """The engine reported an error in mid-stream."""

    @property
    def generated(self) -> int:
        return self.tokens if self.output_tokens is None else self.output_tokens

    def on_usage(self, usage: object) -> None:
        """Takes the counts of an OpenAI usage object; anything else is ignored."""
        if isinstance(usage, dict):
            prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int) and isinstance(output, int) and prompt >= 0 and output >= 0:
                self.prompt_tokens, self.output_tokens = prompt, output


class NotEvents(ValueError):
    """The engine's stream is not made of server-sent events."""


class Tap:
    """Cuts a stream into blocks of whole events and meters them."""

    def __init__(self, *, wants_usage: bool) -> None:
        self.meter = Meter()
        self._wants_usage = wants_usage
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events that `data` completes, as they came. Raises `NotEvents`."""
        data = self._rest + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            self._rest = data
            if len(data) > MAX_EVENT_BYTES:
                raise NotEvents(f"an event of more than {MAX_EVENT_BYTES} bytes")
            return b""
        block, self._rest = data[:end], data[end:]
        dropped = [event for event in _events(block) if not self._keep(event)]
        for event in dropped:
            block = block.replace(event, b"", 1)
        return block

    def _keep(self, event: bytes) -> bool:
        line = event.strip()
        if not line.startswith(b"data:"):
            if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise NotEvents("a line that is no field of an event")
            return True
        payload = line[5:].lstrip()
        if payload == LAST:
            self.meter.done = True
        elif payload.startswith((b'{"error"', b'{"object":"error"')):
            self.meter.failed = True
        elif b'"choices":[]' in payload or b'"choices": []' in payload:
            return self._usage(payload)
        elif payload.startswith(b"{") and payload.endswith(b"}"):
            self.meter.tokens += 1
        else:
            raise NotEvents("an event that is no JSON object")
        return True

    def _usage(self, payload: bytes) -> bool:
        try:
            self.meter.on_usage(orjson.loads(payload).get("usage"))
        except (orjson.JSONDecodeError, AttributeError) as error:
            raise NotEvents("an event that is no JSON object") from error
        return self._wants_usage


def _events(block: bytes) -> list[bytes]:
    boundary = b"\r\n\r\n" if b"\r\n\r\n" in block else b"\n\n"
    return [event + boundary for event in block.split(boundary) if event]


def error_event(body: bytes) -> bytes:
    """The end of a stream that failed: the error object, then [DONE]."""
    return b"data: " + body + b"\n\n" + DONE
