"""RelQueries: one question about every row of a table; the results come as rows finish (docs/relqueries.md).

Results are read in pages, so the SDK's retries cover lost connections, and a gateway that restarts is waited for. A program
that runs again with the same `id` and the same question gets the results that the gateway has, and no row is asked twice.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import openai

from tidegate_client import call_headers, relquery_errors
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

    Raises `RelQueryIncomplete` after the last result if the relQuery ended before each row had one.
    """
    name, body, options = _request(model, template, rows, id, deadline_s, fields)
    copy = call_headers.with_headers(client, {})
    address, last, page = str(client.base_url), 0, None
    try:
        copy.post("/relqueries", cast_to=RelQueryRecord, body=body, options=options)
    except openai.APIError as error:
        raise relquery_errors.explained(error, name, address) from error
    patience = relquery_errors.Patience(name, address)
    while page is None or not _ended(page):
        try:
            page = copy.get(_page(name, last), cast_to=RowPage)
        except openai.APIError as error:
            time.sleep(patience.pause_s(error))
            continue
        patience.answered()
        yield from page.data
        last = page.last
        if not page.data and not _ended(page):
            time.sleep(POLL_S)
    _check_complete(name, page, total=len(body["rows"]))


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
    address, last, page = str(client.base_url), 0, None
    try:
        await copy.post("/relqueries", cast_to=RelQueryRecord, body=body, options=options)
    except openai.APIError as error:
        raise relquery_errors.explained(error, name, address) from error
    patience = relquery_errors.Patience(name, address)
    while page is None or not _ended(page):
        try:
            page = await copy.get(_page(name, last), cast_to=RowPage)
        except openai.APIError as error:
            await asyncio.sleep(patience.pause_s(error))
            continue
        patience.answered()
        for result in page.data:
            yield result
        last = page.last
        if not page.data and not _ended(page):
            await asyncio.sleep(POLL_S)
    _check_complete(name, page, total=len(body["rows"]))


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


def _check_complete(name: str, page: RowPage, *, total: int) -> None:
    """Raises `RelQueryIncomplete` unless each row has a result."""
    if page.last < total:
        status, missing = page.relquery.status, total - page.last
        raise relquery_errors.RelQueryIncomplete(name, status, missing=missing, total=total)
