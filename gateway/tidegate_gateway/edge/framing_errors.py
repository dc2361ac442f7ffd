"""What does a client get whose bytes are no HTTP request? The errors of the parser, without the bytes that caused them, and
of the checks that follow it."""

import re

import httptools

from tidegate_gateway.edge import http_messages
from tidegate_gateway.openai.error_table import BadRequest

PATH_BYTES, HEADER_BYTES, HEADERS, HEAD_BYTES = 8000, 8190, 128, 32 * 1024
"""Longest path, longest header, most headers, and the most bytes of all headers, or of the framing of a body in chunks."""
SMALL_CHUNKS, BODY_PIECES, PIECE_BYTES = 1024, 16_384, 64
"""The chunks of a body that may be small, the pieces in which a body without chunks may arrive, and the mean bytes of those
beyond them. Each takes a microsecond, and a client sends thousands of chunks of one byte in one packet."""
PIPELINED = 16
"""Requests that may wait behind the present one; the connection ends after them."""
REJECTED_IN_A_ROW = 4
"""A connection ends after so many invalid requests (status 400), with no other one between them."""
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


def too_many_at_once() -> BadRequest:
    return BadRequest(f"at most {PIPELINED} requests may wait on one connection; send them on several")


def slow_body(within_s: float) -> BadRequest:
    """The body of a request did not come in time."""
    return BadRequest(
        f"the body did not arrive within {within_s:.3g} s; send it faster, or in smaller parts", code="request_timeout"
    )


def small_chunks(most: int) -> BadRequest:
    return BadRequest(
        f"the body comes in chunks that are too small: beyond {most} chunks, a chunk must have {PIECE_BYTES} bytes"
        " on average; send larger chunks, or the length of the body"
    )


def path_too_long() -> BadRequest:
    return BadRequest(f"the path is longer than {PATH_BYTES} bytes; send long values in the body", code="path_too_long")


def check_sizes(request: http_messages.Request, characters: int) -> None:
    """Raises `BadRequest` for a target, or for headers of so many characters with the target, that are too long. A
    proxy may have longer bounds, and adds headers of its own."""
    if len(request.target) > PATH_BYTES:
        raise path_too_long()
    if characters - len(request.target) > HEAD_BYTES:
        raise too_many_headers()


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


def body_too_large(most_bytes: int) -> BadRequest:
    return BadRequest(f"the body is larger than {most_bytes} bytes; send less text", code="body_too_large")


def check_headers(request: http_messages.Request) -> None:
    """Raises `BadRequest` for headers that frame a request in more than one way, or in a way that is not supported."""
    hosts, codings, types = 0, list[str](), set[str]()
    for name, value in request.headers:
        if name == "host":
            hosts += 1
        elif name == "transfer-encoding":
            codings.append(value.strip().lower())
        elif name == "content-type":
            types.add(value)
    if hosts > 1 or (request.chunks and not hosts):
        raise BadRequest(INVALID + ("Two 'Host' headers" if hosts else "Missing 'Host' header"))
    if codings not in ([], ["chunked"]):
        raise BadRequest("no Transfer-Encoding but chunked is supported", param="transfer-encoding")
    if len(types) > 1:
        raise BadRequest("content-type comes twice with different values; send one", param="content-type")
    if request.header("te") and codings:
        raise BadRequest("TE together with Transfer-Encoding is not supported; leave TE out", param="te")
    if request.header("content-encoding") not in ("", "identity"):
        raise BadRequest("compressed bodies are not supported; send the JSON uncompressed")
