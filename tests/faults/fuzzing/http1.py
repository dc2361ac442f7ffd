"""Requests over HTTP/1.1: heads, bodies, chunks and what follows them on one connection.

Property: each answer has the status 2xx or 4xx, or 503 where the store is missing; nothing of the connection outlives it.
"""

import re

from fuzzing import memory_gateway

from tidegate_gateway.edge import http_listener

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z' -]+\r\nDate: ")


def _post(path: str, body: bytes, *more: bytes) -> bytes:
    head = [b"POST %s HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % len(body), *more]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


_CALL = b'{"model":"fake","prompt":"x","max_tokens":2}'
_STREAM = b'{"model":"fake","messages":[{"role":"user","content":"x"}],"stream":true}'
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="rows"; filename="a.csv"\r\nContent-Type: text/csv\r\n\r\na\r\n1\r\n'
    b'--b\r\nContent-Disposition: form-data; name="template"\r\n\r\n{{a}}\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n--b--\r\n'
)
REQUESTS = [
    _post("/v1/completions", _CALL),
    _post("/v1/chat/completions", _STREAM, b"X-Tidegate-Tenant: a", b"X-Tidegate-Deadline-Ms: 5000"),
    _post("/v1/completions", _CALL)
    + _post("/v1/chat/completions", _STREAM)
    + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    _CHUNKED + b"%x\r\n%s\r\n0\r\nX-Trailer: a\r\n\r\n" % (len(_CALL), _CALL),
    _CHUNKED + b"5;extension=1\r\n" + _CALL[:5] + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(_CALL) - 5, _CALL[5:]),
    _post("/v1/workflows", b'{"deadline_ms":5000,"stages":[{"name":"a"}]}', b"Idempotency-Key: k"),
    _post("/v1/relqueries?after=0", _FORM, b"Content-Type: multipart/form-data; boundary=b"),
    _post("/v1/completions", _CALL, b"Expect: 100-continue", b"Connection: close"),
    _post("/v1/completions", _CALL, b"Connection: Upgrade", b"Upgrade: h2c"),
    b"GET /v1/workflows?state=running&limit=5 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /v1/workflows/wf%2F1 HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/workflows/a/stages/b/complete HTTP/1.0\r\n\r\n",
    b"GET /v1/relqueries/a/rows?stream=false HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 4\r\n\r\n",
    b"HEAD /v1/models/fake HTTP/1.1\r\nHost: x\r\n\r\nGET http://x/v1/state HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
SEEDS = [mode + request for request in REQUESTS for mode in (b"\0", b"\x07")]
DICTIONARY = (
    "Content-Length: ", "Transfer-Encoding: ", "chunked", "Expect: 100-continue", "Upgrade: h2c", "Connection: close",
    "TE: trailers", "Content-Encoding: gzip", "HTTP/1.0", "HTTP/1.1", "HTTP/2.0", "HEAD ", "OPTIONS ", "CONNECT ",
    "X-Tidegate-Tenant: ", "X-Tidegate-Class: ", "X-Tidegate-Workflow: ", "X-Tidegate-Stage: ", "X-Session-Id: ",
    "X-Request-Id: ", "traceparent: ", "Idempotency-Key: ", "Origin: http://a", "Accept: ", "application/x-ndjson",
    "\\x0d\\x0a", "\\x0d\\x0a\\x0d\\x0a", "0\\x0d\\x0a", "%2F", "%2e%2e", "?after=", "&limit=", "\\xff", "filename=",
)  # fmt: skip


_server = http_listener.Server(
    memory_gateway.HANDLERS.routes(),
    memory_gateway.GATEWAY.settings.limits,
    leaving=lambda: False,
    guard=memory_gateway.HANDLERS.port_guard,
    bodies=memory_gateway.GATEWAY.bodies,
)


async def _converse(data: bytes) -> None:
    transport, connection = memory_gateway.Transport(), _server()
    connection.connection_made(transport)
    for piece in memory_gateway.pieces(data):
        if not await transport.takes_more():
            break
        connection.data_received(piece)
    await memory_gateway.quiet()
    connection.connection_lost(None)
    await memory_gateway.settled(lambda: connection.task is None)
    for status in STATUS.findall(transport.written):
        if status[:1] not in b"124" and status != b"503":
            raise memory_gateway.Finding(f"an answer has the status {status.decode()}")
    if _server.connections:
        raise memory_gateway.Finding("a connection that is lost still counts")


def try_input(data: bytes) -> None:
    memory_gateway.run(_converse(data))
