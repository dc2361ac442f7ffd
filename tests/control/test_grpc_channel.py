"""Calls to a server that answers with any frames, and the pace at which they are read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import h2.connection
import h2.settings
import pytest
import uvloop

from tidegate_control import control_client, control_contract, control_server, frame_pace, grpc_channel
from tidegate_gateway.edge.http2_frames import frame

METHOD = "/service/Method"
OK = [("grpc-status", "0")]
HEAD = [(":status", "200"), ("content-type", "application/grpc")]


SETTINGS, PING, UNKNOWN, EMPTY_DATA = frame(4, 0, 0), frame(6, 0, 0, bytes(8)), frame(0x20, 0, 0), frame(0, 0, 1)


def message(content: bytes, *, compressed: int = 0, size: int | None = None) -> bytes:
    return bytes((compressed,)) + (len(content) if size is None else size).to_bytes(4) + content


Answer = Callable[[h2.connection.H2Connection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def calling(answer: Answer) -> AsyncIterator[grpc_channel.Channel]:
    """A channel to a server that reads one whole request, sends what `answer` leaves in the connection, and waits."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        http2.initiate_connection()
        writer.write(http2.data_to_send())
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                while data := await reader.read(65536):
                    if any(isinstance(event, h2.events.StreamEnded) for event in http2.receive_data(data)):
                        await answer(http2, reader, writer)
                        writer.write(http2.data_to_send())
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    channel = grpc_channel.Channel(
        f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
        metadata={"x-name": "value"},
        most_message_bytes=64 * 1024,
    )
    try:
        yield channel
    finally:
        await channel.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def failure(answer: Answer, *, timeout_s: float = 20.0) -> str:
    async with calling(answer) as channel:
        with pytest.raises(grpc_channel.CallFailed) as failed:
            await channel.call(METHOD, b"", timeout_s=timeout_s)
        return str(failed.value)


async def test_an_answer_has_one_message_and_calls_share_the_connection() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        peers.add(context.peer())
        assert ("x-name", "value") in (context.invocation_metadata() or ())
        return request

    peers: set[str] = set()
    server = grpc.aio.server()
    handlers = {"Method": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address, metadata = f"127.0.0.1:{port}", {"x-name": "value"}
    channel = grpc_channel.Channel(address, metadata=metadata, most_message_bytes=64 * 1024)
    fresh = grpc_channel.Channel(address, metadata=metadata, most_message_bytes=64 * 1024)
    try:
        sent = [bytes(size) for size in (0, 1, 16_000)]
        received = await asyncio.gather(*(channel.call(METHOD, request, timeout_s=20.0) for request in sent))
        assert received == sent
        assert len(peers) == 1
        longest = bytes(grpc_channel.MOST_REQUEST_BYTES - grpc_channel.PREFIX_BYTES)
        assert await fresh.call(METHOD, longest, timeout_s=20.0) == longest
        with pytest.raises(grpc_channel.CallFailed, match="RESOURCE_EXHAUSTED: a request has") as failed:
            await fresh.call(METHOD, longest + b"x", timeout_s=20.0)
        assert not failed.value.is_unreachable
    finally:
        await asyncio.gather(channel.close(), fresh.close())
        await server.stop(0)


def test_a_gateway_asks_an_engine_in_the_event_loop_of_uvloop() -> None:
    address = "unix:@tidegate-uvloop-test"
    stop = control_server.serve(
        control_contract.Fallback("no hook", policy="priority"), address=address, engine_version="1"
    ).stop

    async def ask() -> None:
        client = control_client.EngineClient(address)
        state = await client.get_state(timeout_s=20.0)
        assert state is not None
        assert state.fallback_reason == "no hook"
        await client.close()
        async with calling(_floods_with(PING)) as channel:
            with pytest.raises(grpc_channel.CallFailed, match="DEADLINE_EXCEEDED"):
                await channel.call(METHOD, b"", timeout_s=2.0)
            assert channel._connection is not None
            assert channel._connection._pace.counted >= frame_pace.BURST

    try:
        uvloop.run(ask())
    finally:
        stop()


def _floods_with(flood: bytes) -> Answer:
    async def answer(http2: object, reader: object, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(flood * 100)
                await writer.drain()

    return answer


async def test_the_longest_message_passes_the_window() -> None:
    content = bytes(64 * 1024)

    async def answer(http2: h2.connection.H2Connection, reader: asyncio.StreamReader, writer: object) -> None:
        http2.send_headers(1, HEAD)
        left = message(content)
        while left:
            size = min(http2.local_flow_control_window(1), 16_384, len(left))
            if size:
                http2.send_data(1, left[:size])
                left = left[size:]
            else:
                http2.receive_data(await reader.read(65536))
            assert isinstance(writer, asyncio.StreamWriter)
            writer.write(http2.data_to_send())
        http2.send_headers(1, OK, end_stream=True)

    async with calling(answer) as channel:
        assert await channel.call(METHOD, b"", timeout_s=20.0) == content


async def test_messages_that_were_not_read_before_the_answer_ended_are_read_beside_another_call() -> None:
    sent = [bytes((number,)) * 2_000 for number in range(20)]

    async def answer(http2: h2.connection.H2Connection, reader: object, writer: object) -> None:
        stream_id = http2.highest_inbound_stream_id
        http2.send_headers(stream_id, HEAD)
        for content in sent if stream_id == 1 else sent[:1]:
            http2.send_data(stream_id, message(content))
        http2.send_headers(stream_id, OK, end_stream=True)

    async with calling(answer) as channel:
        received = []
        async for content in channel.stream(METHOD, b""):
            received.append(content)
            if len(received) in (2, 3):
                assert await channel.call(METHOD, b"", timeout_s=20.0) == sent[0]
        assert received == sent


async def test_an_answer_is_whole_before_the_server_announces_the_end_of_the_connection() -> None:
    content = bytes(grpc_channel.READ_BYTES + 100)

    async def answer(http2: h2.connection.H2Connection, reader: object, writer: object) -> None:
        http2.send_headers(1, HEAD)
        http2.send_data(1, message(content))
        http2.send_headers(1, OK, end_stream=True)
        http2.close_connection()

    async with calling(answer) as channel:
        assert await channel.call(METHOD, b"", timeout_s=20.0) == content


async def test_a_call_that_connects_while_its_channel_is_closed_fails_and_leaves_no_connection() -> None:
    async def answer(http2: object, reader: object, writer: object) -> None: ...

    async with calling(answer) as channel:
        call = asyncio.create_task(channel.call(METHOD, b"", timeout_s=20.0))
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(grpc_channel.CallFailed, match="the caller has ended the connection"):
            await call
        assert channel._connection is None or channel._connection.ended
        with pytest.raises(grpc_channel.CallFailed, match="the caller has ended the connection"):
            await channel.call(METHOD, b"", timeout_s=20.0)


async def test_a_server_that_ends_its_side_and_reads_nothing_fails_the_call_at_once() -> None:
    async def answer(http2: object, reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await asyncio.sleep(60.0)

    async with calling(answer) as channel:
        with pytest.raises(grpc_channel.CallFailed, match="the server ends the connection"):
            await channel.call(METHOD, bytes(30_000), timeout_s=20.0)


async def test_tcp_notices_within_minutes_that_the_machine_of_a_server_is_gone() -> None:
    async def answer(http2: object, reader: object, writer: object) -> None: ...

    async with calling(answer) as channel:
        with pytest.raises(grpc_channel.CallFailed):
            await channel.call(METHOD, b"", timeout_s=0.1)
        assert channel._connection is not None
        assert channel._connection._transport is not None
        connected = channel._connection._transport.get_extra_info("socket")
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [connected.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [30, 10, 3, 60_000]


@pytest.mark.parametrize(
    ("body", "trailers", "says"),
    [
        (b"", OK, "INTERNAL: the answer does not have one message"),
        (message(b"a") + message(b"b"), OK, "INTERNAL: the answer does not have one message"),
        (message(b"a", size=2), OK, "INTERNAL: the answer does not have one message"),
        (message(b"a", compressed=1), OK, "INTERNAL: the answer is compressed"),
        (message(b"a", size=65_537), OK, "RESOURCE_EXHAUSTED: a message has 65537 bytes"),
        (message(b"a"), [("x", "y")], "UNKNOWN: the answer ended without a status"),
        (message(b"a"), [("grpc-status", "99")], "UNKNOWN: "),
        (message(b"a"), [("grpc-status", "x")], "UNKNOWN: "),
        (b"", [("grpc-status", "7"), ("grpc-message", "not%20for%20you")], "PERMISSION_DENIED: not for you"),
        (b"", [("grpc-status", "7"), ("grpc-message", "%ff" * 2000)], "PERMISSION_DENIED: " + "\ufffd" * 1000),
    ],
)
async def test_an_answer_that_is_not_as_it_should_be_fails_with_a_sentence(
    body: bytes, trailers: list[tuple[str, str]], says: str
) -> None:
    async def answer(http2: h2.connection.H2Connection, reader: object, writer: object) -> None:
        http2.send_headers(1, HEAD)
        http2.send_data(1, body)
        http2.send_headers(1, trailers, end_stream=True)

    assert await failure(answer) == says


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("503", "UNAVAILABLE: HTTP status 503"),
        ("418", "UNKNOWN: HTTP status 418"),
        ("4" * 8000, "UNKNOWN: HTTP status " + "4" * 988),
    ],
)
async def test_an_answer_of_a_server_that_speaks_no_grpc_is_named_by_its_status(status: str, says: str) -> None:
    async def answer(http2: h2.connection.H2Connection, reader: object, writer: object) -> None:
        http2.send_headers(1, [(":status", status)], end_stream=True)

    assert await failure(answer) == says


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(20), "UNAVAILABLE: the server breaks the protocol: "),
        (
            b"\xff\xff\xff" + bytes(6),
            "UNAVAILABLE: the server breaks the protocol: TooLong('a frame of 16777215 bytes')",
        ),
        (frame(7, 0, 0, bytes(8)), "UNAVAILABLE: the server ends the connection"),
        (frame(3, 0, 1, b"\0\0\0\2"), "UNAVAILABLE: reset by the server: "),
        (frame(1, 4, 2, b"\x82"), "UNAVAILABLE: the server breaks the protocol: "),
        (frame(5, 4, 1, b"\0\0\0\2\x82"), "UNAVAILABLE: the server breaks the protocol: "),
        (frame(1, 4, 1, b"\x3f\xff\xff\xff\xff\xff"), "UNAVAILABLE: the server breaks the protocol: "),
    ],
)
async def test_bytes_that_are_no_answer_end_the_connection_and_the_next_call_makes_another(
    sent: bytes, says: str
) -> None:
    served = 0

    async def answer(http2: h2.connection.H2Connection, reader: object, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        if served == 1:
            writer.write(sent)
        else:
            http2.send_headers(1, HEAD)
            http2.send_data(1, message(b"whole"))
            http2.send_headers(1, OK, end_stream=True)

    async with calling(answer) as channel:
        with pytest.raises(grpc_channel.CallFailed) as failed:
            await channel.call(METHOD, b"", timeout_s=20.0)
        assert str(failed.value).startswith(says)
        assert failed.value.is_unreachable
        if "reset" not in says:
            assert await channel.call(METHOD, b"", timeout_s=20.0) == b"whole"


async def test_a_server_that_does_not_answer_fails_the_call_in_time() -> None:
    async def answer(http2: object, reader: object, writer: object) -> None: ...

    assert await failure(answer, timeout_s=0.1) == "DEADLINE_EXCEEDED: no answer within 0.1 s"


async def test_a_server_that_admits_no_message_gets_no_call() -> None:
    async def answer(http2: h2.connection.H2Connection, reader: object, writer: asyncio.StreamWriter) -> None:
        http2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        http2.send_headers(1, HEAD)
        http2.send_data(1, message(b"a"))
        http2.send_headers(1, OK, end_stream=True)
        writer.write(http2.data_to_send())

    async with calling(answer) as channel:
        assert await channel.call(METHOD, b"", timeout_s=20.0) == b"a"
        with pytest.raises(grpc_channel.CallFailed, match="UNAVAILABLE: the server takes no call"):
            await channel.call(METHOD, b"b", timeout_s=20.0)


@pytest.mark.parametrize("flood", [SETTINGS, PING, UNKNOWN, EMPTY_DATA, SETTINGS + PING])
async def test_frames_that_bring_nothing_are_read_at_a_bounded_pace(flood: bytes) -> None:
    """The server reads what its frames cause, so that it holds nothing back."""
    clock = asyncio.get_running_loop().time

    async def answer(http2: h2.connection.H2Connection, reader: asyncio.StreamReader, writer: object) -> None:
        assert isinstance(writer, asyncio.StreamWriter)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        http2.send_headers(1, HEAD)
        writer.write(http2.data_to_send())
        drops = asyncio.create_task(drop(reader))
        while not reader.at_eof():
            writer.write(flood * 100)
            await writer.drain()
        await drops

    async def drop(reader: asyncio.StreamReader) -> None:
        while await reader.read(65536):
            pass

    began_s = clock()
    async with calling(answer) as channel:
        with pytest.raises(grpc_channel.CallFailed, match="DEADLINE_EXCEEDED"):
            await channel.call(METHOD, b"", timeout_s=1.5)
        connection = channel._connection
        assert connection is not None
        assert connection._pace.counted >= frame_pace.BURST
        most = frame_pace.BURST + (clock() - began_s) * frame_pace.FRAMES_PER_S + grpc_channel.READ_BYTES
        assert connection._pace.counted <= most


async def test_a_server_that_does_not_read_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_channel, "MOST_UNREAD_BYTES", 1000)
    monkeypatch.setattr(frame_pace, "BURST", 1e9)

    async def answer(http2: object, reader: object, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(PING * 1000)
                await writer.drain()

    assert await failure(answer, timeout_s=120.0) == "UNAVAILABLE: the server does not read"


def test_the_pace_counts_frames_however_their_bytes_arrive() -> None:
    data = SETTINGS + PING + frame(0, 0, 1, bytes(1000)) + frame(1, 0, 1, bytes(640)) + UNKNOWN
    for size in (1, 2, 9, 10, 17, len(data)):
        pace = frame_pace.FramePace(lambda: 0.0)
        for at in range(0, len(data), size):
            assert pace.read(data[at : at + size]) == 0.0
        assert pace.counted == 5 + 10, "a head of 640 bytes counts as eleven frames"


def test_a_frame_longer_than_we_admit_is_refused_before_its_bytes_come() -> None:
    pace = frame_pace.FramePace(lambda: 0.0)
    pace.read(frame(0, 0, 0, bytes(frame_pace.LONGEST_BYTES)))
    with pytest.raises(frame_pace.TooLong, match="a frame of 16385 bytes"):
        pace.read(frame(0, 0, 0, bytes(frame_pace.LONGEST_BYTES + 1))[: frame_pace.HEAD_BYTES])


def test_the_pace_lets_a_burst_pass_and_then_so_many_frames_a_second() -> None:
    now_s = 0.0
    pace = frame_pace.FramePace(lambda: now_s)
    assert pace.read(PING * int(frame_pace.BURST)) == 0.0
    assert pace.read(PING * 50) == pytest.approx(50 / frame_pace.FRAMES_PER_S)
    now_s = 60.0
    assert pace.read(PING * int(frame_pace.BURST)) == 0.0
    assert pace.read(PING) > 0.0
