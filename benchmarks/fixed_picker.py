"""A picker without decisions, so that `endpoint_picker` can measure what the protocol alone costs: it sends every call
to one engine and leaves its body as it is.

    python benchmarks/fixed_picker.py --wire own|grpc|h2 --port PORT --endpoint IP:PORT

`own` is the gateway's server of such streams (`http2_connection`), `grpc` is `grpc.aio`, and `h2` frames the streams
over the library of this name, which must be installed for that.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from tidegate_gateway.edge import http2_connection
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

    def __init__(self, answers: FixedAnswers, stream: http2_connection.Stream) -> None:
        self._answers, self._stream = answers, stream

    def on_message(self, message: bytes) -> None:
        self._stream.send(self._answers.of(message))

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_reset(self) -> None:
        pass


class H2Wire(asyncio.Protocol):
    """One connection over the library h2."""

    def __init__(self, answers: FixedAnswers) -> None:
        import h2.config
        import h2.connection

        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config=config)
        self._answers = answers
        self._begun: set[int] = set()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._h2.initiate_connection()
        self._transport.write(self._h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        import h2.exceptions

        for event in self._h2.receive_data(data):
            with contextlib.suppress(h2.exceptions.StreamClosedError):  # Envoy ends a stream and resets it
                self._on_event(event)
        self._transport.write(self._h2.data_to_send())

    def _on_event(self, event: Any) -> None:
        import h2.events

        if isinstance(event, h2.events.DataReceived):
            stream = event.stream_id
            self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
            if len(event.data) > 5:
                if stream not in self._begun:
                    self._begun.add(stream)
                    self._h2.send_headers(stream, [(b":status", b"200"), (b"content-type", b"application/grpc")])
                message = self._answers.of(event.data[5:])
                self._h2.send_data(stream, b"\x00" + len(message).to_bytes(4) + message)
        elif isinstance(event, h2.events.StreamEnded):
            self._begun.discard(event.stream_id)
            self._h2.send_headers(event.stream_id, [(b"grpc-status", b"0")], end_stream=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("own", "grpc", "h2"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--endpoint", required=True, metavar="IP:PORT")
    options = parser.parse_args()
    answers = FixedAnswers(options.endpoint)
    if options.wire == "grpc":
        await grpc_wire(answers, options.port)
        return

    def own(stream: http2_connection.Stream) -> http2_connection.Handler:
        return OwnWire(answers, stream)

    server = http2_connection.Server(
        {PATH: own}, most_message_bytes=1 << 24, most_streams=10_000, most_connections=1000
    )
    factory = server if options.wire == "own" else lambda: H2Wire(answers)
    listening = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", options.port)
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
