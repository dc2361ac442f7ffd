"""Answers of a server from which a gateway fetches the rows of a relQuery (`rows_url`).

The first byte of an input chooses the address, the second one the pieces in which the answer arrives.

Property: the gateway has rows of the template within their bounds, or `BadRequest`.
"""

import asyncio

import orjson
from fuzzing import memory_gateway

from tidegate_gateway import gateway_settings, http_client, loop_steps
from tidegate_gateway.edge import rows_url
from tidegate_gateway.openai import error_table
from tidegate_gateway.relqueries import row_tables, row_template

BOUNDS = gateway_settings.RelQueries(
    rows=20, row_bytes=200, body_bytes=4000, rows_urls=("https://host/",), fetch_s=memory_gateway.SETTLE_S
)
ADDRESSES = ("https://host/a.csv", "https://host/a.jsonl", "https://host/a")
TEMPLATE = row_template.parse("{{a}} and {{b}}")
_CSV = b'\xef\xbb\xbfa,b,c\r\n1,"2, ""two""\r\n",3\r\n\r\n4,5,6\n'
_LINES = b'{"a":"1","b":2}\n\n{"b":true,"a":2.5,"c":{"d":[null]}}\r\n{"a":"\\ud83d\\ude00","b":"x"}'


ANSWERS = [
    (0, memory_gateway.answer(_CSV, b"text/csv")),
    (1, memory_gateway.answer(_LINES, b"application/octet-stream")),
    (2, memory_gateway.chunked(_CSV, b"application/csv; charset=utf-8")),
    (2, memory_gateway.chunked(_LINES, b"application/x-ndjson")),
    (0, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_CSV), _CSV)),
    (2, b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + memory_gateway.answer(_LINES, b"application/jsonl")),
    (0, b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"),
]
SEEDS = [bytes((address, mode)) + answer for address, answer in ANSWERS for mode in (0, 9)]
DICTIONARY = (
    "\\x0d\\x0a", "\\x0d\\x0a\\x0d\\x0a", "\\x0a", '"', '""', ",", "a,b", "\\xef\\xbb\\xbf", "\\xed\\xa0\\x80", "\\x00",
    '{"a":', '"b":', "null", "1e999", "[[[[", "\\\\ud800", "Content-Length: ", "Transfer-Encoding: chunked",
    "Content-Encoding: gzip", "Content-Type: text/csv", "application/jsonl", "Connection: close", "HTTP/1.1 101 Switching",
    "HTTP/1.1 204 No", "HTTP/1.0 200 OK", "0\\x0d\\x0a", "Location: ",
)  # fmt: skip


class _Connections(http_client.Connections):
    """Connections to the server of the input."""

    peer: memory_gateway.Peer

    async def get(self, origin: str) -> http_client.Connection:
        return self.peer.made


rows_url.http_client.Connections = _Connections  # type: ignore[attr-defined, misc]


async def _try(data: bytes) -> None:
    _Connections.peer = peer = memory_gateway.Peer()
    rows = row_tables.RowCollector(TEMPLATE, BOUNDS, loop_steps.LoopSteps())
    url = rows_url.allowed(ADDRESSES[data[0] % len(ADDRESSES)], BOUNDS)
    fetching = asyncio.ensure_future(rows_url.fetch(url, rows, BOUNDS))
    await asyncio.sleep(0)
    await peer.feed(data[1:])
    await memory_gateway.settled(fetching.done)
    try:
        fetching.result()
    except error_table.BadRequest as error:
        error.body()
    if len(rows.rows) > BOUNDS.rows or any(len(row) > BOUNDS.row_bytes for row in rows.rows):
        raise memory_gateway.Finding("there are more rows than the bounds allow, or larger ones")
    for row in rows.rows:
        values = orjson.loads(row)
        if len(values) != len(TEMPLATE.columns) or not all(isinstance(value, str) for value in values):
            raise memory_gateway.Finding(f"a row does not have the values of the template: {row!r}")


def try_input(data: bytes) -> None:
    if len(data) >= 2:
        memory_gateway.run(_try(data))
