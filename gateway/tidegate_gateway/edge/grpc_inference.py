"""Calls over gRPC: `Generate` with typed fields, and `Call` with the JSON of any OpenAI endpoint."""

import io
from collections.abc import Iterator
from typing import Any

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import call_requests, grpc_answers, grpc_requests
from tidegate_gateway.lifecycle import relay
from tidegate_gateway.openai import bounded_json, endpoint, error_table, parsed_request
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

GARBLED = "the engine's stream is garbled"
BLANK = (b"\n", b"\r\n")
"""The line that ends an event."""


class Inference(inference_pb2_grpc.InferenceServicer):
    """Generation."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._gateway = gateway
        self._requests = call_requests.CallRequests(gateway.settings.limits.choices)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc_answers.Context) -> None:
        gateway, write_s = self._gateway, self._gateway.settings.limits.write_s
        now = gateway.clock()
        try:
            parsed = grpc_requests.generation(request, grpc_answers.metadata(context), is_costly=context.is_costly)
            async with gateway.calls.answer(now, parsed) as answer:
                if not answer.reply.streamed:
                    raise error_table.rejected(answer.reply.first)
                await grpc_answers.write(
                    context, write_s, inference_pb2.GenerateResponse(accepted=_accepted(parsed, answer))
                )
                finish = ""
                block = answer.reply.take_first()
                while block:
                    try:
                        for text, reason in _pieces(block, parsed):
                            finish = reason or finish
                            if text:
                                await grpc_answers.write(context, write_s, inference_pb2.GenerateResponse(text=text))
                    except error_table.EngineTrouble as error:
                        await answer.fail(error)
                        raise
                    block = await answer.next_block()
                finished = inference_pb2.Finished(
                    finish_reason=finish,
                    prompt_tokens=answer.record.prompt_tokens or 0,
                    completion_tokens=answer.record.tokens,
                )
                await grpc_answers.write(context, write_s, inference_pb2.GenerateResponse(finished=finished))
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)

    async def Call(self, request: inference_pb2.CallRequest, context: grpc_answers.Context) -> None:
        gateway, write_s = self._gateway, self._gateway.settings.limits.write_s
        now = gateway.clock()
        try:
            kind = grpc_requests.endpoint_of(request)
            fields = grpc_requests.fields(request, grpc_answers.metadata(context))
            parsed = await self._requests.parsed(
                kind, request.body, fields, tenant=fields.tenant, is_costly=context.is_costly
            )
            async with gateway.calls.answer(now, parsed) as answer:
                reply = answer.reply
                if not reply.streamed and reply.status != 200:
                    raise error_table.rejected(reply.first)
                accepted = inference_pb2.CallResponse(accepted=_accepted(parsed, answer))
                await grpc_answers.write(context, write_s, accepted)
                block = reply.take_first()
                while block:
                    for body in _payloads(block, parsed.endpoint) if reply.streamed else (block,):
                        await grpc_answers.write(context, write_s, inference_pb2.CallResponse(body=body))
                    block = await answer.next_block()
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)


def _accepted(request: parsed_request.ParsedRequest, answer: relay.Relay) -> inference_pb2.Accepted:
    record = answer.record
    slack_s = record.slack_s
    return inference_pb2.Accepted(
        request_id=request.fields.request_id or answer.call_id,
        engine=record.engine or "",
        queue_ms=round(record.queue_s * 1000),
        slack_ms=None if slack_s is None else round(slack_s * 1000),
    )


def _pieces(block: bytes, request: parsed_request.ParsedRequest) -> Iterator[tuple[str, str]]:
    """Text and finish reason of each choice in a block. Raises `EngineTrouble` for an error event, and for a block that
    holds more than the answer to `request` can have."""
    try:
        if len(block) > bounded_json.UNCOUNTED_BYTES:
            bounded_json.PartCount(bounded_json.ENGINE_PARTS).add(block)
        for payload in _payloads(block, request.endpoint):
            event = bounded_json.of_engine(payload)
            if not isinstance(event, dict):
                raise error_table.EngineTrouble(GARBLED)
            if "error" in event:
                words = error_table.engine_message(payload)[0]
                raise error_table.EngineTrouble(f"the engine failed in mid-answer: {words}")
            if not endpoint.has_choices(event) or len(event["choices"]) > request.size.choices:
                raise error_table.EngineTrouble(GARBLED)
            yield from map(_piece, event["choices"])
    except ValueError as error:
        raise error_table.EngineTrouble(GARBLED) from error


def _piece(choice: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of a choice; values of other types count as absent."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    return text if isinstance(text, str) else "", reason if isinstance(reason, str) else ""


def _payloads(block: bytes, kind: endpoint.Endpoint) -> Iterator[bytes]:
    """The data of each event in a block, without the end marker. A slow client takes them one after the other, and a
    list of all of them would take ten times the memory of the block."""
    end_marker = b"" if kind.stream is None else kind.stream.end_marker
    data = b""
    more: list[bytes] = []
    for line in io.BytesIO(block):
        if line in BLANK:
            if more:
                data = b"\n".join([data, *more])
                more.clear()
            if data and data != end_marker:
                yield data
            data = b""
        elif line.startswith(b"data:"):
            if data:
                more.append(line[5:].strip())
            else:
                data = line[5:].strip()
