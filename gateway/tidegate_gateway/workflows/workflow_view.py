"""How does the API show a workflow? A record of the store as one typed value, which each edge writes in its own form."""

import datetime
from typing import Any

from tidegate_gateway.store import store_contract


def as_json(record: store_contract.Record) -> dict[str, Any]:
    """A workflow as a JSON object of the HTTP API."""
    return {
        "id": record.client_id,
        "object": "workflow",
        "state": record.state,
        "outcome": record.outcome,
        "template": record.template or None,
        "tenant": record.tenant or None,
        "deadline": instant(record.deadline_ms),
        "ended_at": None if record.ended_ms is None else instant(record.ended_ms),
        "deadline_ms": record.deadline_ms - record.created_ms,
        "left_ms": left_ms(record),
        "stages": [
            {
                "name": stage.name,
                "state": stage_state(record, stage),
                "after": list(stage.after),
                "parallel": stage.parallel or None,
                "calls_running": stage.running,
                "calls_done": stage.done,
                "share_ms": stage.share_ms,
                "time_ms": time_ms(record, stage),
                "slack_ms": slack_ms(record, stage),
            }
            for stage in record.stages
        ],
    }


def left_ms(record: store_contract.Record) -> int:
    """Milliseconds until the deadline, from now or from the end of the workflow; negative after the deadline."""
    return record.deadline_ms - (record.now_ms if record.ended_ms is None else record.ended_ms)


def time_ms(record: store_contract.Record, stage: store_contract.Stage) -> int | None:
    """Milliseconds from the first call of a stage to the end of its last call, or to now while one runs."""
    if stage.started_ms is None:
        return None
    end_ms = record.now_ms if record.ended_ms is None else record.ended_ms
    return (end_ms if stage.running or stage.ended_ms is None else stage.ended_ms) - stage.started_ms


def slack_ms(record: store_contract.Record, stage: store_contract.Stage) -> int | None:
    """The share of a stage less its time; negative if it took longer. None without a share."""
    took_ms = time_ms(record, stage)
    return None if stage.share_ms is None or took_ms is None else stage.share_ms - took_ms


def instant(at_ms: int) -> str:
    """An instant of the store as text (ISO 8601, UTC)."""
    return (
        datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def stage_state(record: store_contract.Record, stage: store_contract.Stage) -> str:
    """waiting, running or done; a stage that began and is not done takes the state of a workflow that ended before it."""
    if stage.over:
        return "done"
    if not stage.started:
        return "waiting"
    return record.state if record.state in ("cancelled", "expired") else "running"
