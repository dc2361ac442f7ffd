"""Fetches rows from an address, if the settings allow its prefix (`relqueries.rowsUrls`; none by default).

The scheme, the host, the port and the beginning of the path must be those of a prefix, as text. An address has no
user, query, fragment or dot segment, so that text is what the server gets. Redirects are not followed, and proxies of
the environment are not used.
"""

import asyncio
from collections.abc import AsyncIterator

from tidegate_gateway import gateway_settings, http_client
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import row_tables

MOST_CHARACTERS = 2048
KERNEL_BYTES = 128 * 1024
"""Of the rows that wait in the kernel, so that a distant server can send them fast enough."""
FORMATS: dict[str, row_tables.Format] = {
    "text/csv": "csv",
    "application/csv": "csv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/jsonlines": "jsonl",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
"""Formats by content type and by the end of a file's name."""


def table_format(content_type: str, filename: str, param: str) -> row_tables.Format:
    """The format of a table: by the end of its name, else by its type. Raises `BadRequest`."""
    ending = filename[filename.rfind(".") :].lower() if "." in filename else ""
    found = FORMATS.get(ending) or FORMATS.get(content_type.partition(";")[0].strip().lower())
    if found is None:
        raise BadRequest(
            f"{param} must be CSV (text/csv, or a name that ends in .csv) or JSON lines (application/x-ndjson, .jsonl)",
            param=param,
        )
    return found


def allowed(url: object, bounds: gateway_settings.RelQueries) -> str:
    """The address, if rows may come from there. Raises `BadRequest`."""
    known = isinstance(url, str) and len(url) <= MOST_CHARACTERS and url.isascii() and url.isprintable()
    if not isinstance(url, str) or not known or not gateway_settings.ROWS_URL.fullmatch(url):
        sentence = "rows_url must be an address such as https://host/path.csv, without user and query"
        raise BadRequest(sentence, param="rows_url")
    path = url.split("/", 3)[3].lower()
    while "%25" in path:  # a server behind a proxy may decode more than once
        path = path.replace("%25", "%")
    for escaped, character in (("%2e", "."), ("%2f", "/"), ("%5c", "/"), ("%3b", ";")):
        path = path.replace(escaped, character)
    # Some servers take what follows a semicolon for parameters of the segment.
    dots = any(segment.partition(";")[0] in (".", "..") for segment in path.replace("\\", "/").split("/"))
    if dots or not url.startswith(bounds.rows_urls):
        raise BadRequest(
            "rows_url is not among the addresses that this gateway may fetch (relqueries.rowsUrls in its settings)",
            param="rows_url",
        )
    return url


async def fetch(url: str, rows: row_tables.RowCollector, bounds: gateway_settings.RelQueries) -> None:
    """Reads the rows at an allowed address. Raises `BadRequest`."""
    connections = http_client.Connections(connect_s=bounds.fetch_s, kernel_bytes=KERNEL_BYTES)
    try:
        async with asyncio.timeout(bounds.fetch_s), connections.answer(url) as answer:
            if answer.status != 200:
                raise BadRequest(f"rows_url answered with status {answer.status}", param="rows_url")
            kind = table_format(answer.content_type, url.rpartition("/")[2], "rows_url")
            await row_tables.read(_pieces(answer, bounds.body_bytes), kind, rows, bounds)
    except TimeoutError as error:
        raise BadRequest(f"rows_url was not read within {bounds.fetch_s:.3g} s", param="rows_url") from error
    except OSError as error:
        raise BadRequest(f"rows_url cannot be read: {error}", param="rows_url") from error
    finally:
        connections.close()


async def _pieces(answer: http_client.Connection, most_bytes: int) -> AsyncIterator[bytes]:
    total = 0
    while piece := await answer.read():
        total += len(piece)
        if total > most_bytes:
            raise BadRequest(f"rows_url has more than {most_bytes} bytes", param="rows_url", code="body_too_large")
        yield piece
        await asyncio.sleep(0)
