"""The least that a relay over uvicorn and httpx does: it forwards each body to one engine and decides nothing.

    DIR/bin/python benchmarks/asgi_relay.py --config FILE

DIR is an environment with uvicorn, httpx, httptools and uvloop. `gateway_cpu` compares it with relays over other libraries
(docs/decisions/0016).
"""

import argparse
import json
import pathlib

import httpx
import uvicorn


def application(url: str):  # type: ignore[no-untyped-def]
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None), timeout=None)

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {"Content-Type": "application/json"}
        async with client.stream("POST", url + scope["path"], content=body, headers=headers) as answer:
            kept = [(name, value) for name, value in answer.headers.raw if name.lower().startswith(b"content-")]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for block in answer.aiter_raw():
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    settings = json.loads(parser.parse_args().config.read_text())
    (engine,) = settings["engines"]
    uvicorn.run(
        application(engine["url"]),
        host="127.0.0.1",
        port=settings["listen"]["port"],
        log_level="error",
        access_log=False,
        http="httptools",
        loop="uvloop",
    )
