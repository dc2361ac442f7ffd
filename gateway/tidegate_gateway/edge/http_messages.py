"""What a handler of an HTTP port gets and gives: a whole request, and an answer or a stream of blocks."""

import email.utils
import functools
import re
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from tidegate_gateway.openai import parsed_request
from tidegate_gateway.openai.error_table import BadRequest, GatewayError

ENCODED_SLASH = chr(0xD800)
"""Decoded text never contains a lone surrogate."""
COPIED_BYTES = 4096
"""Of a block that is copied into its chunk, because one write of a small chunk is cheaper than three."""
MOST_PARAMETERS = 16
"""Parameters of a query."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A request with its whole body."""

    method: str
    target: str
    """The path and the query, as the client wrote them."""
    headers: list[tuple[str, str]]
    """In the order of their arrival; the names are in lower case."""
    body: bytes = b""
    body_bytes: int = 0
    """The size of the body; a handler may let go of the body itself."""
    is_costly: bool = False
    """The body has many values (`costly_requests`)."""
    is_counted: bool = False
    """The parts of the body were counted while it arrived (`large_body`)."""
    route: tuple[Any, Mapping[str, str]] | None = None
    """The listener's route of the path, and the named groups of the path."""
    keeps: bool = True
    """The connection can carry another request."""
    chunks: bool = True
    """The client understands a body in chunks (HTTP/1.1)."""

    @property
    def path(self) -> str:
        """The decoded path, for messages. `segments` is for routes."""
        return self.segments.replace(ENCODED_SLASH, "/")

    @property
    def segments(self) -> str:
        """The decoded path, in which `ENCODED_SLASH` stands for %2F: an encoded slash separates no segments."""
        path = self.target.partition("?")[0].partition("#")[0]
        if "%" not in path:
            return path
        return ENCODED_SLASH.join(map(urllib.parse.unquote, re.split("%2[fF]", path)))

    @property
    def query(self) -> list[tuple[str, str]]:
        """The parameters of the query. Raises `BadRequest`."""
        text = self.target.partition("#")[0].partition("?")[2]
        try:
            return urllib.parse.parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
        except ValueError as error:
            raise BadRequest(f"a query has at most {MOST_PARAMETERS} parameters") from error

    @property
    def has_body(self) -> bool:
        """The head announces a body."""
        return bool(self.header("content-length") or self.header("transfer-encoding"))

    def header(self, name: str) -> str:
        """The value of the first header with this name; "" if there is none."""
        for known, value in self.headers:
            if known == name:
                return value
        return ""

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object. Raises `BadRequest`."""
        value = parsed_request.decoded(self.body) if self.body.strip() else {}
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        return value


@dataclass(slots=True, kw_only=True)
class Response:
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def reply(value: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(body=orjson.dumps(value), status=status)


def error_response(error: GatewayError) -> Response:
    """The answer for an error."""
    return Response(body=error.body(), status=error.row.status, headers=error.headers())


def chunk(held: bytes, block: bytes, *, last: bool) -> tuple[bytes, ...]:
    """A block of a body in the chunked coding, after what was held; the end of the body if it is the last. A large block
    is not copied, because the copy would wait beside it for a slow client."""
    end = b"0\r\n\r\n" if last else b""
    if not block:
        return (held + end,)
    if len(block) > COPIED_BYTES:
        return b"%s%x\r\n" % (held, len(block)), block, b"\r\n" + end
    return (b"%s%x\r\n%s\r\n%s" % (held, len(block), block, end),)


def head(status: int, headers: Mapping[str, str], framing: str, date: str, *, keeps: bool) -> bytes:
    """The head of an answer. Control characters in a value become blanks."""
    lines = [_status_line(status), "Date: ", date, "\r\n", framing]
    for name, value in headers.items():
        lines += (name, ": ", value if value.isprintable() else _printable(value), "\r\n")
    lines.append("\r\n" if keeps else "Connection: close\r\n\r\n")
    return "".join(lines).encode("utf-8", "replace")


@functools.lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


def _printable(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value)


def request_id(request: Request) -> str:
    """The id of a request: the client's if that is usable, else a new one."""
    given = request.header("x-request-id")
    usable = 0 < len(given) <= 256 and given.isascii() and given.isprintable()
    return given if usable else f"tg-{secrets.token_hex(12)}"


@functools.lru_cache(maxsize=1024)
def lower_name(name: bytes) -> str:
    """The name of a header in lower case."""
    return name.decode("latin-1").lower()


_dates: list[tuple[int, str]] = [(0, "")]


def date() -> str:
    """The Date header's value; it is made once a second."""
    now = int(time.time())
    second, text = _dates[0]
    if second != now:
        text = email.utils.formatdate(now, usegmt=True)
        _dates[0] = (now, text)
    return text
