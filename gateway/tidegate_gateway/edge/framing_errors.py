"""What does a client get whose bytes are no HTTP request? The errors of the parser, without the bytes that caused them."""

import re

import httptools

from tidegate_gateway.openai.error_table import BadRequest

PATH_BYTES, HEADER_BYTES, HEADERS, HEAD_BYTES = 8000, 8190, 128, 32 * 1024
"""Longest path, longest header, most headers, and the most bytes of all headers, or of the framing of a body in chunks."""
INVALID = "this is not a valid HTTP request: "
FIRST_LINE = "the first line must be METHOD /path HTTP/1.1"


def origin_form(url: bytes) -> str:
    """The path and query of a target that names a host. Raises `BadRequest`."""
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError as error:
        raise BadRequest(INVALID + "the path is malformed") from error
    path = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
    return path.decode("latin-1")


def too_many_headers() -> BadRequest:
    return BadRequest(
        f"at most {HEADERS} headers of at most {HEADER_BYTES} bytes, and {HEAD_BYTES} bytes in all, are allowed;"
        " send fewer or shorter ones",
        code="headers_too_large",
    )


def parsers_error(error: httptools.HttpParserError) -> BadRequest:
    """The parser's error; llhttp's reasons are fixed sentences without bytes of the client."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return BadRequest(INVALID + "the method is malformed, or the client speaks TLS, which this port does not")
    if isinstance(error, httptools.HttpParserInvalidURLError):
        return BadRequest(INVALID + "the path is malformed")
    why = str(error)
    if why.startswith(("Invalid HTTP version", "Expected HTTP/", "Expected CRLF after version", "Pause on PRI")):
        return BadRequest(INVALID + FIRST_LINE)
    return BadRequest(INVALID + re.sub(r"[^\x20-\x7e]", " ", why)[:120])
