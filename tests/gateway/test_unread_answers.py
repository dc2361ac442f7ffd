"""What clients do not read is bounded in sum, and those that take nothing make room."""

import asyncio
import socket
import time
from typing import Any

import pytest

import fake_engine
from tidegate_gateway.edge import http_connection, unread_answers

LONG = 100 * 1024


class Transport(asyncio.Transport):
    """A connection whose client has these bytes to take."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left, self.cut = left, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.cut = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_clients_that_have_taken_nothing_for_a_while_make_room() -> None:
    clock = Clock()
    unread = unread_answers.UnreadAnswers(10 * LONG, 20 * LONG, clock)
    waiting = [Transport(LONG) for _ in range(10)]
    for one in waiting:
        unread.enter(one)
    clock.now_s = unread_answers.PATIENCE_S
    for one in waiting[:5]:
        one.left -= 1
    newest = Transport(LONG)
    unread.enter(newest)
    assert [one.cut for one in waiting] == [False] * 5 + [True] + [False] * 4
    assert not newest.cut
    assert unread.bytes == 10 * LONG - 5


def test_the_clients_are_not_all_looked_at_for_each_block() -> None:
    class Counting(Transport):
        looks = 0

        def get_write_buffer_size(self) -> int:
            Counting.looks += 1
            return self.left

    clock = Clock()
    unread = unread_answers.UnreadAnswers(10 * LONG, 2000 * LONG, clock)
    waiting = [Counting(LONG) for _ in range(1000)]
    for one in waiting:
        unread.enter(one)
        clock.now_s += 1e-4
    assert Counting.looks < 4000, "a look at all for each of them would be half a million"


def test_answers_that_began_just_now_are_cut_above_the_second_bound_only() -> None:
    unread = unread_answers.UnreadAnswers(2 * LONG, 4 * LONG, Clock())
    waiting = [Transport(LONG) for _ in range(5)]
    for one in waiting:
        unread.enter(one)
    assert [one.cut for one in waiting] == [True] + [False] * 4
    assert unread.bytes == 4 * LONG


def test_what_a_transport_does_not_have_yet_counts_too() -> None:
    clock = Clock()
    unread = unread_answers.UnreadAnswers(2 * LONG, 4 * LONG, clock)
    slow = Transport(0)
    unread.enter(slow, 2 * LONG)
    clock.now_s = unread_answers.PATIENCE_S
    unread.enter(slow, 2 * LONG - 10)  # it has taken something
    unread.enter(Transport(LONG))
    assert not slow.cut
    clock.now_s *= 2
    unread.enter(Transport(LONG))
    assert slow.cut


def test_short_rests_do_not_count() -> None:
    unread = unread_answers.UnreadAnswers()
    one = Transport(unread_answers.LONG_BYTES)
    unread.enter(one)
    assert unread.bytes == 0
    unread.leave(one)
    assert unread.bytes == 0


async def test_a_client_that_reads_gets_its_long_answer_although_many_others_do_not_read(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_answers.UnreadAnswers.__init__, "__defaults__", (4_000_000, 4_000_000, time.monotonic))
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 400000}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    loop, sockets = asyncio.get_running_loop(), []
    async with fake_engine.engine(tokens=400_000) as engine, up(engine, store=False) as client:
        host, port = client.url.removeprefix("http://").split(":")
        try:
            for _ in range(6):
                one = socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.setblocking(False)
                sockets.append(one)
                await loop.sock_connect(one, (host, int(port)))
                await loop.sock_sendall(one, head + body)
            await until(lambda: engine.served == 6, within_s=60)
            status, answer, _ = await client.ask("/v1/completions", prompt="x", max_tokens=400_000)
            assert status == 200
            assert len(answer["choices"][0]["text"]) > 2_000_000
        finally:
            for one in sockets:
                one.close()


async def test_a_client_that_is_slow_takes_no_time_from_its_engine(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = http_connection.Connection.write

    async def slow(self: http_connection.Connection, block: bytes, *, last: bool = False) -> None:
        await write(self, block, last=last)
        await asyncio.sleep(0.9)

    monkeypatch.setattr(http_connection.Connection, "write", slow)
    body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 3}
    async with (
        fake_engine.engine(tokens=3, token_s=1.0) as engine,
        up(engine, timeouts={"nextToken": "500ms"}) as client,
        client.http.post(client.url + "/v1/completions", json=body) as response,
    ):
        answer = await response.read()
    assert b"engine_timeout" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")
