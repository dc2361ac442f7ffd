"""The least that a relay over the gateway's own connections does: it forwards each body to one engine and decides nothing.

    python benchmarks/own_relay.py --config FILE

Its connections are `edge/http_connection.py` and `http_client.py`, with all their bounds. `gateway_cpu` compares it with
relays over other libraries (docs/decisions/0016).
"""

import argparse
import asyncio
import json
import pathlib

import uvloop

from tidegate_gateway import gateway_settings, http_client
from tidegate_gateway.edge import http_connection, http_listener, http_messages

PATHS = ("/v1/chat/completions", "/v1/completions")


async def serve(settings: dict[str, object]) -> None:
    listen, (engine,) = settings["listen"], settings["engines"]  # type: ignore[misc]
    origin = str(engine["url"])  # type: ignore[has-type]
    engines = http_client.Connections(connect_s=5.0)

    async def forward(
        request: http_messages.Request, connection: http_connection.Connection
    ) -> http_messages.Response | None:
        upstream = await engines.get(origin)
        try:
            _, start = http_client.request_start("POST", origin + request.path)
            kind, body = b"Content-Type: application/json\r\n", request.body
            await upstream.send(b"%s%sContent-Length: %d\r\n\r\n%s" % (start, kind, len(body), body))
            if not upstream.content_type.startswith("text/event-stream"):
                blocks = [block async for block in _blocks(upstream)]
                return http_messages.Response(body=b"".join(blocks), content_type=upstream.content_type)
            await connection.begin(upstream.status, {"Content-Type": upstream.content_type})
            async for block in _blocks(upstream):
                await connection.write(block, last=upstream.ended)
            return None
        finally:
            upstream.release()

    async def healthy(_: http_messages.Request) -> http_messages.Response:
        return http_messages.Response()

    routes = [http_listener.Route(method="POST", path=path, handler=forward, streams=True) for path in PATHS]
    routes.append(http_listener.Route(method="GET", path="/health", handler=healthy))
    limits = gateway_settings.Limits()
    server = http_listener.Server(http_listener.Routes(routes), limits, leaving=lambda: False)
    opened = await asyncio.get_running_loop().create_server(server, "127.0.0.1", listen["port"], backlog=1024)  # type: ignore[index]
    await opened.serve_forever()


async def _blocks(upstream: http_client.Connection):  # type: ignore[no-untyped-def]
    while data := await upstream.read():
        yield data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    uvloop.run(serve(json.loads(parser.parse_args().config.read_text())))
