"""How does the API show a workflow? A record of the store as one typed value, which each edge writes in its own form."""

import datetime
from typing import Any

from tidegate_gateway.store import store_contract


def as_json(record: store_contract.Record) -> dict[str, Any]:
    """A workflow as a JSON object of the HTTP API."""
    deadline = datetime.datetime.fromtimestamp(record.deadline_ms / 1000, datetime.UTC)
    return {
        "id": record.id,
        "object": "workflow",
        "state": record.state,
        "template": record.template or None,
        "tenant": record.tenant or None,
        "deadline": deadline.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "deadline_ms": record.deadline_ms - record.created_ms,
        "left_ms": record.deadline_ms - record.now_ms,
        "stages": [
            {
                "name": stage.name,
                "state": stage_state(record, stage),
                "after": list(stage.after),
                "parallel": stage.parallel or None,
                "calls_running": stage.running,
                "calls_done": stage.done,
            }
            for stage in record.stages
        ],
    }


def stage_state(record: store_contract.Record, stage: store_contract.Stage) -> str:
    """waiting, running or done; a stage that began and is not done takes the state of a workflow that ended before it."""
    if stage.over:
        return "done"
    if not stage.started:
        return "waiting"
    return record.state if record.state in ("cancelled", "expired") else "running"
