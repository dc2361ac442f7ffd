"""gRPC streams over HTTP/2, of clients and of the proxy in front of an endpoint picker.

`grpc.aio` spends more CPU time on a stream than the whole picker may take (decision 34), and bounds too little of what many
clients send and do not read (decision 44). So this module frames the streams itself. It has what RFC 9113 and gRPC's
protocol ask of a server: flow control both ways, and the header compression of incoming heads (`hpack`). What the
messages mean is the business of the handler of each stream.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, cast

from tidegate_gateway import reading_turns
from tidegate_gateway.edge import client_addresses, frame_allowance, http2_heads, http2_stream, tls_handshake
from tidegate_gateway.edge import http2_frames as h2

if TYPE_CHECKING:
    from tidegate_gateway.edge import http2_server

logger = logging.getLogger("tidegate.gateway")

WINDOW_BYTES = 1 << 20
"""How much may arrive on a stream before it is acknowledged; a connection has sixteen times as much."""
YOUNG_S = 1.0
"""A stream that is older when its peer ends it was no flood."""
FIRST_WINDOW_BYTES = 65_535
"""Of a peer that has not said otherwise."""
MOST_WINDOW_BYTES = MOST_STREAM = 2**31 - 1
SMALL_BYTES, MOST_SMALL = 64, 16_384
"""A stream may have so many frames of data with fewer bytes."""
TURN_BYTES, TURN_FRAMES, TURN_S = 64 * 1024, 2000, 0.005
"""A connection that brings more at once, or what takes longer, reads on in turn with the others that do."""
STREAMS_A_FRAME = 100
"""Another window for so many streams costs as much as a frame that brings no call."""
CUT_S = 1.0
"""For the last frames to leave when a connection ends."""
SILENT_S, PROBE_S = 30.0, 20.0
"""A peer that is silent for so long is asked for a sign, and has so long to give it."""


class Connection(asyncio.Protocol):
    """One connection of the peer."""

    def __init__(self, server: "http2_server.Server") -> None:
        self.window = FIRST_WINDOW_BYTES
        """Bytes that the peer takes on all streams together."""
        self.address = ""
        """The address of the peer, without its port."""
        self.server = server
        self._streams: dict[int, http2_stream.Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._heads = http2_heads.HeadDecoder()
        self._stream_window = FIRST_WINDOW_BYTES
        self._last = 0
        """The last stream of the peer."""
        self._full_at_s: float | None = None
        """Since when the kernel does not take what was written."""
        self._unread = self._unsent_bytes = 0
        """Of all streams: what arrived and is not acknowledged, and what is beyond the windows of the peer."""
        self._began = self._is_greeted = self._is_asked = self._has_left = self._in_line = False
        self._more = False
        """Whole frames have arrived that wait for the connection's turn."""
        self._gathered: list[bytes] | None = None
        """What is to be sent once the frames at hand have been read, in one piece."""
        self._waiting_bytes = 0
        """Of `_data`: what came when the time of a turn of the event loop was spent."""
        self._allowance = frame_allowance.FrameAllowance()
        self._given_up = frame_allowance.FrameAllowance(times=frame_allowance.GIVEN_UP)
        self._rest_s = 0.0
        """For so long the connection is not read, because its peer has given up many calls."""
        self._held: dict[http2_stream.Stream, None] = {}
        """Streams with bytes beyond the windows of the peer, or whose writers wait; the one that waits longest first."""
        self._heard_at_s = time.monotonic()
        self._asked_at_s: float | None = None
        """When a silent peer was asked for a sign."""
        self._idle_at_s = time.monotonic()
        """When it was opened, or its last stream ended."""

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = plain = cast("asyncio.Transport", transport)
        self.address = client_addresses.address_of(plain)
        if not self.server.opened(self):
            plain.abort()
            return
        if self.server.encryption is None:
            self._greet(plain)
        else:
            server = self.server
            tls_handshake.TlsHandshake(
                plain, self, self._greet, self.server.encryption, server.handshakes,
                within_s=server.bounds.handshake_s, takes_plain=server.takes_plain,
            )  # fmt: skip

    def _greet(self, transport: asyncio.Transport) -> None:
        self._transport, self._is_greeted = transport, True
        most = self.server.bounds.streams
        told = {
            h2.MAX_CONCURRENT_STREAMS: most,
            h2.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            h2.MAX_HEADER_LIST_SIZE: http2_heads.MOST_BYTES,
        }
        self.write(h2.frame(h2.SETTINGS, 0, 0, b"".join([h2.SETTING.pack(*item) for item in told.items()])))
        self.write(h2.frame(h2.WINDOW_UPDATE, 0, 0, (16 * WINDOW_BYTES - FIRST_WINDOW_BYTES).to_bytes(4)))
        if self.server.is_leaving:
            self.ask_to_leave()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._heard_at_s, self._asked_at_s = time.monotonic(), None
        if self.server.turns.must_wait(len(data)):
            self._waiting_bytes += len(data)
            self._data, self._more = self._data + data, True
        else:
            self._take(data)
        if self._more or len(data) > TURN_BYTES:
            self._join_line()

    def _take(self, data: bytes) -> None:
        began_at_s = time.monotonic()
        try:
            self._read_and_send(self._data + data if self._data else data)
        except h2.ConnectionBroken as broken:
            self._more = False
            self.server.broken(broken)
            self._go_away(broken.code, last=self._last)
            self._reset_all()
            self.close()
        finally:
            self.server.turns.spend(time.monotonic() - began_at_s)

    def _join_line(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._in_line:
            self._in_line = True
            self._transport.pause_reading()
            is_small = len(self._data) <= reading_turns.SMALL_BYTES
            self.server.turns.join(self._read_on, self.address, is_small=is_small, after_s=self._rest_s)

    def _read_on(self) -> None:
        self._in_line = False
        self._release_waiting()
        if self._more and self._transport is not None and not self._transport.is_closing():
            self._take(b"")
        if self._more:
            self._join_line()
        if not self._in_line and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _release_waiting(self) -> None:
        self.server.turns.waited(self._waiting_bytes)
        self._waiting_bytes = 0

    def connection_lost(self, error: Exception | None) -> None:
        if self._in_line:
            self.server.turns.leave(self._read_on)
        self._release_waiting()
        self._data = b""
        self.server.closed(self)
        self._reset_all()
        if self._transport is not None:
            self.server.unread.leave(self._transport)

    def _read_and_send(self, data: bytes) -> None:
        """Reads frames, and sends what is written meanwhile in one piece. Raises `ConnectionBroken`."""
        self._gathered = gathered = list[bytes]()
        try:
            self._read(data)
        finally:
            self._gathered = None
            if gathered:
                self.write(b"".join(gathered))

    def write(self, data: bytes) -> None:
        if self._gathered is not None:
            self._gathered.append(data)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            if self.is_full:
                self.server.unread.enter(self._transport, self._unsent_bytes)

    def pause_writing(self) -> None:
        self._full_at_s = time.monotonic()

    def resume_writing(self) -> None:
        self._full_at_s = None
        self.hold(0)
        for stream in list(self._held):
            stream.tell_writer()
            if not stream.waits:
                self._held.pop(stream, None)

    @property
    def is_full(self) -> bool:
        """The kernel does not take what was written."""
        return self._full_at_s is not None

    def is_full_since(self, waited_s: float) -> bool:
        """The kernel has taken nothing for about so long."""
        return self._full_at_s is not None and time.monotonic() - self._full_at_s >= 0.9 * waited_s

    def wait(self, stream: http2_stream.Stream) -> None:
        """The stream has bytes, or a writer, that wait for the peer."""
        self._held[stream] = None

    def hold(self, change: int) -> None:
        """The peer's windows hold back so many bytes more, or fewer, than before."""
        self._unsent_bytes += change
        if self._transport is None:
            return
        if self._unsent_bytes or self.is_full:
            self.server.unread.enter(self._transport, self._unsent_bytes)
        else:
            self.server.unread.leave(self._transport)

    def abort(self) -> None:
        """Cuts the connection."""
        if self._transport is not None:
            self.server.closed(self)
            self._transport.abort()

    def look(self, now_s: float) -> None:
        """Ends a connection that has had no stream for too long, has not begun in time, or whose peer gives no sign."""
        if self._transport is None:
            return
        bounds = self.server.bounds
        most_s = bounds.idle_s if self._began else bounds.handshake_s
        if not self._streams and most_s is not None and now_s - self._idle_at_s > most_s:
            self.end()
        elif self._asked_at_s is not None:
            if now_s - self._asked_at_s > PROBE_S:
                self.abort()
        elif self._began and now_s - self._heard_at_s > SILENT_S and not self.is_full:
            self._asked_at_s = now_s
            self.write(h2.frame(h2.PING, 0, 0, bytes(8)))

    def end(self) -> None:
        """Ends a connection without streams."""
        self.server.closed(self)
        if self._began:
            self.leave()
        self.close()

    def ask_to_leave(self) -> None:
        """Asks the peer to open further streams elsewhere (RFC 9113, 6.8: the first of two GOAWAY frames)."""
        if self._is_greeted and not self._is_asked:
            self._is_asked = True
            self._go_away(h2.NO_ERROR, last=MOST_STREAM)

    def leave(self) -> None:
        """Tells the peer that no further stream is served."""
        self._has_left = True
        if self._is_greeted:
            self._go_away(h2.NO_ERROR, last=self._last)

    def close(self) -> None:
        """Ends the connection once all is written, or soon if the peer does not read it."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(CUT_S, self._transport.abort)

    # Streams.

    def spend(self, stream: http2_stream.Stream, size: int) -> bool:
        """Takes `size` bytes out of the peer's windows; False if they have less."""
        if size > stream.window or size > self.window:
            return False
        stream.window -= size
        self.window -= size
        self._allowance.owe()
        return True

    def forget(self, stream: http2_stream.Stream) -> None:
        """The stream is over."""
        stream.gone, stream.handler = True, None  # the handler knows the stream: a cycle would keep both
        self._streams.pop(stream.id, None)
        self._held.pop(stream, None)
        stream.counted.release()
        if not self._streams:
            self._idle_at_s = time.monotonic()
            self.server.is_idle(self)

    def _reset(self, stream: http2_stream.Stream, handler: http2_stream.Handler | None = None) -> None:
        """Ends the stream without a word, and tells its handler; it is given where the stream has been finished."""
        stream.drop()
        handler = handler or stream.handler
        self.forget(stream)
        if handler is not None:
            try:
                handler.on_reset()
            except Exception:
                logger.exception("a handler failed")

    def _reset_all(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._reset(stream)

    def _go_away(self, code: int, *, last: int) -> None:
        self.write(h2.frame(h2.GOAWAY, 0, 0, last.to_bytes(4) + code.to_bytes(4)))

    # Frames.

    def _read(self, data: bytes) -> None:
        at = 0
        if not self._began:
            if not data.startswith(h2.PREFACE[: len(data)]):
                raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, "the first bytes are not those of HTTP/2")
            if len(data) < len(h2.PREFACE):
                self._data = data
                return
            self._began, at = True, len(h2.PREFACE)
        end, frames, self._more, self._rest_s = len(data), 0, False, 0.0
        until_s = time.monotonic() + TURN_S
        while end - at >= 9:
            frames += 1
            if frames > TURN_FRAMES or self._rest_s or time.monotonic() > until_s:
                self._more = True
                break
            high, low, kind, flags, stream = h2.FRAME.unpack_from(data, at)
            size = high << 16 | low
            if size > h2.MOST_FRAME_BYTES:
                raise h2.ConnectionBroken(h2.FRAME_SIZE_ERROR, f"a frame has {size} bytes")
            if end - at < 9 + size:
                break
            payload = data[at + 9 : at + 9 + size]
            at += 9 + size
            stream &= MOST_WINDOW_BYTES
            if self._heads.continues is not None and (kind != h2.CONTINUATION or stream != self._heads.continues):
                raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, "a frame stands between the parts of a head")
            if kind == h2.DATA:
                self._on_data(stream, flags, payload)
            elif kind == h2.HEADERS:
                self._on_head_frame(stream, flags, payload)
            elif kind in (h2.RST_STREAM, h2.WINDOW_UPDATE, h2.SETTINGS, h2.PING):
                self._on_control(kind, stream, flags, payload)
            elif kind == h2.CONTINUATION:
                self._on_continuation(flags, payload)
            elif kind == h2.PUSH_PROMISE:
                raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, "a client pushes nothing")
            else:
                self._allowance.spend()
        self._data, self._more = data[at:], self._more or self._rest_s > 0.0

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        size, content = len(payload), h2.unpadded(flags, payload)
        if not content and not flags & h2.END_STREAM:
            self._allowance.spend()
        self._unread += size
        if self._unread >= 8 * WINDOW_BYTES:
            self.write(h2.frame(h2.WINDOW_UPDATE, 0, 0, self._unread.to_bytes(4)))
            self._unread = 0
        stream = self._streams.get(number)
        if stream is None or stream.half_closed:
            if number > self._last and not self._has_left:
                raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, "data of a stream that was not opened")
            self._allowance.spend_late()
            return
        if len(content) < SMALL_BYTES:
            stream.small += 1
            if stream.small > MOST_SMALL:
                handler = stream.handler
                stream.finish(http2_stream.RESOURCE_EXHAUSTED, "the data come in too small frames")
                self._reset(stream, handler)
                return
        stream.unread += size
        if stream.unread >= WINDOW_BYTES // 2:
            self.write(h2.frame(h2.WINDOW_UPDATE, 0, number, stream.unread.to_bytes(4)))
            stream.unread = 0
        stream.receive(content, last=bool(flags & h2.END_STREAM))

    def _on_head_frame(self, number: int, flags: int, payload: bytes) -> None:
        block = h2.unpadded(flags, payload)
        if flags & h2.WITH_PRIORITY:
            block = block[5:]
        if flags & h2.END_HEADERS:
            self._on_head(number, flags, block)
        else:
            self._heads.begin(number, flags, block)

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        self._heads.go_on(payload)
        if flags & h2.END_HEADERS:
            self._on_head(*self._heads.end())
        else:
            self._allowance.spend()

    def _on_head(self, number: int, flags: int, block: bytes) -> None:
        head = self._heads.head(block)
        stream = self._streams.get(number)
        if stream is not None:  # trailers, of which gRPC's clients have none
            if head.error is not None:
                self._allowance.spend(head.frames)
                self.write(h2.frame(h2.RST_STREAM, 0, number, head.error.to_bytes(4)))
                self._reset(stream)
            elif flags & h2.END_STREAM and not stream.half_closed:
                stream.receive(b"", last=True)
            else:
                self._allowance.spend(head.frames)
            return
        if number % 2 == 0:
            raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, f"stream {number} cannot be opened")
        if self._has_left or number <= self._last:  # or the stream ended while its trailers were on their way
            self._allowance.spend(head.frames)
            return
        self._last = number
        refused = h2.REFUSED_STREAM if len(self._streams) >= self.server.bounds.streams else head.error
        if refused is not None:
            self._allowance.spend(head.frames)
            self.write(h2.frame(h2.RST_STREAM, 0, number, refused.to_bytes(4)))
            return
        if not head.is_grpc:
            self._allowance.spend(head.frames)
            self.write(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, number, http2_stream.NOT_GRPC))
            if not flags & h2.END_STREAM:
                self.write(h2.frame(h2.RST_STREAM, 0, number, h2.NO_ERROR.to_bytes(4)))
            return
        stream = http2_stream.Stream(self, number, self._stream_window, head, self.server.partial.hold())
        self._streams[number] = stream
        self.server.is_busy(self)
        self._allowance.owe_call()
        method = self.server.methods.get(head.path)
        if method is None:
            self._allowance.spend(head.frames)
            stream.half_closed = bool(flags & h2.END_STREAM)
            stream.finish(http2_stream.UNIMPLEMENTED, f"there is no {head.path[:60]} here")
            return
        handler = method(stream)
        if not stream.gone:  # it may have refused the call
            stream.handler = handler
        if stream.is_unknown:
            self._allowance.spend(head.frames)
        if flags & h2.END_STREAM:
            stream.receive(b"", last=True)

    def _on_control(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        if kind == h2.SETTINGS:
            self._allowance.spend()
            if not flags & h2.ACK:
                self._on_settings(payload)
            return
        if len(payload) != (8 if kind == h2.PING else 4):
            raise h2.ConnectionBroken(h2.FRAME_SIZE_ERROR, "a frame has the wrong size")
        if kind == h2.PING:
            if flags & h2.ACK:
                self._allowance.spend()  # the peer is asked for few of them
            else:
                self._allowance.spend_owed()
                self.write(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.RST_STREAM:
            stream = self._streams.get(number)
            if stream is None:
                self._allowance.spend_late()
            else:
                costly = not stream.answered and time.monotonic() - stream.opened_at_s < YOUNG_S
                self._reset(stream)
                if costly:
                    self._rest_s = self._given_up.overspend(stream.head.frames)
        else:
            self._on_window_update(number, int.from_bytes(payload) & MOST_WINDOW_BYTES)

    def _on_settings(self, payload: bytes) -> None:
        window = h2.settings(payload).get(h2.INITIAL_WINDOW_SIZE, self._stream_window)
        if window > MOST_WINDOW_BYTES:
            raise h2.ConnectionBroken(h2.FLOW_CONTROL_ERROR, "a window is too large")
        if window != self._stream_window:
            self._allowance.spend(len(self._streams) // STREAMS_A_FRAME)
            for stream in self._streams.values():
                stream.window += window - self._stream_window
            self._stream_window = window
            self._flush()
        self.write(h2.frame(h2.SETTINGS, h2.ACK, 0))

    def _on_window_update(self, number: int, more: int) -> None:
        self._allowance.spend_owed()
        if number == 0:
            self.window += more
            if not more or self.window > MOST_WINDOW_BYTES:
                raise h2.ConnectionBroken(h2.FLOW_CONTROL_ERROR, "a window is too large, or an update is zero")
            self._flush()
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
            stream.flush()

    def _flush(self) -> None:
        """Sends what the windows allow, a frame of each stream in turn."""
        more = True
        while more and self.window > 0:
            more = False
            for stream in list(self._held):
                if self.window <= 0:
                    return
                if stream.flush(1):
                    more = True
                self._held.pop(stream, None)
                if stream.waits:
                    self._held[stream] = None
