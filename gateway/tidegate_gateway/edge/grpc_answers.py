"""What do all gRPC methods share? Metadata, messages of a stream, and errors with `ErrorInfo` and `RetryInfo`."""

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from tidegate_gateway.edge import grpc_requests
from tidegate_gateway.openai import error_table, http_headers
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.workflows import workflow_service

DOMAIN = "tidegate.dev"

Context = grpc.aio.ServicerContext[Any, Any]
_GONE = "the client went away before it read its answer"
_Record = TypeVar("_Record")
_Message = TypeVar("_Message", bound=message.Message)


async def abort(context: Context, error: error_table.GatewayError) -> NoReturn:
    """Ends the call with the error, its reason, and the delay after which to retry."""
    status = status_pb2.Status(code=_code(error).value[0], message=error.message)
    reason = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    if error.param:
        reason.metadata["param"] = error.param
    status.details.add().Pack(reason)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=0, seconds=max(1, round(error.retry_after_s)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(_code(error), status.message, trailing_metadata=trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError(_GONE) from gone


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """gRPC keeps the exception that ends a call in a cycle with the call, and with it all that the frames of the exception
    know, such as the message. So the frames are cleared."""
    try:
        yield
    except grpc.aio.AbortError as aborted:
        ended: BaseException | None = aborted
        while ended is not None:
            traceback.clear_frames(ended.__traceback__)
            ended = ended.__context__
        raise


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
    try:
        async with asyncio.timeout(write_s):
            await context.write(event)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError(_GONE) from gone
    except TimeoutError as error:
        late = f"the answer was not read within {write_s:.3g} s"
        raise BadRequest(late, code="request_timeout") from error


def _code(error: error_table.GatewayError) -> grpc.StatusCode:
    code: grpc.StatusCode = grpc.StatusCode[error.row.grpc]
    return code


def metadata(context: Context) -> http_headers.Headers:
    given = context.invocation_metadata() or ()
    return http_headers.headers_of((key, value) for key, value in given if isinstance(value, str))
