"""Requests about relQueries, as tests send them."""

from typing import Any

import orjson

TEMPLATE = "Say what {{city}} is known for."


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"city": f"city {i}", "country": "unused"} for i in range(first, first + count)]


def body(count: int = 12, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "template": TEMPLATE, "rows": rows(count), "max_tokens": 2, **fields}


async def events(response: Any) -> list[tuple[int | None, Any]]:
    """The number and the object of each event of a stream; the end marker is None."""
    found: list[tuple[int | None, Any]] = []
    for event in (await response.read()).decode().split("\n\n"):
        lines = [line.partition(": ") for line in event.splitlines() if not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        if "data" in fields:
            value = None if fields["data"] == "[DONE]" else orjson.loads(fields["data"])
            found.append((int(fields["id"]) if "id" in fields else None, value))
    return found


def of_rows(found: list[tuple[int | None, Any]]) -> list[Any]:
    return [item for _, item in found if item and item.get("object") == "relquery.row"]
