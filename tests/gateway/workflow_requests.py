"""Requests about workflows, for the tests of workflows."""

from typing import Any


def member(workflow: str, stage: str, **more: str) -> dict[str, str]:
    return {"x-tidegate-workflow": workflow, "x-tidegate-stage": stage, **more}


async def create(client: Any, *, key: str | None = None, **body: Any) -> tuple[int, Any]:
    headers = {} if key is None else {"Idempotency-Key": key}
    status, answer, _ = await client.send("POST", "/v1/workflows", json=body, headers=headers)
    return status, answer


async def state_of(client: Any, workflow: str) -> dict[str, Any]:
    status, answer, _ = await client.send("GET", f"/v1/workflows/{workflow}")
    assert status == 200
    return answer
