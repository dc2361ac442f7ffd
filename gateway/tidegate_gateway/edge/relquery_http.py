"""RelQueries over HTTP: submitted as JSON or as a form with a file, followed as server-sent events or as JSON lines.

A stream begins with the relQuery. Then come rows as they finish, each with its number in the stream as the event's id,
and progress after each group of rows. The relQuery as it ended is the last object. A client that lost its connection
goes on with `Last-Event-ID` or `after`.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import orjson

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import (
    http_connection,
    http_listener,
    http_messages,
    http_requester,
    multipart_form,
    rows_url,
)
from tidegate_gateway.openai import bounded_json, error_table, http_headers, parsed_request, request_fields
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import relquery_service, relquery_submission, relquery_view, row_tables
from tidegate_gateway.store import relquery_store
from tidegate_gateway.workflows import workflow_service

TEXTS = frozenset(
    {
        *("model", "endpoint", "id", "rows_url"),
        *("user", "safety_identifier", "prompt_cache_key", "cache_salt", "suffix", "reasoning_effort", "service_tier"),
        *("chat_template", "guided_regex", "guided_grammar"),
    }
)
"""Fields of a form that are text; the others are JSON, and text if they are not."""
TEXTS_OR_LISTS = frozenset({"template", "stop"})
"""Fields that are text unless they begin as a list."""
MOST_FIELD_BYTES = 512 * 1024
FIELDS_STEP_BYTES = 64 * 1024
"""Fields of a form that are read in one step; a larger one has a step of its own."""
ONE_SOURCE = "give rows or rows_url, not both"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


class RelQueryApi:
    """The handlers of relQueries."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._gateway = gateway
        self._relqueries = gateway.relqueries
        self._bounds = gateway.settings.relqueries

    def routes(self) -> list[http_listener.Route]:
        route, most = http_listener.Route, max(self._bounds.body_bytes, self._gateway.settings.limits.body_bytes)
        one = "/v1/relqueries/{relquery}"
        return [
            route(method="POST", path="/v1/relqueries", handler=self._submit, streams=True, body_bytes=most),
            route(method="GET", path=one, handler=self._get),
            route(method="DELETE", path=one, handler=self._cancel),
            route(method="GET", path=one + "/rows", handler=self._rows, streams=True),
        ]

    async def _submit(
        self, request: http_messages.Request, connection: http_connection.Connection
    ) -> http_messages.Response | None:
        after = _after(request, _query(request, "after"))
        headers = http_headers.headers_of(request.headers)
        by = http_requester.read(headers)
        if after and by.key is None:
            raise relquery_service.no_results_yet()
        fields = http_headers.read(headers)
        raw, request.body = request.body, b""
        async with contextlib.AsyncExitStack() as fetching:
            if request.header("content-type").lower().startswith("multipart/form-data"):
                spec, rows = await self._form(raw, request.header("content-type"), fields, fetching)
            else:
                spec, rows = await self._json(raw, fields, fetching)
            del raw
            record = await self._relqueries.submit(spec, rows, by, after=after)
        if not spec.stream:
            return http_messages.Response(
                body=orjson.dumps(relquery_view.as_json(record)), status=201, headers=_headers(record)
            )
        del rows
        connection.release_body()
        await self._follow(request, connection, record, after, by, is_new=True)
        return None

    async def _json(
        self, raw: bytes, fields: request_fields.RequestFields, fetching: contextlib.AsyncExitStack
    ) -> tuple[relquery_submission.RelQuerySpec, row_tables.RowCollector]:
        if len(raw) > self._gateway.settings.limits.body_bytes:
            most = self._gateway.settings.limits.body_bytes
            raise BadRequest(
                f"a JSON body is at most {most} bytes; send more rows as a form with a file", code="body_too_large"
            )
        document, items = await row_tables.split_document(
            raw, self._bounds.rows, self._relqueries.steps.of(fields.tenant)
        )
        spec, rows = self._begin(document, fields)
        url = document.get("rows_url")
        if (url is None) == (not items):
            raise BadRequest(ONE_SOURCE if items else "give rows with at least one row, or rows_url", param="rows")
        if url is not None:
            await self._fetch(url, spec, rows, fetching)
        else:
            await row_tables.read_json_rows(raw, items, rows)
        return spec, rows

    async def _form(
        self,
        raw: bytes,
        content_type: str,
        fields: request_fields.RequestFields,
        fetching: contextlib.AsyncExitStack,
    ) -> tuple[relquery_submission.RelQuerySpec, row_tables.RowCollector]:
        steps = self._relqueries.steps.of(fields.tenant)
        parts = await multipart_form.parts(raw, content_type, steps)
        file = parts.pop("rows", None)
        _check_fields(raw, parts)
        document, step_bytes = {}, 0
        for name, part in parts.items():
            step_bytes += part.bytes
            if step_bytes > FIELDS_STEP_BYTES:
                await steps.next()
                step_bytes = part.bytes
            document[name] = _field(name, raw, part)
        spec, rows = self._begin(document, fields)
        url = document.get("rows_url")
        if (url is None) == (file is None):
            raise BadRequest(ONE_SOURCE if file is not None else "give rows as a file, or rows_url", param="rows")
        if file is None:
            await self._fetch(url, spec, rows, fetching)
        else:
            kind = rows_url.table_format(file.content_type, file.filename or "", "rows")
            await row_tables.read(row_tables.slices(raw, file.first, file.end), kind, rows, self._bounds)
        return spec, rows

    async def _fetch(
        self,
        url: object,
        spec: relquery_submission.RelQuerySpec,
        rows: row_tables.RowCollector,
        fetching: contextlib.AsyncExitStack,
    ) -> None:
        """Fetches a table, which counts for the tenant until `fetching` ends. Raises `GatewayError`."""
        await fetching.enter_async_context(self._relqueries.fetching(spec))
        await rows_url.fetch(rows_url.allowed(url, self._bounds), rows, self._bounds)

    def _begin(
        self, document: dict[str, Any], fields: request_fields.RequestFields
    ) -> tuple[relquery_submission.RelQuerySpec, row_tables.RowCollector]:
        """Checks everything but the rows, so that an error of the request does not wait for them."""
        spec = relquery_submission.spec(document, fields)
        self._relqueries.check(spec)
        return spec, row_tables.RowCollector(spec.template, self._bounds, self._relqueries.steps.of(fields.tenant))

    async def _get(self, request: http_messages.Request, relquery: str) -> http_messages.Response:
        record = await self._relqueries.get(relquery, http_requester.of(request))
        return http_messages.reply(relquery_view.as_json(record))

    async def _cancel(self, request: http_messages.Request, relquery: str) -> http_messages.Response:
        record = await self._relqueries.cancel(relquery, http_requester.of(request))
        return http_messages.reply(relquery_view.as_json(record))

    async def _rows(
        self, request: http_messages.Request, connection: http_connection.Connection, relquery: str
    ) -> http_messages.Response | None:
        by, query = http_requester.of(request), _query(request, "after", "stream", "limit")
        after = _after(request, query)
        if query.get("stream", "true") == "true":
            if "limit" in query:
                raise BadRequest("limit goes with stream=false; a stream has all results", param="limit")
            record = await self._relqueries.get(relquery, by)
            await self._follow(request, connection, record, after, by)
            return None
        if query["stream"] != "false":
            raise BadRequest("stream must be true or false", param="stream")
        limit = http_headers.whole_number(query.get("limit", str(relquery_service.PAGE_ROWS)))
        if limit is None or not 1 <= limit <= relquery_service.PAGE_ROWS:
            raise BadRequest(f"limit must be from 1 to {relquery_service.PAGE_ROWS}", param="limit")
        page = await self._relqueries.page(relquery, after, by, most=limit)
        listed = b'{"object":"list","data":[%s],"last":%d,"has_more":%s,"relquery":%s}' % (
            b",".join(page.results),
            page.last,
            b"false" if page.final else b"true",
            orjson.dumps(relquery_view.as_json(page.record)),
        )
        return http_messages.Response(body=listed)

    async def _follow(
        self,
        request: http_messages.Request,
        connection: http_connection.Connection,
        record: relquery_store.RelQueryRecord,
        after: int,
        by: workflow_service.Requester,
        *,
        is_new: bool = False,
    ) -> None:
        """Writes the stream of a relQuery. That of a new one begins at once: its client has to learn the id.
        HEAD gets the head alone."""
        lines = LINES in request.header("accept")
        kind = LINES if lines else EVENTS + "; charset=utf-8"
        async with contextlib.aclosing(self._relqueries.follow(record.client_id, after, by)) as pages:
            # Where the relQuery is not new, an error now has a status of its own.
            page: relquery_service.Page | None = None if is_new else await anext(pages)
            await connection.begin(200, {"Content-Type": kind, "Cache-Control": "no-cache", **_headers(record)})
            if request.method == "HEAD":
                return
            await connection.write(_block(lines, [orjson.dumps(relquery_view.as_json(record))]))
            written_at_s = self._gateway.clock()
            try:
                if is_new:
                    page = await anext(pages, None)
                while page is not None:
                    if page.results:
                        block = _block(lines, page.results, page.after)
                        block += _block(lines, [orjson.dumps(relquery_view.progress(page.record, page.last))])
                        await connection.write(block)
                        written_at_s = self._gateway.clock()
                    elif self._gateway.clock() > written_at_s + workflow_service.SILENT_S:
                        silent = orjson.dumps(relquery_view.progress(page.record, page.last))
                        await connection.write(_block(lines, [silent]) if lines else b": the relQuery runs\n\n")
                        written_at_s = self._gateway.clock()
                    record = page.record
                    page = await anext(pages, None)
                last = orjson.dumps(relquery_view.as_json(record))
            except error_table.GatewayError as error:
                last = error.body()
        await connection.write(_block(lines, [last]) + (b"" if lines else b"data: [DONE]\n\n"), last=True)


def _block(lines: bool, objects: Iterable[bytes], after: int | None = None) -> bytes:
    """Objects as JSON lines or as events; results have the number of results up to them as their id."""
    if lines:
        return b"".join(b"%s\n" % item for item in objects)
    if after is None:
        return b"".join(b"data: %s\n\n" % item for item in objects)
    return b"".join(b"id: %d\ndata: %s\n\n" % (number, item) for number, item in enumerate(objects, after + 1))


def _headers(record: relquery_store.RelQueryRecord) -> dict[str, str]:
    return {"x-tidegate-relquery": record.client_id}


def _after(request: http_messages.Request, query: dict[str, str]) -> int:
    """The number of results that the client has. Raises `BadRequest`."""
    given = query.get("after") or request.header("last-event-id") or "0"
    after = http_headers.whole_number(given)
    if after is None or after < 0:
        raise BadRequest("after (or Last-Event-ID) must be the number of results that the client has", param="after")
    return after


def _query(request: http_messages.Request, *names: str) -> dict[str, str]:
    """The query, which has these names at most. Raises `BadRequest`."""
    query = dict(request.query)
    unknown = sorted(set(query) - set(names))
    if unknown or len(query) < len(request.query):
        sentence = f"the query of this address takes {', '.join(names)}, at most once each"
        if request.method == "POST":
            sentence += "; the other fields are in the body"
        raise BadRequest(sentence, param=(unknown or ["after"])[0][:64])
    return query


def _check_fields(raw: bytes, fields: dict[str, multipart_form.Part]) -> None:
    """Checks the fields of a form together before any of them is parsed. Raises `BadRequest`."""
    for name, part in fields.items():
        if part.bytes > MOST_FIELD_BYTES:
            raise BadRequest(f"{name[:64]} is larger than {MOST_FIELD_BYTES} bytes", param=name[:64])
    if sum(part.bytes for part in fields.values()) > relquery_submission.MOST_SPEC_BYTES:
        raise relquery_submission.too_large()
    count = bounded_json.PartCount(parsed_request.MOST_PARTS)
    for name, part in fields.items():
        if name not in TEXTS:
            try:
                count.add(raw, part.first, part.end)
            except bounded_json.TooManyParts as error:
                raise BadRequest(f"the form without its rows is too large: {error}", param=name[:64]) from error


def _field(name: str, raw: bytes, part: multipart_form.Part) -> Any:
    """The value of a field of a form. Raises `BadRequest`."""
    content = raw[part.first : part.end]
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name[:64]} is not UTF-8", param=name[:64]) from error
    if name in TEXTS or (name in TEXTS_OR_LISTS and not text.lstrip().startswith("[")):
        return text
    try:
        return parsed_request.decoded(content)
    except BadRequest:
        return text
