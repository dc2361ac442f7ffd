"""How do gRPC messages become the gateway's values? Each field goes directly into the checks that HTTP's fields go into.

A generation becomes an endpoint and a body for the engine. Scheduling fields become `RequestFields`; metadata of the HTTP
names counts where a message does not set the field. A workflow message becomes a `WorkflowDeclaration`. Errors name fields.
"""

import math
from typing import Any

from tidegate_gateway import stage_declaration
from tidegate_gateway.openai import (
    chat_completions,
    completions,
    endpoint,
    endpoint_registry,
    engine_fields,
    http_headers,
    parsed_request,
    request_fields,
)
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import relquery_submission, row_template
from tidegate_gateway.workflows import workflow_declaration, workflow_service
from tidegate_proto.v1 import inference_pb2

_FIELDS: dict[request_fields.Field, str] = {
    "request_id": "request_id",
    "tenant": "tenant",
    "slo_class": "slo_class",
    "urgency": "urgency",
    "deadline": "deadline_ms",
    "slo_ttft": "slo_ttft_ms",
    "slo_tpot": "slo_tpot_ms",
    "workflow": "workflow",
    "stage": "stage",
    "session": "session",
}
_OPTIONAL = frozenset(("urgency", "deadline_ms", "slo_ttft_ms", "slo_tpot_ms"))
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")


def generation(
    request: inference_pb2.GenerateRequest, metadata: http_headers.Headers, *, is_costly: bool
) -> parsed_request.ParsedRequest:
    """The call that a client asks for; always streamed, with one choice. Raises `BadRequest`."""
    kind, body = _body(request)
    return parsed_request.from_body(kind, body, fields(request, metadata), most_choices=1, is_costly=is_costly)


def endpoint_of(request: inference_pb2.CallRequest) -> endpoint.Endpoint:
    """The endpoint that a call names, whose body is JSON. Raises `BadRequest`."""
    kind = next((kind for kind in endpoint_registry.ENDPOINTS if kind.path == request.path), None)
    if kind is None:
        known = ", ".join(kind.path for kind in endpoint_registry.ENDPOINTS)
        raise BadRequest(f"path must be one of {known}", param="path")
    return kind


def relquery(request: inference_pb2.SubmitRelQueryRequest) -> dict[str, Any]:
    """The fields of a relQuery as its JSON body has them, without its rows. Raises `BadRequest`."""
    more = parsed_request.decoded(request.more_fields.encode() or b"{}")
    if not isinstance(more, dict):
        raise BadRequest("more_fields must be a JSON object", param="more_fields")
    document: dict[str, Any] = {"model": request.model}
    match request.WhichOneof("template"):
        case "text":
            document["template"] = request.text
        case "messages":
            messages = request.messages.messages[: row_template.MOST_MESSAGES + 1]  # one too many is rejected
            document["template"] = [{"role": item.role, "content": item.content} for item in messages]
        case _:
            raise BadRequest("give a template: text or messages", param="template")
    if request.HasField("max_tokens"):
        document["max_tokens"] = request.max_tokens
    document |= {name: getattr(request, name) for name in ("endpoint", "id") if getattr(request, name)}
    twice = sorted(set(more) & {*document, *relquery_submission.OWN_FIELDS})
    if twice:
        raise BadRequest(f"{twice[0][:64]} has a field of its own; leave it out of more_fields", param="more_fields")
    return {**more, **document}


Scheduled = inference_pb2.GenerateRequest | inference_pb2.CallRequest | inference_pb2.SubmitRelQueryRequest
"""Messages with scheduling fields."""


def fields(request: Scheduled, metadata: http_headers.Headers) -> request_fields.RequestFields:
    """The scheduling fields of a message. Raises `BadRequest`."""
    http_headers.refuse_unknown(metadata)
    if request.tenant and http_headers.tenant(metadata) not in (None, request.tenant):
        raise BadRequest("tenant must be the one that the metadata names", param="tenant")

    def find(field: request_fields.Field) -> tuple[str, object] | None:
        name = _FIELDS.get(field)
        if name is not None:
            value = getattr(request, name, None)
            if request.HasField(name) if name in _OPTIONAL else value:
                return name, value
        return http_headers.find(metadata, field)

    return request_fields.read(find, request_fields.GRPC_NAMES)


def declaration(request: inference_pb2.CreateWorkflowRequest) -> workflow_declaration.WorkflowDeclaration:
    """The workflow that a client declares. Raises `BadRequest`."""
    try:
        stage_declaration.check_sizes([stage.after for stage in request.stages[: stage_declaration.MOST_STAGES + 1]])
    except stage_declaration.BadStages as error:
        raise workflow_declaration.bad_stages(error) from error
    stages = tuple(
        workflow_declaration.stage(
            stage.name, stage.after, stage.parallel or None, stage.repeat or None, f"stages[{i}]"
        )
        for i, stage in enumerate(request.stages)
    )
    workflow_declaration.check_stages(stages)
    return workflow_declaration.WorkflowDeclaration(
        id=request_fields.name(request.id, "id") if request.id else None,
        template=request.template or None,
        deadline_s=workflow_declaration.deadline_s(request.deadline_ms or None),
        tenant=request_fields.text(request.tenant, "tenant") if request.tenant else None,
        stages=stages,
    )


def requester(
    metadata: http_headers.Headers, idempotency_key: str = "", tenant: str = ""
) -> workflow_service.Requester:
    """The tenant that the metadata or the message names, and the idempotency key of the message. Raises `BadRequest`."""
    names = request_fields.GRPC_NAMES
    key = request_fields.text(idempotency_key, names.idempotency_key) if idempotency_key else None
    named = request_fields.text(tenant, "tenant") if tenant else http_headers.tenant(metadata)
    return workflow_service.Requester(tenant=named, key=key, names=names)


def _body(request: inference_pb2.GenerateRequest) -> tuple[endpoint.Endpoint, dict[str, Any]]:
    """The endpoint, and the body that its engine takes."""
    body: dict[str, Any] = {"model": request.model, "stream": True}
    kind = completions.ENDPOINT
    if request.WhichOneof("input") == "messages":
        kind = chat_completions.ENDPOINT
        messages = request.messages.messages[: chat_completions.MOST_MESSAGES + 1]  # one too many is rejected
        for i, item in enumerate(messages):
            if not item.role:
                raise BadRequest(f"messages[{i}] must have a role", param=f"messages[{i}]")
        body["messages"] = [{"role": item.role, "content": item.content} for item in messages]
    elif request.WhichOneof("input") == "prompt":
        body["prompt"] = request.prompt
    else:
        raise BadRequest("give a prompt or messages", param="input")
    for name in _SAMPLING:
        if request.HasField(name):
            body[name] = getattr(request, name)
            if not math.isfinite(body[name]):
                raise BadRequest(f"{name} must be a finite number", param=name)
    if request.stop:
        body["stop"] = list(request.stop[: engine_fields.MOST_STOPS + 1])
    return kind, body
