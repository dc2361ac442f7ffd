"""The OpenAI-compatible API over HTTP, workflows, health, and the status page.

Handlers parse, ask `lifecycle.calls` for the answer, and write bytes; they decide nothing. A client that hangs up cancels
its handler, and with it the call. `http_listener` cuts a client that does not read. Only the paths in these tables exist:
engines have endpoints that need no key, and none of them can be reached through the gateway.
"""

import asyncio
import functools
from typing import Any

import orjson

from tidegate_gateway import running_gateway
from tidegate_gateway.callers import caller
from tidegate_gateway.edge import (
    call_requests,
    http_connection,
    http_listener,
    http_messages,
    http_requester,
    page_state,
    relquery_http,
    status_page,
    web_origins,
)
from tidegate_gateway.lifecycle import relay
from tidegate_gateway.openai import (
    endpoint,
    endpoint_registry,
    error_table,
    http_headers,
    parsed_request,
)
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_declaration, workflow_service, workflow_view

TEXTS_PER_S = 20.0
"""Texts of the metrics. Each takes some milliseconds."""


class HttpApi:
    """The handlers of one gateway."""

    def __init__(self, gateway: running_gateway.Gateway, *, takes_calls: bool = True) -> None:
        """Without `takes_calls` its page says that its port takes none."""
        self._gateway = gateway
        self._workflows = gateway.workflows
        self._page = page_state.PageState(gateway, takes_calls=takes_calls)
        self._requests = call_requests.CallRequests(gateway.settings.limits.choices)
        self._loop = asyncio.get_running_loop()
        self._texts: dict[str, asyncio.Future[http_messages.Response]] = {}
        """Texts of the metrics that are to be made, by content type."""
        self._next_text_at_s = 0.0

    def routes(self) -> http_listener.Routes:
        """The client port: only these paths exist."""
        route = http_listener.Route
        listen = self._gateway.settings.listen
        shared = not self._gateway.authentication.required  # the metrics show all tenants
        views = [
            *([route(method="GET", path="/metrics", handler=self.metrics)] if listen.client_metrics and shared else []),
            *(self.page_routes() if listen.status_page else []),
        ]
        calls = [
            route(method="POST", path=kind.path, handler=self._handler(kind), streams=True, is_call=True)
            for kind in endpoint_registry.ENDPOINTS
        ]
        return http_listener.Routes([*calls, *self.requests_but_calls(), *self._health_routes(), *views])

    def requests_but_calls(self) -> list[http_listener.Route]:
        """What clients ask for beside calls: models, workflows and relQueries."""
        route = http_listener.Route
        return [
            route(method="GET", path="/v1/models", handler=self._models),
            route(method="GET", path="/v1/models/{model...}", handler=self._one_model),
            route(method="POST", path="/v1/workflows", handler=self._create),
            route(method="GET", path="/v1/workflows", handler=self._list),
            route(method="GET", path="/v1/workflows/{workflow}", handler=self._get),
            route(method="DELETE", path="/v1/workflows/{workflow}", handler=self._cancel),
            route(method="GET", path="/v1/workflows/{workflow}/events", handler=self._watch, streams=True),
            route(method="POST", path="/v1/workflows/{workflow}/complete", handler=self._complete),
            route(method="POST", path="/v1/workflows/{workflow}/stages/{stage}/complete", handler=self._stage),
            *relquery_http.RelQueryApi(self._gateway).routes(),
        ]

    def guard(self, request: http_messages.Request, route: http_listener.Route) -> None:
        """Binds a request to the tenant of its API key or token, if the gateway knows callers. Raises `GatewayError`."""
        authentication = self._gateway.authentication
        if authentication.required and not route.without_key:
            request.headers = authentication.caller_of(request.headers).bound(request.headers)

    def port_guard(self, request: http_messages.Request, route: http_listener.Route) -> None:
        """As `guard`, for a port that browsers may reach: without keys nothing else keeps away the web pages that a person
        of this machine reads. Raises `GatewayError`."""
        if not self._gateway.authentication.required and not route.without_key and web_origins.is_foreign(request):
            raise caller.forbidden(
                "a gateway without API keys takes no requests of web pages of other sites; call it from a program, or set"
                " auth.keysFile or auth.jwt",
                param="origin",
            )
        self.guard(request, route)

    def probes(self) -> http_listener.Routes:
        """The paths that Kubernetes and Prometheus read, for a port of their own that clients cannot fill."""
        return http_listener.Routes(
            [
                http_listener.Route(method="GET", path="/metrics", handler=self.metrics),
                *self._health_routes(),
            ]
        )

    def page_routes(self) -> list[http_listener.Route]:
        """The status page, whose files need no key, and the state that it shows."""
        return [
            *(
                http_listener.Route(method="GET", path=path, handler=status_page.handler(path), without_key=True)
                for path in status_page.FILES
            ),
            http_listener.Route(method="GET", path="/v1/state", handler=self._state),
        ]

    def _health_routes(self) -> list[http_listener.Route]:
        return [
            http_listener.Route(method="GET", path="/health", handler=_health, without_key=True),
            http_listener.Route(method="GET", path="/ready", handler=self._ready, without_key=True),
        ]

    # Calls.

    def _handler(self, kind: endpoint.Endpoint) -> http_listener.Handler:
        return functools.partial(self._generate, kind)

    async def _generate(
        self, kind: endpoint.Endpoint, request: http_messages.Request, connection: http_connection.Connection
    ) -> http_messages.Response | None:
        gateway = self._gateway
        now = gateway.clock()
        parsed = await self._requests.read(kind, request)
        async with gateway.calls.answer(now, parsed) as answer:
            headers = call_requests.answer_headers(parsed.fields, answer.record, answer.call_id)
            reply = answer.reply
            if reply.streamed and kind.stream is not None:
                await self._stream(connection, answer, headers, kind.stream)
                return None
            if reply.status != 200:
                rejected = error_table.rejected(reply.first)
                return http_messages.Response(status=rejected.row.status, body=rejected.body(), headers=headers)
            return http_messages.Response(body=reply.first, headers=headers)

    async def _stream(
        self,
        connection: http_connection.Connection,
        answer: relay.Relay,
        headers: dict[str, str],
        dialect: endpoint.StreamDialect,
    ) -> None:
        reply = answer.reply
        await connection.begin(200, {"Content-Type": reply.content_type, **headers, "Cache-Control": "no-cache"})
        block = reply.take_first()
        while not reply.meter.done:
            await connection.write(block)
            try:
                block = await answer.next_block()
            except error_table.GatewayError as error:
                block = dialect.error_events(error.body())
                break
        await connection.write(block, last=True)

    async def _models(self, request: http_messages.Request) -> http_messages.Response:
        models = list(map(_model, self._gateway.directory.models))
        return http_messages.reply({"object": "list", "data": models})

    async def _one_model(self, request: http_messages.Request, model: str) -> http_messages.Response:
        known = self._gateway.directory.models
        if model not in known:
            raise parsed_request.unknown_model(model, known)
        return http_messages.reply(_model(model))

    # Workflows.

    async def _create(self, request: http_messages.Request) -> http_messages.Response:
        body = request.json_object()
        by = http_requester.of(request)
        record = await self._workflows.create(workflow_declaration.from_json(body), by)
        return http_messages.reply(workflow_view.as_json(record), 201)

    async def _get(self, request: http_messages.Request, workflow: str) -> http_messages.Response:
        record = await self._workflows.get(workflow, http_requester.of(request))
        return http_messages.reply(workflow_view.as_json(record))

    async def _list(self, request: http_messages.Request) -> http_messages.Response:
        query: dict[str, str] = {}
        for name, value in request.query:
            if name not in ("state", "limit") or name in query:
                raise error_table.BadRequest("a list takes state and limit, each once", param=name[:64])
            query[name] = value
        limit = http_headers.whole_number(query.get("limit", str(workflow_service.LISTED)))
        by = http_requester.of(request)
        shown, more = await self._workflows.listed(query.get("state"), limit or 0, by, workflow_view.as_json)
        return http_messages.reply({"object": "list", "data": shown, "has_more": more})

    async def _cancel(self, request: http_messages.Request, workflow: str) -> http_messages.Response:
        record = await self._workflows.cancel(workflow, http_requester.of(request))
        return http_messages.reply(workflow_view.as_json(record))

    async def _complete(self, request: http_messages.Request, workflow: str) -> http_messages.Response:
        request.json_object()
        record = await self._workflows.complete(workflow, http_requester.of(request))
        return http_messages.reply(workflow_view.as_json(record))

    async def _stage(self, request: http_messages.Request, workflow: str, stage: str) -> http_messages.Response:
        request.json_object()
        record = await self._workflows.complete_stage(workflow, stage, http_requester.of(request))
        return http_messages.reply(workflow_view.as_json(record))

    async def _watch(
        self, request: http_messages.Request, connection: http_connection.Connection, workflow: str
    ) -> None:
        """A stream of the workflow: now, after each change, and as it ended. HEAD gets the head alone."""
        records = self._workflows.watch(workflow, http_requester.of(request))
        first = await anext(records)  # an error now has a status of its own
        await connection.begin(200, {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        if request.method == "HEAD":
            await records.aclose()
            return
        last = b""
        try:
            await connection.write(_event(first))
            async for record in records:
                await connection.write(_event(record))
        except error_table.GatewayError as error:
            last = b"data: %s\n\n" % error.body()
        await connection.write(last + b"data: [DONE]\n\n", last=True)

    # Health.

    async def _ready(self, request: http_messages.Request) -> http_messages.Response:
        status, reasons = self._gateway.problems()
        code = 200 if status in ("ready", "degraded") else 503
        return http_messages.reply({"status": status, "reasons": reasons}, code)

    async def metrics(self, request: http_messages.Request) -> http_messages.Response:
        """Requests that come before the text is made share it, and it is made `TEXTS_PER_S` times a second at most."""
        accept = request.header("accept")
        kind = self._gateway.metrics.content_type(accept)
        text = self._texts.get(kind)
        if text is None:
            text = self._texts[kind] = asyncio.ensure_future(self._metrics_text(accept, kind))
        return await asyncio.shield(text)

    async def _metrics_text(self, accept: str, kind: str) -> http_messages.Response:
        now = self._loop.time()
        self._next_text_at_s = at_s = max(now, self._next_text_at_s + 1 / TEXTS_PER_S)
        await asyncio.sleep(at_s - now)
        del self._texts[kind]
        gateway = self._gateway
        store_up = gateway.link.up or gateway.link.store is None
        gateway.metrics.observe(gateway.clock(), gateway.core, store_up=store_up)
        gateway.metrics.tasks.set(len(asyncio.all_tasks()))
        text, content_type = gateway.metrics.exposition(accept)
        return http_messages.Response(body=text, content_type=content_type)

    async def _state(self, request: http_messages.Request) -> http_messages.Response:
        tenant = http_requester.of(request).tenant
        state = await (self._page.of_pool() if tenant is None else self._page.of_tenant(tenant))
        return http_messages.Response(body=orjson.dumps(state), headers={"Cache-Control": "no-store"})


async def _health(request: http_messages.Request) -> http_messages.Response:
    return http_messages.reply({"status": "ok"})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}


def _event(record: store_contract.Record | None) -> bytes:
    """A workflow as an event; a comment without one, so that no proxy ends a stream for its silence."""
    return (
        b": the workflow runs\n\n" if record is None else b"data: %s\n\n" % orjson.dumps(workflow_view.as_json(record))
    )
