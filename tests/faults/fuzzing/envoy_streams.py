"""Messages of Envoy's external processing protocol at the endpoint picker's port: one stream, some messages.

Each message of an input has its length before it, in two bytes. Property: the stream goes on, or ends with a status that
does not blame the gateway; an answer for the client has the status 2xx or 4xx, or 503 where the store is missing, or says
that Envoy is not set up well; a call that an engine has is over with its stream.
"""

import orjson
from fuzzing import http2_ports, memory_gateway
from google.protobuf import message

from tidegate_gateway.edge import ext_proc, http2_frames, http2_stream
from tidegate_proto.envoy import ext_proc_pb2 as envoy

_PICKER, _server = http2_ports.picker_server()
_OPENED = http2_frames.PREFACE + http2_ports.opened(f"/{ext_proc.SERVICE}/Process")
_BODY = b'{"model":"fake","prompt":"x","max_tokens":2}'
_FULL = envoy.ProtocolConfiguration(
    request_body_mode=envoy.FULL_DUPLEX_STREAMED, response_body_mode=envoy.FULL_DUPLEX_STREAMED
)


def _map(pairs: dict[str, str]) -> envoy.HeaderMap:
    return envoy.HeaderMap(
        headers=[envoy.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()]
    )


def _headers(path: str, *, method: str = "POST", ends: bool = False, **more: object) -> envoy.ProcessingRequest:
    pairs = {":method": method, ":path": path, ":authority": "x", "x-tidegate-tenant": "a", "x-request-id": "r"}
    headers = envoy.HttpHeaders(headers=_map(pairs), end_of_stream=ends)
    return envoy.ProcessingRequest(request_headers=headers, **more)


def _body(raw: bytes, *, ends: bool = True) -> envoy.ProcessingRequest:
    return envoy.ProcessingRequest(request_body=envoy.HttpBody(body=raw, end_of_stream=ends))


def _hinted() -> envoy.ProcessingRequest:
    request = _headers("/v1/completions")
    hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint["x-gateway-destination-endpoint-subset"] = ["127.0.0.1:9", "10.0.0.2"]
    return request


def _answered(served: str = "127.0.0.1:9") -> envoy.ProcessingRequest:
    answer = envoy.ProcessingRequest(response_headers=envoy.HttpHeaders(headers=_map({":status": "200"})))
    answer.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = served
    return answer


_ANSWER_BODY = envoy.ProcessingRequest(response_body=envoy.HttpBody(body=b"{}", end_of_stream=True))
_TRAILERS = envoy.ProcessingRequest(request_trailers=envoy.HttpTrailers(trailers=_map({"a": "b"})))
_ANSWER_TRAILERS = envoy.ProcessingRequest(response_trailers=envoy.HttpTrailers())
STREAMS: list[list[message.Message]] = [
    [_headers("/v1/completions"), _body(_BODY), _answered(), _ANSWER_BODY, _ANSWER_TRAILERS],
    [_headers("/v1/completions", protocol_config=_FULL), _body(_BODY[:9], ends=False), _body(_BODY[9:]), _answered()],
    [_headers("/v1/completions", protocol_config=_FULL), _body(_BODY, ends=False), _TRAILERS, _answered(""), _ANSWER_BODY],
    [_hinted(), _body(_BODY), _answered("10.0.0.9:1")],
    [_headers("/v1/models", method="GET", ends=True)],
    [_headers("/v1/workflows/w%2F1?x=1", method="DELETE", ends=True)],
    [_headers("/v1/workflows"), _body(b'{"deadline_ms":500}')],
    [_headers("/v1/relqueries"), _body(b"{}")],
    [_headers("/nothing", ends=True), _body(b"")],
]  # fmt: skip


def _packed(messages: list[message.Message]) -> bytes:
    raws = [each.SerializeToString() for each in messages]
    return b"".join(len(raw).to_bytes(2) + raw for raw in raws)


SEEDS = [_packed(messages) for messages in STREAMS]
DICTIONARY = (
    "/v1/completions", "/v1/models", "/v1/workflows", ":path", ":method", ":status", "content-encoding",
    "x-tidegate-class", "envoy.lb", "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served", "x-tidegate-tenant", "content-length", "transfer-encoding", "HEAD",
    "GET", "DELETE", "%2F", "\\xff", "\\x10\\x01",
)  # fmt: skip


def _messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2])
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


async def _try(data: bytes) -> None:
    sent = [_OPENED, *map(http2_ports.data, _messages(data))]
    with _Answers() as answers:
        await http2_ports.converse(_server, sent, lambda: not _PICKER.exchanges, turns=10)
    for status, body in answers.found:
        if status >= 500 and status != 503 and ext_proc.NO_BODIES.encode() not in body:
            raise memory_gateway.Finding(f"an answer has the status {status}: {body!r}")


class _Answers:
    """Reads the answers for clients that the picker sends on a stream."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bytes]] = []
        self._send = http2_stream.Stream.send

    def __enter__(self) -> "_Answers":
        send, found = self._send, self.found

        def read(stream: http2_stream.Stream, raw: bytes) -> None:
            answer = envoy.ProcessingResponse.FromString(raw)
            if answer.HasField("immediate_response"):
                found.append((answer.immediate_response.status.code, answer.immediate_response.body))
                if found[-1][0] >= 400:
                    orjson.loads(found[-1][1])
            send(stream, raw)

        http2_stream.Stream.send = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        http2_stream.Stream.send = self._send  # type: ignore[method-assign]


def try_input(data: bytes) -> None:
    memory_gateway.run(_try(data))
