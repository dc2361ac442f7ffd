"""RelQueries: one question about every row of a table; the results come as rows finish (docs/relqueries.md).

Results are read in pages, so the SDK's retries cover lost connections. A program that runs again with the same `id` and
the same question gets the results that the gateway has, and no row is asked twice.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import openai

from tidegate_client import call_headers
from tidegate_client.answers import RelQueryRecord, RowPage, RowResult

POLL_S = 0.5
"""Between two looks while no row has finished."""


def relquery(
    client: openai.OpenAI,
    *,
    model: str,
    template: str | Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    id: str | None = None,
    deadline_s: float | None = None,
    **fields: Any,
) -> Iterator[RowResult]:
    """Yields one result for each row, as rows finish; `fields` are fields of every call, such as `max_tokens`.

    Rows that did not run, because the relQuery ended before them, have no result.
    """
    name, body, options = _request(model, template, rows, id, deadline_s, fields)
    copy = call_headers.with_headers(client, {})
    copy.post("/relqueries", cast_to=RelQueryRecord, body=body, options=options)
    last, ended = 0, False
    while not ended:
        page = copy.get(_page(name, last), cast_to=RowPage)
        yield from page.data
        last, ended = page.last, _ended(page)
        if not page.data and not ended:
            time.sleep(POLL_S)


async def async_relquery(
    client: openai.AsyncOpenAI,
    *,
    model: str,
    template: str | Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    id: str | None = None,
    deadline_s: float | None = None,
    **fields: Any,
) -> AsyncIterator[RowResult]:
    """As `relquery`, for an `openai.AsyncOpenAI`."""
    name, body, options = _request(model, template, rows, id, deadline_s, fields)
    copy = call_headers.with_headers(client, {})
    await copy.post("/relqueries", cast_to=RelQueryRecord, body=body, options=options)
    last, ended = 0, False
    while not ended:
        page = await copy.get(_page(name, last), cast_to=RowPage)
        for result in page.data:
            yield result
        last, ended = page.last, _ended(page)
        if not page.data and not ended:
            await asyncio.sleep(POLL_S)


def _request(
    model: str,
    template: str | Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    given: str | None,
    deadline_s: float | None,
    fields: Mapping[str, Any],
) -> tuple[str, dict[str, Any], Any]:
    """The id, the body and the options of the request. The id is also its Idempotency-Key."""
    name = given or f"rq-{uuid.uuid4().hex}"
    body = {**fields, "id": name, "model": model, "template": template, "rows": list(rows), "stream": False}
    if deadline_s is not None:
        body["deadline_ms"] = call_headers.milliseconds("deadline_s", deadline_s)
    return name, body, {"idempotency_key": name}


def _page(name: str, last: int) -> str:
    return f"/relqueries/{name}/rows?after={last}&stream=false"


def _ended(page: RowPage) -> bool:
    return not page.has_more and page.relquery.status != "in_progress"
