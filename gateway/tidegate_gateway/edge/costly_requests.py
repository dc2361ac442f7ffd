"""Requests whose bodies have many values take turns, whichever port they come to."""

from tidegate_gateway import loop_steps
from tidegate_gateway.edge import http_messages
from tidegate_gateway.openai import bounded_json, http_headers


class CostlyRequests:
    """The turns of the costly requests of one port."""

    def __init__(self) -> None:
        self._turns = loop_steps.TenantTurns()

    async def turn(self, request: http_messages.Request) -> None:
        """Notes whether the request is costly, and returns when it is its turn."""
        request.is_costly = bounded_json.is_costly(request.body)
        if request.is_costly:
            await self._turns.next(http_headers.named_tenant(request.headers))
