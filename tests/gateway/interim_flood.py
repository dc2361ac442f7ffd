"""A server that answers each request with `100 Continue` without end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" * 500


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[str]:
    """Its URL, without a path."""
    writers = set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            while True:
                writer.write(INTERIM)
                await writer.drain()

    serving = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    finally:
        serving.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)
