"""What a peer of the picker's port may cost: floods of frames, memory, and places."""

import asyncio
import contextlib
import struct
import types

import hpack
import http2_peer
import pytest

from tidegate_gateway import reading_turns
from tidegate_gateway.edge import frame_allowance, http2_connection, http2_frames, http2_heads, unread_answers

FLOODS = [
    "pings",
    "settings",
    "answers to pings",
    "answers to settings",
    "late resets",
    "empty data",
    "padded data",
    "late data",
    "refused streams",
    "unknown methods",
    "further heads",
    "parts of a head",
    "updates of windows",
    "priorities",
    "unknown kinds",
    "large trailers",
    "late trailers",
    "calls without a key",
]


def repeated(times: int) -> bytes:
    """A header of 4 KB, so often. The table of the decoder has it after the first time, so the others take a byte each."""
    return bytes(hpack.Encoder().encode([(b"x", b"a" * 4000)] * times, huffman=False))


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames_that_bring_no_call_ends_the_connection(kind: str) -> None:
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    if kind == "parts of a head":
        made.data_received(frame(http2_frames.HEADERS, 0, 3))
    for number in range(3, 100 * frame_allowance.BURST, 2):  # the allowance fills up with time
        if transport.is_closing():
            break
        match kind:
            case "pings":
                sent = frame(http2_frames.PING, 0, 0, bytes(8))
            case "settings":
                sent = frame(http2_frames.SETTINGS, 0, 0)
            case "answers to pings":
                sent = frame(http2_frames.PING, http2_frames.ACK, 0, bytes(8))
            case "answers to settings":
                sent = frame(http2_frames.SETTINGS, http2_frames.ACK, 0)
            case "late resets":
                reset = frame(http2_frames.RST_STREAM, 0, 3, bytes(4))
                sent = http2_peer.opened(3) * (number == 3) + reset * frame_allowance.LATE
            case "empty data":
                sent = frame(http2_frames.DATA, 0, 1)
            case "padded data":
                sent = frame(http2_frames.DATA, http2_frames.PADDED, 1, b"\x01\x00")
            case "late data":
                sent = http2_peer.opened(number) + frame(http2_frames.RST_STREAM, 0, number, bytes(4)) * (number == 3)
                sent = (sent if number == 3 else b"") + frame(http2_frames.DATA, 0, 3, b"x") * frame_allowance.LATE
            case "refused streams":
                sent = http2_peer.opened(number)
            case "unknown methods":
                sent = http2_peer.opened(number).replace(b"/echo", b"/none")
            case "further heads":
                sent = http2_peer.opened(1)
            case "parts of a head":
                sent = frame(http2_frames.CONTINUATION, 0, 3)
            case "updates of windows":
                sent = frame(http2_frames.WINDOW_UPDATE, 0, 0, (1).to_bytes(4))
            case "large trailers":
                trailers = repeated(http2_heads.MOST_BYTES // 4000 + 1)
                ends = http2_frames.END_HEADERS | http2_frames.END_STREAM
                sent = http2_peer.opened(number) + frame(http2_frames.HEADERS, ends, number, trailers)
            case "late trailers":
                sent = http2_peer.opened(3) + frame(http2_frames.RST_STREAM, 0, 3, bytes(4)) * (number == 3)
            case "calls without a key":
                sent = http2_peer.opened(number).replace(b"/echo", b"/keys")
            case "priorities":
                sent = frame(http2_frames.PRIORITY, 0, 1, bytes(5))
            case _:
                sent = frame(99, 0, 0)
        made.data_received(sent)
    assert transport.is_closing()
    assert transport.written[-4:] == http2_frames.ENHANCE_YOUR_CALM.to_bytes(4)
    assert http2_peer.ECHOES
    assert [echo.resets for echo in http2_peer.ECHOES] == [1] * len(http2_peer.ECHOES)


@pytest.mark.parametrize(
    "method", [pytest.param(b"/echo", id="too large"), pytest.param(b"/none", id="unknown method"),
               pytest.param(b"/keys", id="without a key")]
)  # fmt: skip
async def test_heads_of_many_fields_that_bring_no_call_end_the_connection_soon(method: bytes) -> None:
    fields = 1500 if method == b"/echo" else 900
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE)
    for number in range(1, 13, 2):
        if not transport.is_closing():
            many = [(b"c", b"%d" % (number * fields + each)) for each in range(fields)]
            made.data_received(http2_peer.opened(number, *many, never_indexed=True).replace(b"/echo", method))
            await asyncio.sleep(0)
            while len(made.server.turns):  # it has to wait for its turn
                await asyncio.sleep(0)
    assert transport.is_closing()
    assert transport.written[-4:] == http2_frames.ENHANCE_YOUR_CALM.to_bytes(4)


async def test_a_peer_that_breaks_the_protocol_and_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "CUT_S", 0.0)
    made, transport = http2_peer.connection()
    made.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert (transport.closed, transport.aborted) == (True, False)
    await asyncio.sleep(0.01)
    assert transport.aborted


async def test_a_peer_whose_windows_hold_back_too_much_is_cut_off() -> None:
    made, transport = http2_peer.connection()
    made.server.unread = unread_answers.UnreadAnswers(300_000, 300_000)
    settings = struct.pack(">HI", http2_frames.INITIAL_WINDOW_SIZE, 0)
    made.data_received(http2_frames.PREFACE + http2_frames.frame(http2_frames.SETTINGS, 0, 0, settings))
    answer = b"\0" + (90_000).to_bytes(4) + bytes(90_000)
    for number in (1, 3, 5):
        parts = [answer[at : at + 16_000] for at in range(0, len(answer), 16_000)]
        made.data_received(
            http2_peer.opened(number) + b"".join(http2_frames.frame(http2_frames.DATA, 0, number, x) for x in parts)
        )
    assert made.server.unread.bytes == 3 * 90_005
    reset = http2_frames.frame(http2_frames.RST_STREAM, 0, 3, bytes(4))
    made.data_received(reset)
    assert made.server.unread.bytes == 2 * 90_005
    assert not transport.aborted
    for number in (7, 9):
        made.data_received(
            http2_peer.opened(number) + b"".join(http2_frames.frame(http2_frames.DATA, 0, number, x) for x in parts)
        )
    assert transport.aborted
    made.connection_lost(None)
    assert made.server.unread.bytes == 0


async def test_a_peer_that_gives_up_many_calls_is_read_more_slowly_and_its_other_calls_go_on() -> None:
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    free, frame = round(frame_allowance.GIVEN_UP * frame_allowance.FIRST), http2_frames.frame
    calls = 2 * free
    numbers = range(3, 3 + 2 * calls, 2)
    given_up = [http2_peer.opened(each) + frame(http2_frames.RST_STREAM, 0, each, bytes(4)) for each in numbers]
    made.data_received(b"".join(given_up))
    seen = len(http2_peer.ECHOES)
    assert free <= seen < calls, "the others have not been read yet"
    began_s = asyncio.get_running_loop().time()
    while len(http2_peer.ECHOES) < 1 + calls:
        await asyncio.sleep(0.01)
    took_s = asyncio.get_running_loop().time() - began_s
    assert took_s > 0.8 * (calls - seen) / (frame_allowance.GIVEN_UP * frame_allowance.PER_S)
    made.data_received(frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x"))
    assert transport.written.endswith(b"\0\0\0\0\1x")
    assert not transport.is_closing()


async def test_a_client_that_opens_the_windows_of_its_calls_before_there_are_data_sends_no_flood() -> None:
    made, transport = http2_peer.connection(streams=1000)
    made.data_received(http2_frames.PREFACE)
    for number in range(1, 8 * frame_allowance.FIRST, 2):
        more = http2_frames.frame(http2_frames.WINDOW_UPDATE, 0, number, (5).to_bytes(4))
        made.data_received(http2_peer.opened(number) + more)
        made.data_received(http2_frames.frame(http2_frames.WINDOW_UPDATE, 0, 0, (5).to_bytes(4)))
    assert not transport.is_closing()


async def test_streams_that_are_reset_after_their_answer_are_no_flood() -> None:
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE)
    for number in range(1, 4 * frame_allowance.BURST, 2):
        message = http2_frames.frame(http2_frames.DATA, 0, number, b"\0\0\0\0\1x")
        reset = http2_frames.frame(http2_frames.RST_STREAM, 0, number, bytes(4))
        made.data_received(http2_peer.opened(number) + message + reset)
    assert not transport.is_closing()


async def test_messages_that_do_not_arrive_as_a_whole_are_bounded_in_sum() -> None:
    made, transport = http2_peer.connection()
    server, frame = made.server, http2_frames.frame
    made.data_received(http2_frames.PREFACE)
    begin, part = b"\0" + (99_000).to_bytes(4), bytes(16_000)
    for number in range(1, 13, 2):
        pieces = [begin, *[part] * 5]
        made.data_received(
            http2_peer.opened(number) + b"".join(frame(http2_frames.DATA, 0, number, piece) for piece in pieces)
        )
        assert server.partial.used <= 450_000
    assert b"grpc-status\x018" in transport.written, "RESOURCE_EXHAUSTED"
    assert server.partial.used == 3 * 80_005
    made.data_received(frame(http2_frames.RST_STREAM, 0, 1, bytes(4)))
    assert server.partial.used == 2 * 80_005
    made.connection_lost(None)
    assert server.partial.used == 0


async def test_a_new_connection_takes_the_place_of_one_without_streams() -> None:
    first, one = http2_peer.connection()
    made, two = first.server(), http2_peer.Transport()
    made.connection_made(two)
    assert (one.closed, two.closed) == (True, False)
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    third = http2_peer.Transport()
    first.server().connection_made(third)
    assert (two.closed, third.aborted) == (False, True)


async def test_a_silent_peer_is_asked_for_a_sign_and_cut_off_if_it_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, frame = 0.0, http2_frames.frame
    monkeypatch.setattr(http2_connection, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    ping = frame(http2_frames.PING, 0, 0, bytes(8))

    def looked(after_s: float) -> tuple[int, bool]:
        """The pings that came so far, and whether the connection is cut, at a look some seconds later."""
        nonlocal now_s
        now_s += after_s
        made.look(now_s)
        return transport.written.count(ping), transport.aborted

    assert looked(http2_connection.SILENT_S) == (0, False)
    made.data_received(frame(http2_frames.WINDOW_UPDATE, 0, 0, (1).to_bytes(4)))
    assert looked(http2_connection.SILENT_S) == (0, False), "it gave a sign by itself"
    assert looked(1) == (1, False)
    assert looked(http2_connection.PROBE_S) == (1, False)
    made.data_received(frame(http2_frames.PING, http2_frames.ACK, 0, bytes(8)))
    assert looked(http2_connection.SILENT_S) == (1, False), "it has answered"
    made.pause_writing()
    assert looked(1) == (1, False), "no ping would reach a peer that does not read"
    made.resume_writing()
    assert looked(0) == (2, False)
    assert looked(http2_connection.PROBE_S) == (2, False)
    assert looked(1) == (2, True)
    assert made not in made.server.connections, "its place is free"


@pytest.mark.parametrize("takes", [False, True])
async def test_a_call_that_is_given_up_ends_a_connection_only_if_that_took_nothing_in_the_meantime(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    now_s, frame = 0.0, http2_frames.frame
    monkeypatch.setattr(http2_connection, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    made, transport = http2_peer.connection()
    settings = struct.pack(">HI", http2_frames.INITIAL_WINDOW_SIZE, 0)
    made.data_received(http2_frames.PREFACE + frame(http2_frames.SETTINGS, 0, 0, settings) + http2_peer.opened(1))
    made.data_received(frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x"))
    stream = http2_peer.ECHOES[0].stream
    assert stream.is_held
    stream.give_up(10.0)
    assert not transport.aborted, "the window of a stream says nothing of the connection"
    made.pause_writing()
    now_s = 5.0
    stream.give_up(10.0)
    assert not transport.aborted, "another stream filled it just now"
    if takes:
        made.resume_writing()
        made.pause_writing()
    now_s = 10.0
    stream.give_up(10.0)
    assert transport.aborted != takes


async def test_a_stream_whose_data_come_in_very_many_small_frames_ends_and_the_others_go_on() -> None:
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1) + http2_peer.opened(3))
    begin = b"\0" + (90_000).to_bytes(4)
    made.data_received(frame(http2_frames.DATA, 0, 1, begin))
    for _ in range(http2_connection.MOST_SMALL // 1000 + 2):
        made.data_received(frame(http2_frames.DATA, 0, 1, b"x") * 1000)
    assert b"grpc-status\x018" in transport.written, "RESOURCE_EXHAUSTED"
    assert [echo.resets for echo in http2_peer.ECHOES] == [1, 0]
    made.data_received(frame(http2_frames.DATA, 0, 3, b"\0\0\0\0\1x"))
    assert transport.written.endswith(b"\0\0\0\0\1x")
    assert not transport.is_closing()


async def test_one_turn_of_the_event_loop_reads_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "TURN_FRAMES", 100)
    made, transport = http2_peer.connection()
    message = http2_frames.frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x")
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1) + message * 1000)
    first = transport.written.count(message)
    assert first < 100
    async with asyncio.timeout(20):
        while transport.written.count(message) < 1000:
            before = transport.written.count(message)
            await asyncio.sleep(0)
            assert transport.written.count(message) - before <= 200


async def test_the_allowance_of_frames_fills_up_with_time() -> None:
    now_s = 0.0
    allowance = frame_allowance.FrameAllowance(lambda: now_s)

    def spent() -> int:
        count = 0
        with contextlib.suppress(http2_frames.ConnectionBroken):
            while count < 2 * frame_allowance.BURST:
                allowance.spend()
                count += 1
        return count

    assert spent() == frame_allowance.FIRST
    now_s = 10 / frame_allowance.PER_S
    assert spent() == 10
    now_s = 3600.0
    assert spent() == frame_allowance.BURST


async def test_pings_of_a_client_that_measures_the_way_of_its_data_are_no_flood() -> None:
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    for _ in range(10 * frame_allowance.BURST):
        made.data_received(frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x") + frame(http2_frames.PING, 0, 0, bytes(8)))
    assert not transport.is_closing()


async def test_a_head_with_a_bad_header_ends_its_stream_and_the_others_go_on() -> None:
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    made.data_received(http2_peer.opened(3, (b"x", b"a\x01b")) + http2_peer.opened(5, (b"x", b"a\tb")))
    large = http2_peer.opened(7, (b"x", b"a" * 16_000))
    made.data_received(large)
    assert frame(http2_frames.RST_STREAM, 0, 3, http2_frames.PROTOCOL_ERROR.to_bytes(4)) in transport.written
    for number in (1, 5, 7):
        made.data_received(frame(http2_frames.DATA, 0, number, b"\0\0\0\0\1x"))
        assert frame(http2_frames.DATA, 0, number, b"\0\0\0\0\1x") in transport.written
    assert not transport.is_closing()


@pytest.mark.parametrize("of", ["head", "trailers"])
@pytest.mark.parametrize(
    ("block", "parts", "ends_stream", "ends_connection"),
    [
        (repeated(7), 1, None, None),
        (repeated(1), 100, None, None),
        (bytes(hpack.Encoder().encode([(b"x", b"a\x01b")])), 1, http2_frames.PROTOCOL_ERROR, None),
        (repeated(http2_heads.MOST_BYTES // 4000 + 1), 1, http2_frames.ENHANCE_YOUR_CALM, None),
        (repeated(http2_heads.READ_BYTES // 4000 + 1), 1, None, http2_frames.COMPRESSION_ERROR),
        (repeated(1) * 15, 15, http2_frames.ENHANCE_YOUR_CALM, None),
        (repeated(1) * 17, 17, None, http2_frames.ENHANCE_YOUR_CALM),
        (repeated(1), 20 * frame_allowance.BURST, None, http2_frames.ENHANCE_YOUR_CALM),
    ],
    ids=["large", "parts", "malformed", "too large", "far too large", "Envoy's", "too large sent", "too many parts"],
)
async def test_the_trailers_of_a_request_have_the_bounds_of_its_head(
    of: str, block: bytes, parts: int, ends_stream: int | None, ends_connection: int | None
) -> None:
    made, transport = http2_peer.connection()
    frame, message = http2_frames.frame, b"\0\0\0\0\1x"
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    head = http2_peer.opened(3)
    if of == "trailers":
        made.data_received(head + frame(http2_frames.DATA, 0, 3, message))
    else:
        block = head[http2_frames.FRAME.size :] + block
    size = -(-len(block) // parts)
    made.data_received(frame(http2_frames.HEADERS, http2_frames.END_STREAM, 3, block[:size]))
    for at in range(size, len(block), size):
        made.data_received(frame(http2_frames.CONTINUATION, 0, 3, block[at : at + size]))
    made.data_received(frame(http2_frames.CONTINUATION, http2_frames.END_HEADERS, 3))
    if ends_connection is not None:
        assert transport.closed
        assert transport.written[-4:] == ends_connection.to_bytes(4)
        return
    reset = b"" if ends_stream is None else frame(http2_frames.RST_STREAM, 0, 3, ends_stream.to_bytes(4))
    assert (b"grpc-status\x010" in transport.written, transport.written.endswith(reset)) == (ends_stream is None, True)
    made.data_received(frame(http2_frames.DATA, 0, 1, message))
    assert transport.written.endswith(frame(http2_frames.DATA, 0, 1, message)), "the other stream goes on"


async def test_a_request_that_is_no_call_of_grpc_has_the_status_415() -> None:
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1).replace(b"application/grpc", b"application/json"))
    assert http2_frames.frame(http2_frames.HEADERS, 5, 1, b"\x08\x03415") in transport.written
    assert not http2_peer.ECHOES


async def test_streams_that_come_after_the_end_of_a_connection_was_told_are_not_served() -> None:
    made, transport = http2_peer.connection()
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    made.leave()
    made.data_received(http2_peer.opened(3) + http2_frames.frame(http2_frames.DATA, 0, 3, b"\0\0\0\0\1x"))
    made.data_received(http2_frames.frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x"))
    assert len(http2_peer.ECHOES) == 1
    assert transport.written.endswith(b"\0\0\0\0\1x"), "what was open goes on"


async def test_trailers_that_come_after_their_stream_was_ended_do_not_end_the_others() -> None:
    made, transport = http2_peer.connection()
    frame, end = http2_frames.frame, http2_frames.END_HEADERS | http2_frames.END_STREAM
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1) + http2_peer.opened(3))
    http2_peer.ECHOES[0].stream.finish(16, "send a key")
    made.data_received(frame(http2_frames.DATA, 0, 1, b"\0\0\0\0\1x") + frame(http2_frames.HEADERS, end, 1))
    made.data_received(frame(http2_frames.DATA, 0, 3, b"\0\0\0\0\1x"))
    assert transport.written.endswith(b"\0\0\0\0\1x")
    assert not transport.is_closing()


async def test_data_after_the_end_of_a_stream_reach_no_handler() -> None:
    made, _ = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE + http2_peer.opened(1))
    echo = http2_peer.ECHOES[0]
    ends = 0

    def count() -> None:
        nonlocal ends
        ends += 1

    echo.on_half_close = count  # type: ignore[method-assign]
    made.data_received(frame(http2_frames.DATA, http2_frames.END_STREAM, 1) * 50)
    made.data_received(http2_peer.opened(1, ends=True) * 50)
    assert ends == 1


async def test_streams_share_the_window_of_their_connection() -> None:
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    made.data_received(http2_frames.PREFACE)
    settings = struct.pack(">HI", http2_frames.INITIAL_WINDOW_SIZE, 1 << 20)
    made.data_received(frame(http2_frames.SETTINGS, 0, 0, settings))
    payload = b"\0" + (90_000).to_bytes(4) + bytes(90_000)
    for number in (1, 3):
        parts = [payload[at : at + 16_000] for at in range(0, len(payload), 16_000)]
        made.data_received(http2_peer.opened(number) + b"".join(frame(http2_frames.DATA, 0, number, x) for x in parts))
    before = len(transport.written)
    for _ in range(4):
        made.data_received(frame(http2_frames.WINDOW_UPDATE, 0, 0, (16_384).to_bytes(4)))
    sent = transport.written[before:]
    counts, at = {1: 0, 3: 0}, 0
    while at < len(sent):
        high, low, kind, _, number = http2_frames.FRAME.unpack_from(sent, at)
        at += 9 + (high << 16 | low)
        if kind == http2_frames.DATA:
            counts[number] += high << 16 | low
    assert not transport.is_closing()
    assert min(counts.values()) >= 16_384


async def test_a_connection_waits_for_its_turn_when_the_time_of_a_step_is_spent() -> None:
    made, _ = http2_peer.connection(takes_turns=True)
    made.server.turns.spend(2 * reading_turns.STEP_S)
    call = http2_frames.PREFACE + http2_peer.opened(1)
    made.data_received(call[:-3])
    made.data_received(call[-3:])
    assert not http2_peer.ECHOES
    while not http2_peer.ECHOES:
        await asyncio.sleep(0)
    made.server.turns.spend(2 * reading_turns.STEP_S)
    made.data_received(http2_peer.opened(3))
    assert len(http2_peer.ECHOES) == 1, "calls that it has brought change nothing"
    while len(http2_peer.ECHOES) < 2:
        await asyncio.sleep(0)


async def test_what_waits_for_a_turn_has_a_bound() -> None:
    turns = reading_turns.ReadingTurns()
    assert not turns.must_wait(1)
    turns.spend(2 * reading_turns.STEP_S)
    assert turns.must_wait(reading_turns.MOST_BYTES - 1)
    assert turns.must_wait(1)
    assert not turns.must_wait(1)
    turns.waited(1)
    assert turns.must_wait(1)
    await asyncio.sleep(0)
    assert not turns.must_wait(0), "another step has its own time"


async def test_changes_of_the_window_count_by_the_streams_that_they_concern() -> None:
    made, transport = http2_peer.connection(streams=1000)
    made.data_received(http2_frames.PREFACE)
    for number in range(900):
        made.data_received(http2_peer.opened(2 * number + 1))
        await asyncio.sleep(0)
    assert not transport.closed
    for window in range(1000, 1020):
        settings = struct.pack(">HI", http2_frames.INITIAL_WINDOW_SIZE, window)
        made.data_received(http2_frames.frame(http2_frames.SETTINGS, 0, 0, settings))
        await asyncio.sleep(0)
    assert transport.closed
