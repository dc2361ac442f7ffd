"""The OpenAI-compatible API over HTTP, workflows, health, and the status page.

Handlers parse, ask `lifecycle.calls` for the answer, and write bytes; they decide nothing. A client that hangs up cancels
its handler, and with it the call. `http_listener` cuts a client that does not read. Only the paths in these tables exist:
engines have endpoints that need no key, and none of them can be reached through the gateway.
"""

import functools
from typing import Any

from aiohttp import web

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import http_listener, state_snapshot, status_page
from tidegate_gateway.lifecycle import relay
from tidegate_gateway.openai import (
    endpoint,
    endpoint_registry,
    error_table,
    http_headers,
    parsed_request,
    request_fields,
)
from tidegate_gateway.workflows import workflow_declaration, workflow_service, workflow_view


class HttpApi:
    """The handlers of one gateway."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._gateway = gateway
        self._limits = gateway.settings.limits
        self._workflows = gateway.workflows

    def routes(self) -> http_listener.Routes:
        """The client port: only these paths exist."""
        route = http_listener.Route
        listen = self._gateway.settings.listen
        views = [
            *([route(method="GET", path="/metrics", handler=self.metrics)] if listen.client_metrics else []),
            *([route(method="GET", path="/", handler=self.page)] if listen.status_page else []),
        ]
        return http_listener.Routes(
            [
                *(
                    route(method="POST", path=kind.path, handler=self._handler(kind))
                    for kind in endpoint_registry.ENDPOINTS
                ),
                route(method="GET", path="/v1/models", handler=self._models),
                route(method="GET", path="/v1/models/{model...}", handler=self._one_model),
                route(method="POST", path="/v1/workflows", handler=self._create),
                route(method="GET", path="/v1/workflows", handler=self._list),
                route(method="GET", path="/v1/workflows/{workflow}", handler=self._get),
                route(method="DELETE", path="/v1/workflows/{workflow}", handler=self._cancel),
                route(method="POST", path="/v1/workflows/{workflow}/complete", handler=self._complete),
                route(method="POST", path="/v1/workflows/{workflow}/stages/{stage}/complete", handler=self._stage),
                *self._health_routes(),
                *views,
            ]
        )

    def probes(self) -> http_listener.Routes:
        """The paths that Kubernetes and Prometheus read, for a port of their own that clients cannot fill."""
        return http_listener.Routes(
            [
                http_listener.Route(method="GET", path="/metrics", handler=self.metrics),
                *self._health_routes(),
            ]
        )

    def _health_routes(self) -> list[http_listener.Route]:
        return [
            http_listener.Route(method="GET", path="/health", handler=_health),
            http_listener.Route(method="GET", path="/ready", handler=self._ready),
        ]

    # Calls.

    def _handler(self, kind: endpoint.Endpoint) -> http_listener.Handler:
        return functools.partial(self._generate, kind)

    async def _generate(self, kind: endpoint.Endpoint, request: web.BaseRequest) -> web.StreamResponse:
        gateway = self._gateway
        raw = await http_listener.body(request, self._limits)
        now = gateway.clock()
        fields = http_headers.read(http_headers.headers_of(request.headers.items()))
        parsed = parsed_request.from_json(kind, raw, fields, most_choices=self._limits.choices)
        async with gateway.calls.answer(now, parsed) as answer:
            headers = _headers(fields, answer)
            if answer.reply.streamed and kind.stream is not None:
                return await self._stream(request, answer, headers, kind.stream)
            if answer.reply.status != 200:
                rejected = error_table.rejected(answer.reply.first)
                return web.Response(status=rejected.row.status, body=rejected.body(), headers=headers)
            return web.Response(body=answer.reply.first, headers=headers)

    async def _stream(
        self,
        request: web.BaseRequest,
        answer: relay.Relay,
        headers: dict[str, str],
        dialect: endpoint.StreamDialect,
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=200, headers={**headers, "Cache-Control": "no-cache"})
        await response.prepare(request)
        block = answer.reply.first
        while block:
            await response.write(block)
            try:
                block = await answer.next_block()
            except error_table.GatewayError as error:
                await response.write(dialect.error_events(error.body()))
                break
        await response.write_eof()
        return response

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        models = list(map(_model, self._gateway.directory.models))
        return http_listener.reply({"object": "list", "data": models})

    async def _one_model(self, request: web.BaseRequest, model: str) -> web.StreamResponse:
        known = self._gateway.directory.models
        if model not in known:
            raise parsed_request.unknown_model(model, known)
        return http_listener.reply(_model(model))

    # Workflows.

    async def _create(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await http_listener.json_object(request, self._limits)
        by = _requester(request)
        record = await self._workflows.create(workflow_declaration.from_json(body), by)
        return http_listener.reply(workflow_view.as_json(record), 201)

    async def _get(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        record = await self._workflows.get(workflow, _requester(request))
        return http_listener.reply(workflow_view.as_json(record))

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        for name in request.query:
            if name not in ("state", "limit") or len(request.query.getall(name)) > 1:
                raise error_table.BadRequest("a list takes state and limit, each once", param=name[:64])
        limit = http_headers.whole_number(request.query.get("limit", str(workflow_service.LISTED)))
        records, more = await self._workflows.listed(request.query.get("state"), limit or 0, _requester(request))
        shown = list(map(workflow_view.as_json, records))
        return http_listener.reply({"object": "list", "data": shown, "has_more": more})

    async def _cancel(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        record = await self._workflows.cancel(workflow, _requester(request))
        return http_listener.reply(workflow_view.as_json(record))

    async def _complete(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        await http_listener.json_object(request, self._limits)
        record = await self._workflows.complete(workflow, _requester(request))
        return http_listener.reply(workflow_view.as_json(record))

    async def _stage(self, request: web.BaseRequest, workflow: str, stage: str) -> web.StreamResponse:
        await http_listener.json_object(request, self._limits)
        record = await self._workflows.complete_stage(workflow, stage, _requester(request))
        return http_listener.reply(workflow_view.as_json(record))

    # Health.

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        status, reasons = self._gateway.problems()
        code = 200 if status in ("ready", "degraded") else 503
        return http_listener.reply({"status": status, "reasons": reasons}, code)

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        gateway = self._gateway
        gateway.metrics.observe(gateway.clock(), gateway.core)
        text, content_type = gateway.metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        text = status_page.render(state_snapshot.snapshot(self._gateway))
        return web.Response(text=text, content_type="text/html", headers=status_page.HEADERS)


async def _health(request: web.BaseRequest) -> web.StreamResponse:
    return http_listener.reply({"status": "ok"})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}


def _headers(fields: request_fields.RequestFields, answer: relay.Relay) -> dict[str, str]:
    record = answer.record
    headers = {
        "Content-Type": answer.reply.content_type,
        "x-request-id": fields.request_id or answer.call_id,
        "x-tidegate-engine": record.engine or "",
        "x-tidegate-queue-ms": str(round(record.queue_s * 1000)),
    }
    if record.slack_s is not None:
        headers["x-tidegate-slack-ms"] = str(round(record.slack_s * 1000))
    return headers


def _requester(request: web.BaseRequest) -> workflow_service.Requester:
    """The tenant and the Idempotency-Key that a request about workflows names. Raises `BadRequest`."""
    headers = http_headers.headers_of(request.headers.items())
    names = request_fields.HTTP_NAMES
    key = headers.get("idempotency-key")
    return workflow_service.Requester(
        tenant=http_headers.tenant(headers),
        key=None if key is None else request_fields.text(key, names.idempotency_key),
        names=names,
    )
