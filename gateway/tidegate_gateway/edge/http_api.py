"""The OpenAI-compatible API over HTTP, workflows, health, and the status page.

Handlers parse (`wire`), admit, serve, and write bytes; they decide nothing. A client that hangs up cancels its handler,
and with it the call; one that does not read is cut by `listener`. Unknown paths do not exist: engines have endpoints that
take no key, and none of them can be reached through here.
"""

from typing import Any

from aiohttp import web

from tidegate_gateway.edge import http_listener, snapshot, status_page
from tidegate_gateway.lifecycle.relay import Serving
from tidegate_gateway.openai import error_table, event_stream, parsed_request
from tidegate_gateway.running_gateway import Gateway
from tidegate_gateway.workflows import workflow_service


class Web:
    """The handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = gateway.told.limits

    def routes(self) -> http_listener.Routes:
        """The allow-list."""
        route = http_listener.Route
        told = self._gateway.told.listen
        views = [
            *([route(method="GET", path="/metrics", handler=self.metrics)] if told.client_metrics else []),
            *([route(method="GET", path="/", handler=self.page)] if told.status_page else []),
        ]
        return http_listener.Routes(
            [
                route(method="POST", path="/v1/chat/completions", handler=self._chat),
                route(method="POST", path="/v1/completions", handler=self._completion),
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
        """What Kubernetes and Prometheus ask, for a port of their own that clients cannot fill."""
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

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _completion(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def _generate(self, request: web.BaseRequest, kind: parsed_request.Kind) -> web.StreamResponse:
        gateway = self._gateway
        raw = await http_listener.body(request, self._limits)
        now = gateway.clock()
        ask = parsed_request.read(
            kind, parsed_request.headers_of(request.headers.items()), raw, most_choices=self._limits.choices
        )
        async with gateway.answer(now, ask) as serving:
            headers = _headers(ask, serving)
            if serving.reply.streamed:
                return await self._stream(request, serving, headers)
            if serving.reply.status != 200:
                refusal = error_table.rejected(serving.reply.first)
                return web.Response(status=refusal.row.status, body=refusal.body(), headers=headers)
            return web.Response(body=serving.reply.first, headers=headers)

    async def _stream(self, request: web.BaseRequest, serving: Serving, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=200, headers={**headers, "Cache-Control": "no-cache"})
        await response.prepare(request)
        block = serving.reply.first
        while block:
            await response.write(block)
            try:
                block = await serving.next_block()
            except error_table.GatewayError as error:
                await response.write(event_stream.error_event(error.body()))
                break
        await response.write_eof()
        return response

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        return http_listener.reply({"object": "list", "data": list(map(_model, self._gateway.fleet.models))})

    async def _one_model(self, request: web.BaseRequest, model: str) -> web.StreamResponse:
        known = self._gateway.fleet.models
        if model not in known:
            raise parsed_request.unknown_model(model, known)
        return http_listener.reply(_model(model))

    # Workflows.

    async def _create(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await http_listener.json_object(request, self._limits)
        tenant, key = _who(request)
        flow = await self._gateway.flows.create(body, tenant=tenant, key=key)
        return http_listener.reply(flow, 201)

    async def _get(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        return http_listener.reply(await self._gateway.flows.get(workflow, tenant=_who(request)[0]))

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        for name in request.query:
            if name not in ("state", "limit") or len(request.query.getall(name)) > 1:
                raise error_table.BadRequest("a list takes state and limit, each once", param=name[:64])
        limit = parsed_request.digits(request.query.get("limit", str(workflow_service.LISTED)))
        tenant, _ = _who(request)
        rows, more = await self._gateway.flows.listed(request.query.get("state"), limit or 0, tenant=tenant)
        return http_listener.reply({"object": "list", "data": rows, "has_more": more})

    async def _cancel(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        return http_listener.reply(await self._gateway.flows.cancel(workflow, tenant=_who(request)[0]))

    async def _complete(self, request: web.BaseRequest, workflow: str) -> web.StreamResponse:
        await http_listener.json_object(request, self._limits)
        tenant, key = _who(request)
        return http_listener.reply(await self._gateway.flows.complete(workflow, tenant=tenant, key=key))

    async def _stage(self, request: web.BaseRequest, workflow: str, stage: str) -> web.StreamResponse:
        await http_listener.json_object(request, self._limits)
        tenant, key = _who(request)
        return http_listener.reply(await self._gateway.flows.complete_stage(workflow, stage, tenant=tenant, key=key))

    # Health.

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        status, reasons = self._gateway.problems()
        code = 200 if status in ("ready", "degraded") else 503
        return http_listener.reply({"status": status, "reasons": reasons}, code)

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        self._gateway.meters.observe(self._gateway.core)
        text, content_type = self._gateway.meters.exposition(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        text = status_page.render(snapshot.snapshot(self._gateway))
        return web.Response(text=text, content_type="text/html", headers=status_page.HEADERS)


async def _health(request: web.BaseRequest) -> web.StreamResponse:
    return http_listener.reply({"status": "ok"})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}


def _headers(ask: parsed_request.Ask, serving: Serving) -> dict[str, str]:
    headers: dict[str, Any] = {
        "Content-Type": serving.reply.content_type,
        "x-request-id": ask.request_id or serving.job.call.id,
        "x-tidegate-engine": serving.engine or "",
        "x-tidegate-queue-ms": str(round(serving.queue_s * 1000)),
    }
    if serving.slack_s is not None:
        headers["x-tidegate-slack-ms"] = str(round(serving.slack_s * 1000))
    return headers


def _who(request: web.BaseRequest) -> tuple[str | None, str | None]:
    """The tenant and the Idempotency-Key that a request for workflows names."""
    headers = parsed_request.headers_of(request.headers.items())
    key = headers.get("idempotency-key")
    return parsed_request.tenant(headers), None if key is None else parsed_request.text_of(key, "Idempotency-Key")
