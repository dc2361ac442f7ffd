"""Which tenant asks, and with which Idempotency-Key? Read from the headers of a request that is no call."""

from tidegate_gateway.edge import http_messages
from tidegate_gateway.openai import http_headers, request_fields
from tidegate_gateway.workflows import workflow_service


def of(request: http_messages.Request) -> workflow_service.Requester:
    """The requester that the headers name. Raises `BadRequest`."""
    return read(http_headers.headers_of(request.headers))


def read(headers: http_headers.Headers) -> workflow_service.Requester:
    """The tenant and the Idempotency-Key that the headers name. Raises `BadRequest`."""
    names = request_fields.HTTP_NAMES
    key = headers.get("idempotency-key")
    return workflow_service.Requester(
        tenant=http_headers.tenant(headers),
        key=None if key is None else request_fields.text(key, names.idempotency_key),
        names=names,
    )
