"""The messages of Envoy's external processing protocol: headers in, changes of a request or an answer out.

`tidegate_proto.envoy.ext_proc` has the part of the protocol that a picker uses. The names of headers and metadata are
those of the Endpoint Picker Protocol (Gateway API Inference Extension, proposal 004).
"""

import functools
from collections.abc import Iterable, Mapping

from google.protobuf import struct_pb2

from tidegate_gateway.edge import http_messages
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_proto.envoy import ext_proc_pb2

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
MOST_SUBSET = 64 * 1024
"""Characters of a subset that is a text."""
LOAD_BALANCER, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of metadata."""
CHUNK_BYTES = 62_000
"""Of a body that is streamed back; Envoy wants less than 64 KiB."""

KEPT = frozenset(
    {
        *("accept", "content-length", "content-type", "host", "te", "trailer", "traceparent", "tracestate"),
        *("transfer-encoding", "user-agent", "x-forwarded-for", "x-forwarded-proto", "x-request-id"),
    }
)
"""Headers of a client that engines see. All others stop here, as at the HTTP port: among them are keys, cookies, forged
destinations, and headers by which vLLM orders calls."""

KEPT_NAMES = 2048
"""Characters of the names of removed headers whose message is kept. Clients choose some of the names."""
GO_ON = ext_proc_pb2.ProcessingResponse(request_headers=ext_proc_pb2.HeadersResponse()).SerializeToString()
"""The answer to the headers of a request whose body follows."""
TRAILERS_GO_ON = ext_proc_pb2.ProcessingResponse(request_trailers=ext_proc_pb2.TrailersResponse()).SerializeToString()
LAST_TRAILERS_GO_ON = ext_proc_pb2.ProcessingResponse(
    response_trailers=ext_proc_pb2.TrailersResponse()
).SerializeToString()
Headers = list[tuple[str, str]]


def headers_of(given: ext_proc_pb2.HeaderMap) -> Headers:
    """The headers of a request or an answer; Envoy writes their names in lower case."""
    return [(header.key, header.raw_value.decode("utf-8", "replace") or header.value) for header in given.headers]


def request_of(headers: Headers) -> http_messages.Request:
    """The request with these headers, before its body has come."""
    pseudo = {name: value for name, value in headers if name.startswith(":")}
    return http_messages.Request(
        method=pseudo.get(":method", ""),
        target=pseudo.get(":path", "/"),
        headers=[pair for pair in headers if not pair[0].startswith(":")],
    )


def removed(headers: Headers) -> list[str]:
    """The names of the headers that stop here."""
    return [name for name, _ in headers if name not in KEPT and not name.startswith((":", "x-envoy-"))]


def changes(values: Mapping[str, str], remove: Iterable[str] = ()) -> bytes:
    """A HeaderMutation: these headers in place of those with the same names, and the others removed."""
    return b"".join([_set_header(name, value) for name, value in values.items()]) + _removal(tuple(remove))


def headers_choice(endpoint: str, changed: bytes) -> bytes:
    """The answer to the headers of a request without a body: it goes to the endpoint."""
    return _REQUEST_HEADERS(_RESPONSE(_HEADERS(changed))) + _destination(endpoint)


def buffered_choice(endpoint: str, changed: bytes, body: bytes | None) -> bytes:
    """The answer to a whole body: the call goes to the endpoint, with this body; None = as it is."""
    changed_body = b"" if body is None else _BODY(_WHOLE(body))
    return _body_answer(_HEADERS(changed) + changed_body) + _destination(endpoint)


def streamed_choice(endpoint: str, changed: bytes, body: bytes, *, trailers: bool) -> list[bytes]:
    """The answers to headers and a body that is streamed both ways. The last part of the body ends the request, unless
    `trailers` do."""
    starts = range(0, len(body), CHUNK_BYTES) or (0,)
    parts = [(body[start : start + CHUNK_BYTES], start + CHUNK_BYTES >= len(body) and not trailers) for start in starts]
    return [
        headers_choice(endpoint, changed),
        *(_body_answer(_BODY(_streamed(part, last=last))) for part, last in parts),
        *([TRAILERS_GO_ON] if trailers else []),
    ]


def same_answer_part(part: ext_proc_pb2.HttpBody, *, streamed: bool) -> bytes:
    """The answer to a part of an answer's body, for a proxy that sends it although nobody asks for it: it stays as it
    is."""
    same = _BODY(_streamed(part.body, last=part.end_of_stream)) if streamed else b""
    return _RESPONSE_BODY(_RESPONSE(same))


def answer_head(values: Mapping[str, str]) -> bytes:
    """The answer to the headers of an engine's answer: the client gets these headers too."""
    return _RESPONSE_HEADERS(_RESPONSE(_HEADERS(changes(values))))


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """The client gets this answer, and no engine gets the call."""
    response = ext_proc_pb2.ImmediateResponse(
        status=ext_proc_pb2.HttpStatus(code=status),
        headers=ext_proc_pb2.HeaderMutation.FromString(changes(headers)),
        body=body,
        details=details,
    )
    return ext_proc_pb2.ProcessingResponse(immediate_response=response).SerializeToString()


def more_time(seconds: float) -> bytes:
    """The answer comes within so many seconds."""
    response = ext_proc_pb2.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(round(seconds * 1000))
    return response.SerializeToString()


def subset(request: ext_proc_pb2.ProcessingRequest) -> list[str] | None:
    """The endpoints that the proxy allows; None = all."""
    hint = request.metadata_context.filter_metadata
    if SUBSET_HINT not in hint or SUBSET not in hint[SUBSET_HINT].fields:
        return None
    value = hint[SUBSET_HINT].fields[SUBSET]
    if len(value.string_value) > MOST_SUBSET:
        raise BadRequest(f"the subset of endpoints has more than {MOST_SUBSET} characters; give a list")
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return [text.strip() for text in texts if text.strip()]


def served(request: ext_proc_pb2.ProcessingRequest) -> str:
    """The endpoint that served the call, if the proxy tells it."""
    known = request.metadata_context.filter_metadata
    if LOAD_BALANCER not in known or SERVED not in known[LOAD_BALANCER].fields:
        return ""
    return known[LOAD_BALANCER].fields[SERVED].string_value


# The bytes of messages. Objects of the protobuf library take several times as long to build, and each call has three.


class _Field:
    """Writes the field of a message that holds a message, bytes or a text."""

    def __init__(self, number: int) -> None:
        """`number` is below 16."""
        self._tag = bytes([number << 3 | 2])

    def __call__(self, payload: bytes) -> bytes:
        size = len(payload)
        if size < 0x80:
            return self._tag + bytes((size,)) + payload
        length = bytearray()
        while size >= 0x80:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        length.append(size)
        return self._tag + length + payload


_REQUEST_HEADERS = _Field(ext_proc_pb2.ProcessingResponse.REQUEST_HEADERS_FIELD_NUMBER)
_RESPONSE_HEADERS = _Field(ext_proc_pb2.ProcessingResponse.RESPONSE_HEADERS_FIELD_NUMBER)
_REQUEST_BODY = _Field(ext_proc_pb2.ProcessingResponse.REQUEST_BODY_FIELD_NUMBER)
_RESPONSE_BODY = _Field(ext_proc_pb2.ProcessingResponse.RESPONSE_BODY_FIELD_NUMBER)
_RESPONSE = _Field(ext_proc_pb2.BodyResponse.RESPONSE_FIELD_NUMBER)
_HEADERS = _Field(ext_proc_pb2.CommonResponse.HEADER_MUTATION_FIELD_NUMBER)
_BODY = _Field(ext_proc_pb2.CommonResponse.BODY_MUTATION_FIELD_NUMBER)
_WHOLE = _Field(ext_proc_pb2.BodyMutation.BODY_FIELD_NUMBER)
_PART = _Field(ext_proc_pb2.BodyMutation.STREAMED_RESPONSE_FIELD_NUMBER)
_SET = _Field(ext_proc_pb2.HeaderMutation.SET_HEADERS_FIELD_NUMBER)
_HEADER = _Field(ext_proc_pb2.HeaderValueOption.HEADER_FIELD_NUMBER)
_VALUE = _Field(ext_proc_pb2.HeaderValue.RAW_VALUE_FIELD_NUMBER)
_OVERWRITE = ext_proc_pb2.HeaderValueOption(append_action=ext_proc_pb2.OVERWRITE_IF_EXISTS_OR_ADD).SerializeToString()


def _body_answer(common: bytes) -> bytes:
    return _REQUEST_BODY(_RESPONSE(common))


def _streamed(body: bytes, *, last: bool) -> bytes:
    part = ext_proc_pb2.StreamedBodyResponse(body=body, end_of_stream=last)
    return _PART(part.SerializeToString())


def _set_header(name: str, value: str) -> bytes:
    return _SET(_HEADER(_key(name) + _VALUE(value.encode("utf-8", "replace"))) + _OVERWRITE)


@functools.lru_cache(maxsize=1024)
def _key(name: str) -> bytes:
    return ext_proc_pb2.HeaderValue(key=name).SerializeToString()


def _removal(names: tuple[str, ...]) -> bytes:
    return _kept_removal(names) if sum(map(len, names)) <= KEPT_NAMES else _kept_removal.__wrapped__(names)


@functools.lru_cache(maxsize=1024)
def _kept_removal(names: tuple[str, ...]) -> bytes:
    return ext_proc_pb2.HeaderMutation(remove_headers=names).SerializeToString()


@functools.lru_cache(maxsize=1024)
def _destination(endpoint: str) -> bytes:
    """The metadata of a choice. Protobuf joins messages by joining their bytes."""
    named = struct_pb2.Struct(fields={DESTINATION: struct_pb2.Value(string_value=endpoint)})
    metadata = struct_pb2.Struct(fields={LOAD_BALANCER: struct_pb2.Value(struct_value=named)})
    return ext_proc_pb2.ProcessingResponse(dynamic_metadata=metadata).SerializeToString()
