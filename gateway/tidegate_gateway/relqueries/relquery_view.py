"""How does the API show a relQuery? The names of OpenAI's batches where these have the same thing."""

from typing import Any

from tidegate_gateway.store import relquery_store
from tidegate_gateway.workflows import workflow_view


def as_json(record: relquery_store.RelQueryRecord) -> dict[str, Any]:
    """A relQuery as a JSON object of the HTTP API."""
    return {
        "id": record.client_id,
        "object": "relquery",
        "status": record.status,
        "model": record.model,
        "tenant": record.tenant or None,
        "created_at": workflow_view.instant(record.created_ms),
        "expires_at": workflow_view.instant(record.expires_ms),
        "ended_at": None if record.ended_ms is None else workflow_view.instant(record.ended_ms),
        "left_ms": left_ms(record),
        "request_counts": counts(record),
    }


def progress(record: relquery_store.RelQueryRecord, last: int) -> dict[str, Any]:
    """The event about the progress of a relQuery, of which the client has `last` results."""
    return {"object": "relquery.progress", "id": record.client_id, "request_counts": counts(record), "last": last}


def counts(record: relquery_store.RelQueryRecord) -> dict[str, int]:
    return {"total": record.total, "completed": record.completed, "failed": record.failed}


def left_ms(record: relquery_store.RelQueryRecord) -> int:
    """Milliseconds until the deadline, from now or from the end of the relQuery."""
    return record.expires_ms - (record.now_ms if record.ended_ms is None else record.ended_ms)
