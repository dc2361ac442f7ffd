"""Messages of clients, from bytes. Their bytes are bounded in sum, and their entries are counted before anything is
decoded, because a decoded entry takes a hundred times its bytes.

The count follows the wire format of protobuf (https://protobuf.dev/programming-guides/encoding/), and looks only into
fields that hold messages.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import descriptor, message

from tidegate_gateway.edge import grpc_answers, grpc_authentication, unread_answers
from tidegate_gateway.openai import error_table
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.model import DropReason
from tidegate_proto.v1 import inference_pb2

MOST_ENTRIES = 250_000
"""Fields of a message and of the messages in it. 100,000 rows of a relQuery with one column have 200,000."""
LARGE_BYTES = 32 * 1024
"""Larger messages are decoded in another thread, one after the other."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Nested = Mapping[int, Any]
"""By the number of a field that holds messages: the `Nested` of those."""


def nested(kind: descriptor.Descriptor) -> Nested:
    """What `check_entries` needs to know of a kind of messages, which must not contain itself."""
    inner = ((field.number, field.message_type) for field in kind.fields)
    return {number: nested(one) for number, one in inner if one is not None and not one.GetOptions().map_entry}


def check_entries(raw: bytes, fields: Nested, most: int = MOST_ENTRIES) -> None:
    """Raises `BadRequest` if a message has more than `most` entries, and `DecodeError` if it is none."""
    try:
        if _count(raw, 0, len(raw), fields, most) < 0:
            raise BadRequest(f"the message has more than {most} entries; send fewer")
    except IndexError as error:
        raise message.DecodeError("the message ends within a field") from error


def _count(raw: bytes, at: int, end: int, fields: Nested, left: int) -> int:
    """Counts the entries between two offsets, while there may be more; returns how many more there may be, -1 if there are
    too many."""
    while at < end and left >= 0:
        left -= 1
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == _BYTES:
            size, at = _varint(raw, at)
            if at + size > end:
                raise message.DecodeError("a field is longer than its message")
            if (inner := fields.get(tag >> 3)) is not None:
                left = _count(raw, at, at + size, inner, left)  # nothing is counted once there are too many
            at += size
        elif wire == _VARINT:
            _, at = _varint(raw, at)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise message.DecodeError("groups are not used")
    return left


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at an offset, and the offset after it."""
    byte = raw[at]
    at += 1
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise message.DecodeError("a number has more than ten bytes")
    return value, at


class Messages(grpc.aio.ServerInterceptor):
    """Decodes the messages of clients. Answers INVALID_ARGUMENT to bytes that are not the message of the method, where gRPC
    itself would answer UNKNOWN, and RESOURCE_EXHAUSTED while all messages together are too large."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._left_answer_bytes = unread_answers.MOST_BYTES
        self._one_large = asyncio.Lock()
        services = inference_pb2.DESCRIPTOR.services_by_name.values()
        self._nested = {
            f"/{service.full_name}/{method.name}": nested(method.input_type)
            for service in services
            for method in service.methods
        }
        """Of the message that each method takes."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        fields = self._nested.get(call.method)
        if handler is None or fields is None:
            return handler
        decode = handler.request_deserializer

        async def one(raw: bytes, context: grpc_answers.Context) -> Any:
            async with self._decoded(raw, fields, decode, context) as request:
                answer = await handler.unary_unary(request, context)
            await self._count_answer(answer.ByteSize(), context)
            return answer

        async def many(raw: bytes, context: grpc_answers.Context) -> None:
            async with self._decoded(raw, fields, decode, context) as request:
                await handler.unary_stream(request, context)

        if handler.response_streaming:
            return handler._replace(request_deserializer=None, unary_stream=many)
        return handler._replace(request_deserializer=None, unary_unary=one)

    @asynccontextmanager
    async def _decoded(
        self, raw: bytes, fields: Nested, decode: Callable[[bytes], Any], context: Any
    ) -> AsyncIterator[Any]:
        """The message, whose bytes count while the call runs, and until it is decoded."""
        self._left_bytes -= len(raw)
        thread: asyncio.Future[Any] | None = None
        try:
            try:
                if self._left_bytes < 0:
                    raise error_table.Shed(DropReason.SATURATED)
                if len(raw) <= LARGE_BYTES:
                    request = decode(raw)
                else:
                    await self._one_large.acquire()
                    thread = asyncio.get_running_loop().run_in_executor(None, _decode, raw, fields, decode)
                    thread.add_done_callback(lambda _: self._one_large.release())
                    request = await asyncio.shield(thread)  # a thread goes on when its call is cancelled
                if isinstance(context, grpc_authentication.CallerContext):
                    context.check_class(request)
            except message.DecodeError:
                unreadable = "these bytes are not the message that this method takes; reflection describes it"
                await grpc_answers.abort(context, BadRequest(unreadable))
            except error_table.GatewayError as error:
                await grpc_answers.abort(context, error)
            yield request
        finally:
            if thread is None or thread.done():
                self._give_back(len(raw))
            else:
                thread.add_done_callback(lambda _: self._give_back(len(raw)))

    async def _count_answer(self, size: int, context: Any) -> None:
        """A long answer counts until its client has read it."""
        if size <= unread_answers.LONG_BYTES:
            return
        if size > self._left_answer_bytes:
            await grpc_answers.abort(context, error_table.Shed(DropReason.SATURATED))
        self._left_answer_bytes -= size

        def read(_: Any) -> None:
            self._left_answer_bytes += size

        context.add_done_callback(read)

    def _give_back(self, size: int) -> None:
        self._left_bytes += size


def _decode(raw: bytes, fields: Nested, decode: Callable[[bytes], Any]) -> Any:
    check_entries(raw, fields)
    return decode(raw)
