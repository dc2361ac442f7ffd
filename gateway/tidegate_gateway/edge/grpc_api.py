"""The same API over gRPC: Inference, Workflows, health and reflection.

`grpc_requests` turns messages into the values that HTTP requests become too; from there both wires take the same way.
Errors carry `ErrorInfo` (our code as its reason) and `RetryInfo`. A client that cancels a stream, or does not read
it, stops the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import orjson
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import grpc_requests
from tidegate_gateway.lifecycle import relay
from tidegate_gateway.openai import endpoint, error_table, http_headers, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_service, workflow_view
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger("tidegate.gateway")

DOMAIN = "tidegate.dev"
HEALTH_S = 0.2
KEEPALIVE_S, ANSWERED_S = 30, 10
"""A silent connection gets a ping so often, and is closed when a ping is not answered for so long."""
STOP_S = 1.0
SERVICES = ("tidegate.v1.Inference", "tidegate.v1.Workflows")

Context = grpc.aio.ServicerContext[Any, Any]


class Inference(inference_pb2_grpc.InferenceServicer):
    """Generation."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        gateway, write_s = self._gateway, self._gateway.settings.limits.write_s
        now = gateway.clock()
        try:
            parsed = grpc_requests.generation(request, _metadata(context))
            async with gateway.calls.answer(now, parsed) as answer:
                if not answer.reply.streamed:
                    raise error_table.rejected(answer.reply.first)
                await _write(context, write_s, inference_pb2.GenerateResponse(accepted=_accepted(parsed, answer)))
                finish = ""
                block = answer.reply.first
                while block:
                    for text, reason in _pieces(block, parsed.endpoint):
                        finish = reason or finish
                        if text:
                            await _write(context, write_s, inference_pb2.GenerateResponse(text=text))
                    block = await answer.next_block()
                finished = inference_pb2.Finished(
                    finish_reason=finish,
                    prompt_tokens=answer.record.prompt_tokens or 0,
                    completion_tokens=answer.record.tokens,
                )
                await _write(context, write_s, inference_pb2.GenerateResponse(finished=finished))
        except error_table.GatewayError as error:
            await abort(context, error)


class Workflows(inference_pb2_grpc.WorkflowsServicer):
    """Workflows; each method has the meaning of its HTTP route."""

    def __init__(self, workflows: workflow_service.Workflows) -> None:
        self._workflows = workflows

    async def Create(self, request: inference_pb2.CreateWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        async def create(by: workflow_service.Requester) -> store_contract.Record:
            return await self._workflows.create(grpc_requests.declaration(request), by)

        return await _answered(context, create, request.idempotency_key)

    async def Get(self, request: inference_pb2.GetWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await _answered(context, lambda by: self._workflows.get(request.id, by))

    async def List(
        self, request: inference_pb2.ListWorkflowsRequest, context: Context
    ) -> inference_pb2.ListWorkflowsResponse:
        try:
            by, limit = grpc_requests.requester(_metadata(context)), request.limit or workflow_service.LISTED
            records, more = await self._workflows.listed(request.state or None, limit, by)
        except error_table.GatewayError as error:
            await abort(context, error)
        return inference_pb2.ListWorkflowsResponse(workflows=map(_workflow, records), has_more=more)

    async def CompleteStage(
        self, request: inference_pb2.CompleteStageRequest, context: Context
    ) -> inference_pb2.Workflow:
        return await _answered(
            context,
            lambda by: self._workflows.complete_stage(request.id, request.stage, by),
            request.idempotency_key,
        )

    async def Complete(
        self, request: inference_pb2.CompleteWorkflowRequest, context: Context
    ) -> inference_pb2.Workflow:
        return await _answered(context, lambda by: self._workflows.complete(request.id, by), request.idempotency_key)

    async def Cancel(self, request: inference_pb2.CancelWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await _answered(context, lambda by: self._workflows.cancel(request.id, by))


async def _answered(
    context: Context,
    step: Callable[[workflow_service.Requester], Awaitable[store_contract.Record]],
    idempotency_key: str = "",
) -> inference_pb2.Workflow:
    """One step for the requester that the metadata names: the workflow as it is then, or the error."""
    try:
        return _workflow(await step(grpc_requests.requester(_metadata(context), idempotency_key)))
    except error_table.GatewayError as error:
        await abort(context, error)


class Readable(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to bytes that are not the message of our method; gRPC itself would answer UNKNOWN."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or call.method.split("/")[1] not in SERVICES:
            return handler

        def read(raw: bytes) -> Any:
            try:
                return handler.request_deserializer(raw)
            except message.DecodeError:
                return None

        async def one(request: Any, context: Context) -> Any:
            if request is None:
                await abort(context, _unreadable(call.method))
            return await handler.unary_unary(request, context)

        async def many(request: Any, context: Context) -> None:
            if request is None:
                await abort(context, _unreadable(call.method))
            await handler.unary_stream(request, context)

        if handler.response_streaming:
            return handler._replace(request_deserializer=read, unary_stream=many)
        return handler._replace(request_deserializer=read, unary_unary=one)


def _unreadable(method: str) -> BadRequest:
    return BadRequest(f"these bytes are not the message that {method} takes; reflection describes it")


@contextlib.asynccontextmanager
async def serving(gateway: running_gateway.Gateway, host: str, port: int) -> AsyncIterator[str]:
    """A started gRPC server; its address as host:port. Raises `OSError` when the port is taken."""
    limits = gateway.settings.limits
    server = grpc.aio.server(
        interceptors=[Readable()],
        maximum_concurrent_rpcs=limits.connections,
        options=[
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", ANSWERED_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(gateway), server)  # type: ignore[no-untyped-call]
    inference_pb2_grpc.add_WorkflowsServicer_to_server(Workflows(gateway.workflows), server)  # type: ignore[no-untyped-call]
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    await server.start()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_health(gateway, checks))
        try:
            yield f"{host}:{bound}"
        finally:
            watching.cancel()
            await server.stop(STOP_S)


async def _health(gateway: running_gateway.Gateway, checks: Any) -> None:
    """Keeps the health service in step with /ready."""
    shown: int | None = None
    while True:
        ready = gateway.problems()[0] in ("ready", "degraded")
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        if status != shown:
            for service in ("", *SERVICES):
                await checks.set(service, status)
            shown = status
        await asyncio.sleep(HEALTH_S)


async def abort(context: Context, error: error_table.GatewayError) -> NoReturn:
    """Ends the call with the error, its reason, and the delay after which to retry."""
    status = status_pb2.Status(code=_code(error).value[0], message=error.message)
    reason = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    if error.param:
        reason.metadata["param"] = error.param
    status.details.add().Pack(reason)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=0, seconds=max(1, round(error.retry_after_s)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(_code(error), status.message, trailing_metadata=trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError("the client went away before it read the error") from gone


async def _write(context: Context, write_s: float, event: inference_pb2.GenerateResponse) -> None:
    """Sends the next message of a stream. Raises `BadRequest` when the client does not take it within `write_s` seconds."""
    try:
        async with asyncio.timeout(write_s):
            await context.write(event)
    except TimeoutError as error:
        late = f"the answer was not read within {write_s:.3g} s"
        raise BadRequest(late, code="request_timeout") from error


def _code(error: error_table.GatewayError) -> grpc.StatusCode:
    code: grpc.StatusCode = grpc.StatusCode[error.row.grpc]
    return code


def _metadata(context: Context) -> http_headers.Headers:
    given = context.invocation_metadata() or ()
    return http_headers.headers_of((key, value) for key, value in given if isinstance(value, str))


def _accepted(request: parsed_request.ParsedRequest, answer: relay.Relay) -> inference_pb2.Accepted:
    record = answer.record
    slack_s = record.slack_s
    return inference_pb2.Accepted(
        request_id=request.fields.request_id or answer.call_id,
        engine=record.engine or "",
        queue_ms=round(record.queue_s * 1000),
        slack_ms=None if slack_s is None else round(slack_s * 1000),
    )


def _pieces(block: bytes, kind: endpoint.Endpoint) -> list[tuple[str, str]]:
    """Text and finish reason of each event in a block. Raises `EngineTrouble` for an error event."""
    end_marker = b"" if kind.stream is None else kind.stream.end_marker
    pieces: list[tuple[str, str]] = []
    for line in block.splitlines():
        payload = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or payload == end_marker:
            continue
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise error_table.EngineTrouble("the engine's stream is garbled") from error
        if not isinstance(event, dict):
            raise error_table.EngineTrouble("the engine's stream is garbled")
        if "error" in event:
            words = error_table.engine_message(payload)[0]
            raise error_table.EngineTrouble(f"the engine failed in mid-answer: {words}")
        if not endpoint.has_choices(event):
            raise error_table.EngineTrouble("the engine's stream is garbled")
        pieces += map(_piece, event["choices"])
    return pieces


def _piece(choice: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of a choice; values of other types count as absent."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    return text if isinstance(text, str) else "", reason if isinstance(reason, str) else ""


def _workflow(record: store_contract.Record) -> inference_pb2.Workflow:
    return inference_pb2.Workflow(
        id=record.id,
        state=record.state,
        template=record.template,
        tenant=record.tenant,
        deadline_ms=record.deadline_ms - record.created_ms,
        left_ms=workflow_view.left_ms(record),
        outcome=record.outcome or "",
        ended_at="" if record.ended_ms is None else workflow_view.instant(record.ended_ms),
        stages=[
            inference_pb2.Stage(
                name=stage.name,
                state=workflow_view.stage_state(record, stage),
                after=stage.after,
                parallel=stage.parallel,
                calls_running=stage.running,
                calls_done=stage.done,
                share_ms=stage.share_ms,
                time_ms=workflow_view.time_ms(record, stage),
                slack_ms=workflow_view.slack_ms(record, stage),
            )
            for stage in record.stages
        ],
    )
