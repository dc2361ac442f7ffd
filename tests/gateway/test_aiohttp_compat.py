"""aiohttp still has the private hooks that `edge.http_listener` uses; this test fails first when aiohttp moves."""

import asyncio
import inspect

import pytest
from aiohttp import base_protocol, http_exceptions, web, web_protocol
from aiohttp.http_writer import StreamWriter


@pytest.mark.parametrize("name", ["_drain_helper", "connection_made", "handle_error"])
def test_a_connection_has_the_methods_that_ours_overrides(name: str) -> None:
    assert callable(getattr(web_protocol.RequestHandler, name))


def test_the_drain_waiter_and_the_transport_are_attributes_of_a_connection() -> None:
    assert {"_drain_waiter", "transport"} <= set(base_protocol.BaseProtocol.__slots__)
    assert inspect.iscoroutinefunction(base_protocol.BaseProtocol._drain_helper)


async def test_a_server_keeps_its_loop_its_options_and_its_connections() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    server = web.Server(handler, max_headers=7, lingering_time=3.0)
    assert server._loop is asyncio.get_running_loop()
    assert server._kwargs == {"max_headers": 7, "lingering_time": 3.0}
    assert list(server.connections) == []
    for name in ("connection_made", "connection_lost", "pre_shutdown", "shutdown"):
        assert callable(getattr(server, name))


def test_a_connection_takes_the_options_that_ours_sets() -> None:
    options = set(inspect.signature(web_protocol.RequestHandler.__init__).parameters)
    assert {
        "keepalive_timeout",
        "lingering_time",
        "auto_decompress",
        "max_line_size",
        "max_field_size",
        "max_headers",
        "access_log",
        "loop",
    } <= options


def test_a_request_takes_what_our_factory_gives_it() -> None:
    names = list(inspect.signature(web.BaseRequest.__init__).parameters)[1:7]
    assert names == ["message", "payload", "protocol", "payload_writer", "task", "loop"]


def test_the_writer_counts_what_it_has_sent() -> None:
    assert "output_size" in dir(StreamWriter)


def test_the_parser_tells_a_long_line_by_its_limit() -> None:
    assert http_exceptions.LineTooLong("x", 8000).args[1] == 8000
    for kind in ("InvalidHeader", "InvalidURLError", "BadHttpMethod", "BadStatusLine"):
        assert issubclass(getattr(http_exceptions, kind), http_exceptions.HttpProcessingError)
