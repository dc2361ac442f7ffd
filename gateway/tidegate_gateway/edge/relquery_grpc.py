"""RelQueries over gRPC; each method has the meaning of its HTTP route."""

import contextlib

import orjson

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import grpc_answers, grpc_requests, rows_url
from tidegate_gateway.openai import error_table
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import relquery_submission, relquery_view, row_tables
from tidegate_gateway.store import relquery_store
from tidegate_gateway.workflows import workflow_service, workflow_view
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

FORMATS: dict[int, row_tables.Format] = {
    inference_pb2.RowFile.Format.CSV: "csv",
    inference_pb2.RowFile.Format.JSON_LINES: "jsonl",
}


class RelQueries(inference_pb2_grpc.RelQueriesServicer):
    """RelQueries."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._relqueries = gateway.relqueries
        self._bounds = gateway.settings.relqueries
        self._write_s = gateway.settings.limits.write_s

    async def Submit(self, request: inference_pb2.SubmitRelQueryRequest, context: grpc_answers.Context) -> None:
        try:
            metadata = grpc_answers.metadata(context)
            fields = grpc_requests.fields(request, metadata)
            by = grpc_requests.requester(metadata, request.idempotency_key, request.tenant)
            spec = relquery_submission.spec(grpc_requests.relquery(request), fields)
            self._relqueries.check(spec)
            rows = row_tables.RowCollector(spec.template, self._bounds, self._relqueries.steps.of(fields.tenant))
            async with contextlib.AsyncExitStack() as fetching:
                if request.WhichOneof("rows") == "rows_url":
                    await fetching.enter_async_context(self._relqueries.fetching(spec))
                await self._read(request, rows)
                record = await self._relqueries.submit(spec, rows, by)
            del rows
            await self._follow(context, record.client_id, 0, by)
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)

    async def Rows(self, request: inference_pb2.RowsRequest, context: grpc_answers.Context) -> None:
        try:
            by = grpc_requests.requester(grpc_answers.metadata(context))
            await self._follow(context, request.id, request.after, by)
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)

    async def Get(
        self, request: inference_pb2.GetRelQueryRequest, context: grpc_answers.Context
    ) -> inference_pb2.RelQuery:
        return await grpc_answers.answer(context, lambda by: self._relqueries.get(request.id, by), _relquery)

    async def Cancel(
        self, request: inference_pb2.GetRelQueryRequest, context: grpc_answers.Context
    ) -> inference_pb2.RelQuery:
        return await grpc_answers.answer(context, lambda by: self._relqueries.cancel(request.id, by), _relquery)

    async def _read(self, request: inference_pb2.SubmitRelQueryRequest, rows: row_tables.RowCollector) -> None:
        """Gives the rows of a message to the collector. Raises `BadRequest`."""
        match request.WhichOneof("rows"):
            case "list":
                await row_tables.read_rows((row.values for row in request.list.rows), rows)
            case "file":
                kind = FORMATS.get(request.file.format)
                if kind is None:
                    raise BadRequest("file.format must be CSV or JSON_LINES", param="file.format")
                await row_tables.read(row_tables.slices(request.file.content), kind, rows, self._bounds)
            case "rows_url":
                await rows_url.fetch(rows_url.allowed(request.rows_url, self._bounds), rows, self._bounds)
            case _:
                raise BadRequest("give a list of rows, a file, or rows_url", param="rows")

    async def _follow(
        self, context: grpc_answers.Context, relquery: str, after: int, by: workflow_service.Requester
    ) -> None:
        """Writes the stream of a relQuery."""
        begun = False
        async with contextlib.aclosing(self._relqueries.follow(relquery, after, by)) as pages:
            async for page in pages:
                if not begun:
                    await grpc_answers.write(context, self._write_s, _event(page.record))
                    begun = True
                for number, result in enumerate(page.results, page.after + 1):
                    await grpc_answers.write(context, self._write_s, _row(number, result))
                if page.results or page.final:
                    await grpc_answers.write(context, self._write_s, _event(page.record))


def _event(record: relquery_store.RelQueryRecord) -> inference_pb2.RelQueryEvent:
    return inference_pb2.RelQueryEvent(relquery=_relquery(record))


def _relquery(record: relquery_store.RelQueryRecord) -> inference_pb2.RelQuery:
    return inference_pb2.RelQuery(
        id=record.client_id,
        status=record.status,
        model=record.model,
        tenant=record.tenant,
        total=record.total,
        completed=record.completed,
        failed=record.failed,
        left_ms=relquery_view.left_ms(record),
        created_at=workflow_view.instant(record.created_ms),
        expires_at=workflow_view.instant(record.expires_ms),
        ended_at="" if record.ended_ms is None else workflow_view.instant(record.ended_ms),
    )


def _row(number: int, result: bytes) -> inference_pb2.RelQueryEvent:
    found = orjson.loads(result)
    usage, error = found.get("usage") or {}, found.get("error")
    row = inference_pb2.RowResult(
        number=number,
        row=found["row"],
        text=found["text"] or "",
        finish_reason=found.get("finish_reason") or "",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        json=result,
    )
    if error is not None:
        row.error.CopyFrom(
            inference_pb2.RowError(code=error["code"], message=error["message"], param=error["param"] or "")
        )
    return inference_pb2.RelQueryEvent(row=row)


def _count(usage: object, name: str) -> int:
    """A count of a usage object; 0 if it cannot be used."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and 0 <= value < 2**32 else 0
