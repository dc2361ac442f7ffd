"""The HTTP session of kopf's watches, whose answers are bounded before kopf parses them.

kopf parses an answer whole, and an object of 1.5 MiB may take 40 MB as Python objects. `cluster.object_parts` says what is
left of such an object.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import kopf
import msgspec

from tidegate_operator.cluster import object_parts

log = logging.getLogger(__name__)


class _Lines:
    """The lines of a watch. kopf reads them by `iter_chunked`; all else is as in the stream."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest: list[bytes] = []
        async for data in self._stream.iter_chunked(size):
            first, *further = data.split(b"\n")
            rest.append(first)
            for begun in further:
                line, rest = b"".join(rest), [begun]
                yield self._bounded(line) + b"\n"
        if any(rest):
            yield self._bounded(b"".join(rest))

    @staticmethod
    def _bounded(line: bytes) -> bytes:
        """An empty line, which kopf passes over, for one that cannot be read: an error would end the watch for good."""
        try:
            return object_parts.event(line)
        except ValueError as error:
            log.warning("a change of an object is left out, because it cannot be read: %s", error)
            return b""


class _Answer(aiohttp.ClientResponse):
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        self.content = cast("aiohttp.StreamReader", _Lines(self.content))
        return self

    async def json(self, **_: Any) -> Any:
        """A list of objects, or an object."""
        text = await self.read()
        try:
            items, listed = object_parts.page(text)
        except msgspec.ValidationError:
            return object_parts.parsed(text)
        metadata = listed.metadata or {}
        return {"apiVersion": listed.apiVersion, "kind": listed.kind, "metadata": metadata, "items": items}


def of(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """A session with these credentials. It belongs to the running event loop, and kopf closes it."""
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=_Answer,
        ),
    )
