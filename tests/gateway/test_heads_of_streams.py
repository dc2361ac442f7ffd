"""HEAD on a path whose GET has a stream is answered at once, and the connection serves its next request."""

import asyncio
from typing import Any

import relquery_requests

import fake_engine


async def test_the_head_of_a_stream_does_not_hold_its_connection(up: Any) -> None:
    async with fake_engine.engine(hang=True) as engine, up(engine) as client:
        await client.send("POST", "/v1/workflows", json={"id": "w", "deadline_ms": 3_600_000})
        _, made, _ = await client.send("POST", "/v1/relqueries", json=relquery_requests.body(3, stream=False))
        host, port = client.url.removeprefix("http://").split(":")
        for path in ("/v1/workflows/w/events", f"/v1/relqueries/{made['id']}/rows"):
            reader, writer = await asyncio.open_connection(host, int(port))
            for request in (f"HEAD {path}", "GET /health"):
                writer.write(f"{request} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(30):  # the workflow and the relQuery go on for much longer
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b"Content-Type: text/event-stream" in head
                following = await reader.readuntil(b'"ok"}')
            assert following.startswith(b"HTTP/1.1 200 "), "the head has no body"
            writer.close()
        assert (await client.send("GET", "/v1/workflows/w"))[1]["state"] == "running"
        assert (await client.send("DELETE", f"/v1/relqueries/{made['id']}"))[1]["status"] == "cancelled"
