"""What do all gRPC methods share? Metadata, messages of a stream, and errors with `ErrorInfo` and `RetryInfo`."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

import grpc
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from tidegate_gateway.edge import grpc_requests
from tidegate_gateway.openai import error_table, http_headers
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.workflows import workflow_service

DOMAIN = "tidegate.dev"
MOST_TOLD_BYTES, MOST_PARAM_BYTES = 1000, 300
"""Of an error that a client is told; clients take 8 KiB of trailers."""

_Record = TypeVar("_Record")
_Message = TypeVar("_Message", bound=message.Message)


class Ended(Exception):
    """The call has its status, and its method goes no further."""


class Context(Protocol):
    """A call, as its method sees it."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """The metadata of the client, with the tenant of its key."""

    @property
    def is_held(self) -> bool:
        """What was sent waits for the client."""

    def send(self, event: message.Message) -> None:
        """Sends a message of the answer."""

    async def taken(self) -> None:
        """Returns when the client may take more."""

    def give_up(self, waited_s: float) -> None:
        """The client has not taken its answer for so long."""

    @property
    def is_costly(self) -> bool:
        """The message of the call has many values (`bounded_json.is_costly`)."""

    def end(self, code: int, told: str, further: list[tuple[bytes, bytes]]) -> None:
        """Ends the call with a status and further trailers."""


async def abort(context: Context, error: error_table.GatewayError) -> NoReturn:
    """Ends the call with the error."""
    refuse(context, error)
    raise Ended


def refuse(context: Context, error: error_table.GatewayError) -> None:
    """Ends a call with the error, its reason, and the delay after which to retry."""
    code, told = _code(error).value[0], _cut(error.message, MOST_TOLD_BYTES)
    status = status_pb2.Status(code=code, message=told)
    reason = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    if error.param:
        reason.metadata["param"] = _cut(error.param, MOST_PARAM_BYTES)
    status.details.add().Pack(reason)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=0, seconds=error_table.whole_seconds(error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    details = base64.b64encode(status.SerializeToString()).rstrip(b"=")
    context.end(code, told, [(b"grpc-status-details-bin", details)])


async def answer(
    context: Context,
    step: Callable[[workflow_service.Requester], Awaitable[_Record]],
    render: Callable[[_Record], _Message],
    idempotency_key: str = "",
) -> _Message:
    """One step for the requester that the metadata names: the record as it is then, or the error."""
    try:
        return render(await step(grpc_requests.requester(metadata(context), idempotency_key)))
    except error_table.GatewayError as error:
        await abort(context, error)


async def write(context: Context, write_s: float, event: message.Message) -> None:
    """Sends the next message of a stream. Raises `BadRequest` when the client does not take it within `write_s` seconds."""
    context.send(event)
    if not context.is_held:
        return
    del event  # its bytes wait, and it is not needed for them
    try:
        async with asyncio.timeout(write_s):
            await context.taken()
    except TimeoutError as error:
        context.give_up(write_s)
        late = f"the answer was not read within {write_s:.3g} s"
        raise BadRequest(late, code="request_timeout") from error


def _cut(text: str, most_bytes: int) -> str:
    return text.encode()[:most_bytes].decode(errors="ignore")


def _code(error: error_table.GatewayError) -> grpc.StatusCode:
    code: grpc.StatusCode = grpc.StatusCode[error.row.grpc]
    return code


def metadata(context: Context) -> http_headers.Headers:
    return http_headers.headers_of(context.invocation_metadata())
