"""What the edges share of a call: its request is read, and the headers of its answer are written."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tidegate_gateway import loop_steps
from tidegate_gateway.edge import http_messages
from tidegate_gateway.observe import call_record
from tidegate_gateway.openai import endpoint, http_headers, large_body, parsed_request, request_fields

LARGE_BODY_BYTES = 128 * 1024
"""Larger bodies are read one after the other, and other clients are served between the steps of each: the parse, the look
at its fields, and the call. Without the first, bodies that end together would hold the event loop together."""
LONGEST_REST_S = 0.05
"""Between two steps nothing more of large bodies is read for as long as the first one took, so that a call of another
client, which needs several turns of the event loop, does not meet a step in each of them."""


class CallRequests:
    """Reads the requests of calls."""

    def __init__(self, most_choices: int) -> None:
        self._most_choices = most_choices
        self._large_bodies = loop_steps.TenantTurns()

    async def read(self, kind: endpoint.Endpoint, request: http_messages.Request) -> parsed_request.ParsedRequest:
        """The call in a request, whose body is let go of. Raises `BadRequest`."""
        fields = http_headers.read(http_headers.headers_of(request.headers))
        tenant = http_headers.named_tenant(request.headers)
        parsed = await self.parsed(
            kind, request.body, fields, tenant=tenant, is_costly=request.is_costly, is_counted=request.is_counted
        )
        request.body = b""  # the parsed request has it
        return parsed

    async def parsed(
        self,
        kind: endpoint.Endpoint,
        raw: bytes,
        fields: request_fields.RequestFields,
        *,
        tenant: str,
        is_costly: bool,
        is_counted: bool = False,
    ) -> parsed_request.ParsedRequest:
        """The call with this body, whose parts may be counted already. A large one takes the turn of `tenant`. Raises
        `BadRequest`."""
        most = self._most_choices
        if len(raw) <= LARGE_BODY_BYTES:
            body = parsed_request.decoded(raw, is_counted=is_counted)
            return parsed_request.from_body(kind, body, fields, most_choices=most, is_costly=is_costly)
        async with self._large_bodies.of(tenant):
            async with _step():
                if not is_counted:
                    large_body.LargeBody().add(raw, [raw])
                body = parsed_request.decoded(raw, is_counted=True)
            async with _step():
                return parsed_request.from_body(kind, body, fields, most_choices=most, is_costly=is_costly)


@contextlib.asynccontextmanager
async def _step() -> AsyncIterator[None]:
    """Leaves the event loop to others afterwards for as long as the step took, also if it refused the body."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        await asyncio.sleep(min(time.monotonic() - began_s, LONGEST_REST_S))


def answer_headers(
    fields: request_fields.RequestFields, record: call_record.CallRecord, call_id: str
) -> dict[str, str]:
    """The headers that tell the client about its call."""
    headers = {
        "x-request-id": fields.request_id or call_id,
        "x-tidegate-engine": record.engine or "",
        "x-tidegate-queue-ms": str(round(record.queue_s * 1000)),
    }
    if record.slack_s is not None:
        headers["x-tidegate-slack-ms"] = str(round(record.slack_s * 1000))
    return headers
