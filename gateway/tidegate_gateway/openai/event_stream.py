"""Server-sent events on their way from the engine to the client: cut at event boundaries, counted, never rebuilt.

Bytes leave only in whole events, so that an error event can follow any block. The meter counts events with content
and reads the usage. The one event that may be left out is the usage event that the gateway asked for and the client
did not.
"""

from dataclasses import dataclass

from tidegate_gateway.openai import bounded_json, endpoint, tool_calls
from tidegate_gateway.openai.endpoint import MOST_TOKENS, Endpoint

MAX_EVENT_BYTES = 4 * 1024 * 1024
MOST_LINES, UNCOUNTED_BYTES = 1000, 16 * 1024
"""Lines of an event, whose readers look at each one. Those of engines have one or two. Shorter events may have more."""
MORE_EVENTS = 16
"""Events of a choice that carry no token, such as the one with the role, and a reserve."""
COMMENTS, COMMENTS_PER_TOKEN = 1000, 16
"""Comments and empty events of a stream. Servers and proxies send one in some seconds of silence."""


@dataclass(slots=True, kw_only=True)
class Meter:
    """The numbers that one answer has shown so far."""

    endpoint: Endpoint
    choices: int = 1
    max_tokens: int | None = None
    most_prompt_tokens: int = MOST_TOKENS
    """The most that the prompts of the request can have; an engine that tells of more is not believed."""
    tokens: int = 0
    """Events with content; the engine's usage replaces it."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    done: bool = False
    """The end marker was read, or the whole answer is here."""
    failed: bool = False
    """The engine reported an error in mid-stream."""
    offers_tools: bool = False
    """The request offers tools, so the answer may invoke one."""
    tool: str = ""
    """The name of the tool that the answer invokes; "" = none so far."""

    @property
    def most_events(self) -> int:
        """More events with content than the request's tokens are the mistake of an engine that does not stop."""
        most = endpoint.MOST_TOKENS if self.max_tokens is None else self.max_tokens
        return self.choices * (most + MORE_EVENTS)

    def on_usage(self, usage: object) -> None:
        """Takes the counts of a usage object, within what the request can have; anything else is ignored."""
        found = self.endpoint.read_usage(
            usage, choices=self.choices, max_tokens=self.max_tokens, most_prompt=self.most_prompt_tokens
        )
        if found is not None:
            self.prompt_tokens, self.output_tokens = found


class NotEvents(ValueError):
    """The engine's stream does not consist of server-sent events."""


class Tap:
    """Cuts a stream into blocks of whole events and meters them."""

    def __init__(self, dialect: endpoint.StreamDialect, meter: Meter, *, wants_usage: bool) -> None:
        self.meter = meter
        self._dialect = dialect
        self._wants_usage = wants_usage
        self._markers = dialect.usage_markers + dialect.error_markers
        self._rest = bytearray()
        """The start of an event whose end has not come."""
        self._comments = 0
        self._tool_marker: bytes = dialect.tool_marker
        self._looks: int = tool_calls.MOST_LOOKS if meter.offers_tools and dialect.tool_marker else 0
        """Blocks that may still be searched for the name of a tool."""

    def feed(self, data: bytes) -> bytes:
        """The whole events that `data` completes, as they came. Raises `NotEvents`."""
        if self._rest:
            data = self._completed(data)
        if data.endswith(b"\n\n"):  # nearly every write of an engine
            block = data
        else:
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            if end < 4:
                self._hold(data)
                return b""
            block = data[:end]
            self._hold(data[end:])
        boundary = b"\n\n"
        if b"\r" in block and b"\r\n\r\n" in block:
            if boundary in block:  # both kinds of line ends
                block = block.replace(b"\r\n\r\n", boundary)
            else:
                boundary = b"\r\n\r\n"
        if self._looks and len(block) <= tool_calls.MOST_BYTES and block.find(self._tool_marker) >= 0:
            self._look_for_tool(block)
        plain, rest = self._plain(block)
        self.meter.tokens += plain
        if self.meter.tokens > self.meter.most_events:
            raise NotEvents("more events than the request allows tokens")
        if not rest:
            return block
        events = rest.removesuffix(boundary).split(boundary)
        if len(rest) > UNCOUNTED_BYTES:
            _bound_lines(events)
        left_out: set[bytes] = set()
        for event in events:
            if not event or event.startswith(b":"):
                self._comments += 1
            elif not self._keep(event):
                left_out.add(event)
        if self._comments > COMMENTS + COMMENTS_PER_TOKEN * self.meter.tokens:
            raise NotEvents("comments without end")
        if not left_out:
            return block
        kept = [event + boundary for event in events if event not in left_out]
        return block[: len(block) - len(rest)] + b"".join(kept)

    def _hold(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > MAX_EVENT_BYTES:
            raise NotEvents(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _completed(self, data: bytes) -> bytes:
        """All that waits, if `data` ends an event; otherwise nothing, and `data` waits too. What waits is not
        searched again, because an engine may send a long event byte by byte."""
        seam = bytes(self._rest[-3:]) + data
        if b"\n\n" not in seam and b"\r\n\r\n" not in seam:
            self._hold(data)
            return b""
        data = bytes(self._rest) + data
        self._rest.clear()
        return data

    def _look_for_tool(self, block: bytes) -> None:
        self._looks -= 1
        for line in block.split(b"\n"):
            if self._tool_marker in line and line.startswith(b"data:"):
                found = self._dialect.read_tool(line[5:])
                if found:
                    self.meter.tool = found
                    self._looks = 0
                    return

    def _plain(self, block: bytes) -> tuple[int, bytes]:
        """The number of events at the start of the block that only carry text, and the rest of the block. Nearly all events
        are such events, so they are counted without a look at each: they are one line each, between two blank lines."""
        special_at = min([at for marker in self._markers if (at := block.find(marker)) >= 0], default=len(block))
        end = block.rfind(b"\n\n", 0, special_at) + 2
        if end > 1 and block.startswith(b"data: {") and block.endswith(b"}\n\n", 0, end):
            events = block.count(b"}\n\ndata: {", 0, end) + 1
            if block.count(b"\n", 0, end) == 2 * events:
                return events, block[end:]
        return 0, block

    def _keep(self, event: bytes) -> bool:
        line = event.strip()
        if self._dialect.named and line.startswith(b"event:"):
            self._named(line)
            return True
        if not line.startswith(b"data:"):
            if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise NotEvents("a line that is no field of an event")
            self._comments += 1
            return True
        payload = line[5:].lstrip()
        for marker in self._dialect.usage_markers:
            if marker in payload:
                return self._usage(payload)
        if payload == self._dialect.end_marker:
            self.meter.done = True
        elif payload.startswith(self._dialect.error_markers):
            self.meter.failed = True
        elif payload.startswith(b"{") and payload.endswith(b"}"):
            self.meter.tokens += 1
        else:
            raise NotEvents("an event that is no JSON object")
        return True

    def _named(self, event: bytes) -> None:
        name, _, data = event[6:].partition(b"\n")
        payload = data.strip().removeprefix(b"data:").strip()
        if not (payload.startswith(b"{") and payload.endswith(b"}")):
            raise NotEvents("an event that is no JSON object")
        try:
            found = self._dialect.read_named(name.strip(), payload)
        except (ValueError, AttributeError) as error:
            raise NotEvents("an event that is no JSON object") from error
        meter = self.meter
        meter.tokens += found.text
        meter.failed |= found.failed
        meter.done |= found.last
        meter.tool = found.tool or meter.tool
        if found.usage is not None:
            meter.on_usage(found.usage)

    def _usage(self, payload: bytes) -> bool:
        try:
            self.meter.on_usage(bounded_json.of_engine(payload).get("usage"))
        except (ValueError, AttributeError) as error:
            raise NotEvents("an event that is no JSON object") from error
        return self._wants_usage


def _bound_lines(events: list[bytes]) -> None:
    """Raises `NotEvents` for an event of too many lines."""
    for event in events:
        if len(event) > UNCOUNTED_BYTES and event.count(b"\n") >= MOST_LINES:
            raise NotEvents(f"an event of more than {MOST_LINES} lines")
