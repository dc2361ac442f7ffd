"""The least that an HTTP relay over aiohttp does: it forwards each body to one engine and decides nothing.

    python benchmarks/bare_relay.py --config FILE

It reads the port and the engine's URL from the configuration file of a gateway. `gateway_cpu` compares gateways with it.
"""

import argparse
import asyncio
import json
import pathlib

import aiohttp
import uvloop
from aiohttp import web


async def serve(settings: dict[str, object]) -> None:
    listen, (engine,) = settings["listen"], settings["engines"]  # type: ignore[misc]
    url = str(engine["url"])  # type: ignore[has-type]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "GET":
                return web.Response()
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(url + request.path, data=body, headers=headers) as answer:
                kind = {"Content-Type": answer.headers["Content-Type"]}
                if "Content-Length" in answer.headers:
                    return web.Response(body=await answer.read(), headers=kind)
                response = web.StreamResponse(headers=kind)
                await response.prepare(request)
                async for block in answer.content.iter_any():
                    await response.write(block)
                await response.write_eof()
                return response

        server = web.Server(forward, access_log=None)
        opened = await asyncio.get_running_loop().create_server(server, "127.0.0.1", listen["port"], backlog=1024)  # type: ignore[index]
        await opened.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    uvloop.run(serve(json.loads(parser.parse_args().config.read_text())))
