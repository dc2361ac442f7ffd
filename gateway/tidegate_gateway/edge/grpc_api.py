"""The same API over gRPC: Inference, Workflows, health and reflection.

Messages are brought into the shape that HTTP has (a body and headers) and then take the same way: one validation, one
admission, one router. Errors carry `ErrorInfo` (our code as its reason) and `RetryInfo`. Cancelling a stream stops the
engine, and so does not reading it.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import orjson
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate_gateway.lifecycle.relay import Serving
from tidegate_gateway.openai import error_table, event_stream, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.running_gateway import Gateway
from tidegate_gateway.workflows import workflow_service
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger("tidegate.gateway")

DOMAIN = "tidegate.dev"
HEALTH_S = 0.2
KEEPALIVE_S, ANSWERED_S = 30, 10
"""A silent connection is asked so often whether it lives, and closed when it has not answered for so long."""
SERVICES = ("tidegate.v1.Inference", "tidegate.v1.Workflows")

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class Inference(inference_pb2_grpc.InferenceServicer):
    """Generation."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        gateway, write_s = self._gateway, self._gateway.told.limits.write_s
        now = gateway.clock()
        try:
            kind, body = _body(request)
            ask = parsed_request.read_body(kind, _headers(request, context), body, most_choices=1)
            async with gateway.answer(now, ask) as serving:
                if not serving.reply.streamed:
                    raise error_table.rejected(serving.reply.first)
                await _write(context, write_s, inference_pb2.GenerateResponse(accepted=_accepted(ask, serving)))
                finish = ""
                block = serving.reply.first
                while block:
                    for text, reason in _pieces(block):
                        finish = reason or finish
                        if text:
                            await _write(context, write_s, inference_pb2.GenerateResponse(text=text))
                    block = await serving.next_block()
                meter = serving.reply.meter
                finished = inference_pb2.Finished(
                    finish_reason=finish,
                    prompt_tokens=meter.prompt_tokens or 0,
                    completion_tokens=meter.generated,
                )
                await _write(context, write_s, inference_pb2.GenerateResponse(finished=finished))
        except error_table.GatewayError as error:
            await abort(context, error)


class Workflows(inference_pb2_grpc.WorkflowsServicer):
    """Workflows; each method is its HTTP twin."""

    def __init__(self, flows: workflow_service.Workflows) -> None:
        self._flows = flows

    async def Create(self, request: inference_pb2.CreateWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        body: dict[str, Any] = {
            "id": request.id,
            "template": request.template,
            "tenant": request.tenant,
            "deadline_ms": request.deadline_ms,
            "stages": [
                {"name": stage.name, "after": list(stage.after), "parallel": stage.parallel or None}
                for stage in request.stages
            ],
        }
        given = {key: value for key, value in body.items() if value}
        return await self._answered(context, self._flows.create, given, key=request.idempotency_key)

    async def Get(self, request: inference_pb2.GetWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await self._answered(context, self._flows.get, request.id)

    async def List(
        self, request: inference_pb2.ListWorkflowsRequest, context: Context
    ) -> inference_pb2.ListWorkflowsResponse:
        try:
            tenant, limit = parsed_request.tenant(_metadata(context)), request.limit or workflow_service.LISTED
            rows, more = await self._flows.listed(request.state or None, limit, tenant=tenant)
        except error_table.GatewayError as error:
            await abort(context, error)
        return inference_pb2.ListWorkflowsResponse(workflows=map(_workflow, rows), has_more=more)

    async def CompleteStage(
        self, request: inference_pb2.CompleteStageRequest, context: Context
    ) -> inference_pb2.Workflow:
        key = request.idempotency_key
        return await self._answered(context, self._flows.complete_stage, request.id, request.stage, key=key)

    async def Complete(
        self, request: inference_pb2.CompleteWorkflowRequest, context: Context
    ) -> inference_pb2.Workflow:
        return await self._answered(context, self._flows.complete, request.id, key=request.idempotency_key)

    async def Cancel(self, request: inference_pb2.CancelWorkflowRequest, context: Context) -> inference_pb2.Workflow:
        return await self._answered(context, self._flows.cancel, request.id)

    async def _answered(
        self, context: Context, step: Callable[..., Awaitable[Mapping[str, Any]]], *arguments: Any, **options: Any
    ) -> inference_pb2.Workflow:
        """One step for the tenant that the metadata names, answered or refused."""
        try:
            return _workflow(await step(*arguments, tenant=parsed_request.tenant(_metadata(context)), **options))
        except error_table.GatewayError as error:
            await abort(context, error)


class Readable(grpc.aio.ServerInterceptor):
    """Refuses bytes that are not the message of our method; without it, gRPC says UNKNOWN."""

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
async def serving(gateway: Gateway, host: str, port: int) -> AsyncIterator[str]:
    """A started gRPC server; its address as host:port. Raises `OSError` when the port is taken."""
    limits = gateway.told.limits
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
    inference_pb2_grpc.add_WorkflowsServicer_to_server(Workflows(gateway.flows), server)  # type: ignore[no-untyped-call]
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
            await server.stop(1.0)


async def _health(gateway: Gateway, checks: Any) -> None:
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
    """Ends the call with the error, its reason and when to retry; what HTTP has as headers is named as fields."""
    status = status_pb2.Status(code=_code(error).value[0], message=_in_fields(error.message))
    reason = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    if error.param:
        reason.metadata["param"] = _in_fields(error.param)
    status.details.add().Pack(reason)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=0, seconds=max(1, round(error.retry_after_s)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(_code(error), status.message, trailing_metadata=trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError("the client went away before it read its refusal") from gone


async def _write(context: Context, write_s: float, event: inference_pb2.GenerateResponse) -> None:
    """Sends the next message of a stream. Raises `BadRequest` when the client does not take it within `write_s` seconds."""
    try:
        async with asyncio.timeout(write_s):
            await context.write(event)
    except TimeoutError as error:
        late = f"the answer was not read within {write_s:.3g} s"
        raise BadRequest(late, code="request_timeout") from error


def _in_fields(text: str) -> str:
    return _HEADER.sub(lambda found: _NAMES[found[0]], text)


def _code(error: error_table.GatewayError) -> grpc.StatusCode:
    code: grpc.StatusCode = grpc.StatusCode[error.row.grpc]
    return code


def _body(request: inference_pb2.GenerateRequest) -> tuple[parsed_request.Kind, dict[str, Any]]:
    body: dict[str, Any] = {"model": request.model, "stream": True}
    kind: parsed_request.Kind = "completion"
    if request.WhichOneof("input") == "messages":
        kind = "chat"
        body["messages"] = [{"role": item.role, "content": item.content} for item in request.messages.messages]
    elif request.WhichOneof("input") == "prompt":
        body["prompt"] = request.prompt
    else:
        raise BadRequest("give a prompt or messages", param="input")
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if request.HasField(name):
            body[name] = getattr(request, name)
            if not math.isfinite(body[name]):
                raise BadRequest(f"{name} must be a finite number", param=name)
    if request.stop:
        body["stop"] = list(request.stop)
    return kind, body


def _headers(request: inference_pb2.GenerateRequest, context: Context) -> dict[str, str]:
    """The message's scheduling fields as headers; metadata of the same names counts where a field is not set."""
    headers = dict(_metadata(context))
    if request.tenant and parsed_request.tenant(headers) not in (None, request.tenant):
        raise BadRequest("tenant must be the one that the metadata names", param="tenant")
    for name, field in _FIELDS.items():
        if (field in _OPTIONAL and request.HasField(field)) or (field not in _OPTIONAL and getattr(request, field)):
            headers[name] = str(getattr(request, field))
    return headers


def _metadata(context: Context) -> parsed_request.Headers:
    given = context.invocation_metadata() or ()
    return parsed_request.headers_of((key, value) for key, value in given if isinstance(value, str))


_OPTIONAL = ("urgency", "deadline_ms", "slo_ttft_ms", "slo_tpot_ms")
_FIELDS = {
    "x-request-id": "request_id",
    "x-tidegate-tenant": "tenant",
    "x-tidegate-class": "slo_class",
    "x-tidegate-urgency": "urgency",
    "x-tidegate-deadline-ms": "deadline_ms",
    "x-tidegate-slo-ttft-ms": "slo_ttft_ms",
    "x-tidegate-slo-tpot-ms": "slo_tpot_ms",
    "x-tidegate-workflow": "workflow",
    "x-tidegate-stage": "stage",
    "x-session-id": "session",
}
_NAMES = {**_FIELDS, "Idempotency-Key": "idempotency_key", "Retry-After": "RetryInfo"}
_HEADER = re.compile("|".join(_NAMES))


def _accepted(ask: parsed_request.Ask, serving: Serving) -> inference_pb2.Accepted:
    slack_s = serving.slack_s
    return inference_pb2.Accepted(
        request_id=ask.request_id or serving.job.call.id,
        engine=serving.engine or "",
        queue_ms=round(serving.queue_s * 1000),
        slack_ms=None if slack_s is None else round(slack_s * 1000),
    )


def _pieces(block: bytes) -> list[tuple[str, str]]:
    """Text and finish reason of each event in a block. Raises `EngineTrouble` for an error event."""
    pieces = []
    for line in block.splitlines():
        payload = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or payload == event_stream.LAST:
            continue
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise error_table.EngineTrouble("the engine's stream is garbled") from error
        if "error" in event:
            raise error_table.EngineTrouble(f"the engine failed in mid-answer: {error_table.engines_words(payload)[0]}")
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
            pieces.append((text or "", choice.get("finish_reason") or ""))
    return pieces


def _workflow(flow: Mapping[str, Any]) -> inference_pb2.Workflow:
    return inference_pb2.Workflow(
        id=flow["id"],
        state=flow["state"],
        template=flow["template"] or "",
        tenant=flow["tenant"] or "",
        deadline_ms=flow["deadline_ms"],
        left_ms=flow["left_ms"],
        stages=[
            inference_pb2.Stage(
                name=stage["name"],
                state=stage["state"],
                after=stage["after"],
                parallel=stage["parallel"] or 0,
                calls_running=stage["calls_running"],
                calls_done=stage["calls_done"],
            )
            for stage in flow["stages"]
        ],
    )
