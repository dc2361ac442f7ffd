"""The messages of Envoy's external processing protocol: headers in, changes of a request or an answer out.

`tidegate_proto.envoy.ext_proc` has the part of the protocol that a picker uses. The names of headers and metadata are
those of the Endpoint Picker Protocol (Gateway API Inference Extension, proposal 004).
"""

import functools
from collections.abc import Iterable, Mapping

from google.protobuf import struct_pb2

from tidegate_proto.envoy import ext_proc_pb2

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
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

_SET = ext_proc_pb2.OVERWRITE_IF_EXISTS_OR_ADD
GO_ON = ext_proc_pb2.ProcessingResponse(request_headers=ext_proc_pb2.HeadersResponse()).SerializeToString()
"""The answer to the headers of a request whose body follows."""
TRAILERS_GO_ON = ext_proc_pb2.ProcessingResponse(request_trailers=ext_proc_pb2.TrailersResponse()).SerializeToString()
LAST_TRAILERS_GO_ON = ext_proc_pb2.ProcessingResponse(
    response_trailers=ext_proc_pb2.TrailersResponse()
).SerializeToString()
Headers = list[tuple[str, str]]


def headers_of(given: ext_proc_pb2.HeaderMap) -> Headers:
    """The headers of a request or an answer; Envoy writes their names in lower case."""
    return [
        (header.key, header.raw_value.decode("utf-8", "surrogateescape") or header.value) for header in given.headers
    ]


def removed(headers: Headers) -> list[str]:
    """The names of the headers that stop here."""
    return [name for name, _ in headers if name not in KEPT and not name.startswith((":", "x-envoy-"))]


def changes(values: Mapping[str, str], remove: Iterable[str] = ()) -> ext_proc_pb2.HeaderMutation:
    """Sets these headers in place of those with the same names, and removes others."""
    header, option = ext_proc_pb2.HeaderValue, ext_proc_pb2.HeaderValueOption
    options = [
        option(header=header(key=name, raw_value=value.encode("utf-8", "replace")), append_action=_SET)
        for name, value in values.items()
    ]
    return ext_proc_pb2.HeaderMutation(set_headers=options, remove_headers=remove)


def buffered_choice(endpoint: str, changed: ext_proc_pb2.HeaderMutation, body: bytes) -> bytes:
    """The answer to a whole body: the call goes to the endpoint, with this body."""
    common = ext_proc_pb2.CommonResponse(header_mutation=changed, body_mutation=ext_proc_pb2.BodyMutation(body=body))
    response = ext_proc_pb2.ProcessingResponse(request_body=ext_proc_pb2.BodyResponse(response=common))
    return response.SerializeToString() + _destination(endpoint)


def streamed_choice(endpoint: str, changed: ext_proc_pb2.HeaderMutation, body: bytes) -> list[bytes]:
    """The answers to headers and a body that is streamed both ways."""
    common = ext_proc_pb2.CommonResponse(header_mutation=changed)
    head = ext_proc_pb2.ProcessingResponse(request_headers=ext_proc_pb2.HeadersResponse(response=common))
    return [head.SerializeToString() + _destination(endpoint), *streamed_body(body)]


def streamed_body(body: bytes) -> list[bytes]:
    """A request's body in parts, the last of which ends it."""
    starts = range(0, len(body), CHUNK_BYTES) or (0,)
    return [
        _part(body[start : start + CHUNK_BYTES], last=start + CHUNK_BYTES >= len(body)).SerializeToString()
        for start in starts
    ]


def _part(body: bytes, *, last: bool) -> ext_proc_pb2.ProcessingResponse:
    part = ext_proc_pb2.StreamedBodyResponse(body=body, end_of_stream=last)
    common = ext_proc_pb2.CommonResponse(body_mutation=ext_proc_pb2.BodyMutation(streamed_response=part))
    return ext_proc_pb2.ProcessingResponse(request_body=ext_proc_pb2.BodyResponse(response=common))


def same_answer_part(part: ext_proc_pb2.HttpBody, *, streamed: bool) -> bytes:
    """The answer to a part of an answer's body, for a proxy that sends it although nobody asks for it: it stays as it
    is."""
    common = ext_proc_pb2.CommonResponse()
    if streamed:
        same = ext_proc_pb2.StreamedBodyResponse(body=part.body, end_of_stream=part.end_of_stream)
        common.body_mutation.streamed_response.CopyFrom(same)
    response = ext_proc_pb2.ProcessingResponse(response_body=ext_proc_pb2.BodyResponse(response=common))
    return response.SerializeToString()


def answer_head(values: Mapping[str, str]) -> bytes:
    """The answer to the headers of an engine's answer: the client gets these headers too."""
    common = ext_proc_pb2.CommonResponse(header_mutation=changes(values))
    response = ext_proc_pb2.HeadersResponse(response=common)
    return ext_proc_pb2.ProcessingResponse(response_headers=response).SerializeToString()


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """The client gets this answer, and no engine gets the call."""
    response = ext_proc_pb2.ImmediateResponse(
        status=ext_proc_pb2.HttpStatus(code=status), headers=changes(headers), body=body, details=details
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
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return [text.strip() for text in texts if text.strip()]


def served(request: ext_proc_pb2.ProcessingRequest) -> str:
    """The endpoint that served the call, if the proxy tells it."""
    known = request.metadata_context.filter_metadata
    if LOAD_BALANCER not in known or SERVED not in known[LOAD_BALANCER].fields:
        return ""
    return known[LOAD_BALANCER].fields[SERVED].string_value


@functools.lru_cache(maxsize=1024)
def _destination(endpoint: str) -> bytes:
    """The metadata of a choice. Protobuf joins messages by joining their bytes."""
    named = struct_pb2.Struct(fields={DESTINATION: struct_pb2.Value(string_value=endpoint)})
    metadata = struct_pb2.Struct(fields={LOAD_BALANCER: struct_pb2.Value(struct_value=named)})
    return ext_proc_pb2.ProcessingResponse(dynamic_metadata=metadata).SerializeToString()
