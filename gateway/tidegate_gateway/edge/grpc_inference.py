"""Calls over gRPC: `Generate` with typed fields, and `Call` with the JSON of any OpenAI endpoint."""

import io
from collections.abc import Iterator
from typing import Any

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import call_requests, grpc_answers, grpc_requests
from tidegate_gateway.lifecycle import relay
from tidegate_gateway.openai import bounded_json, endpoint, error_table, parsed_request
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc


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
                        for text, reason in _pieces(block, parsed.endpoint):
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


def _pieces(block: bytes, kind: endpoint.Endpoint) -> Iterator[tuple[str, str]]:
    """Text and finish reason of each event in a block. Raises `EngineTrouble` for an error event."""
    for payload in _payloads(block, kind):
        try:
            event = bounded_json.of_engine(payload)
        except ValueError as error:
            raise error_table.EngineTrouble("the engine's stream is garbled") from error
        if not isinstance(event, dict):
            raise error_table.EngineTrouble("the engine's stream is garbled")
        if "error" in event:
            words = error_table.engine_message(payload)[0]
            raise error_table.EngineTrouble(f"the engine failed in mid-answer: {words}")
        if not endpoint.has_choices(event):
            raise error_table.EngineTrouble("the engine's stream is garbled")
        yield from map(_piece, event["choices"])


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
    for line in io.BytesIO(block):
        payload = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and payload != end_marker:
            yield payload
