"""A picker without decisions, so that `endpoint_picker` can measure what the protocol alone costs: it sends every call
to one engine and leaves its body as it is.

    python benchmarks/fixed_picker.py --wire own|grpc --port PORT --endpoint IP:PORT

`own` is the gateway's server of such streams (`http2_connection`), and `grpc` is `grpc.aio`.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from tidegate_gateway import tenant_budget
from tidegate_gateway.edge import http2_server, http2_stream, unread_answers
from tidegate_proto.envoy import ext_proc_pb2

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class FixedAnswers:
    """The answer to each message."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def of(self, raw: bytes) -> bytes:
        request = ext_proc_pb2.ProcessingRequest.FromString(raw)
        kind = request.WhichOneof("request")
        if kind == "request_body":
            name = "x-gateway-destination-endpoint"
            value = ext_proc_pb2.HeaderValue(key=name, raw_value=self._endpoint.encode())
            overwrite = ext_proc_pb2.OVERWRITE_IF_EXISTS_OR_ADD
            changed = ext_proc_pb2.HeaderMutation(
                set_headers=[ext_proc_pb2.HeaderValueOption(header=value, append_action=overwrite)]
            )
            body = ext_proc_pb2.BodyMutation(body=request.request_body.body)
            common = ext_proc_pb2.CommonResponse(header_mutation=changed, body_mutation=body)
            answer = ext_proc_pb2.ProcessingResponse(request_body=ext_proc_pb2.BodyResponse(response=common))
            answer.dynamic_metadata["envoy.lb"] = {name: self._endpoint}
        elif kind == "request_headers":
            answer = ext_proc_pb2.ProcessingResponse(request_headers=ext_proc_pb2.HeadersResponse())
        else:
            answer = ext_proc_pb2.ProcessingResponse(response_headers=ext_proc_pb2.HeadersResponse())
        return answer.SerializeToString()


class OwnWire:
    """One stream over the gateway's own framing."""

    def __init__(self, answers: FixedAnswers, stream: http2_stream.Stream) -> None:
        self._answers, self._stream = answers, stream

    def on_message(self, message: bytes) -> None:
        self._stream.send(self._answers.of(message))

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_reset(self) -> None:
        pass


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("own", "grpc"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--endpoint", required=True, metavar="IP:PORT")
    options = parser.parse_args()
    answers = FixedAnswers(options.endpoint)
    if options.wire == "grpc":
        await grpc_wire(answers, options.port)
        return

    def own(stream: http2_stream.Stream) -> http2_stream.Handler:
        return OwnWire(answers, stream)

    bounds = http2_server.Bounds(message_bytes=1 << 24, streams=10_000, connections=1000, connections_per_address=1000)
    server = http2_server.Server(
        {PATH: own}, bounds, unread_answers.UnreadAnswers(), tenant_budget.TenantBudget(1 << 28)
    )
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", options.port)
    await listening.serve_forever()


async def grpc_wire(answers: FixedAnswers, port: int) -> None:
    async def process(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for raw in requests:
            yield answers.of(raw)

    server = grpc.aio.server()
    service, _, method = PATH[1:].partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(process)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
