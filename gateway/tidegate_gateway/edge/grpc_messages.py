"""Messages of clients, from bytes. Their bytes and entries are bounded in sum, and their entries are counted before
anything is decoded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import descriptor, message

from tidegate_gateway.edge import body_budget, grpc_answers, grpc_authentication, message_entries, unread_answers
from tidegate_gateway.openai import error_table, http_headers
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.model import DropReason
from tidegate_proto.v1 import inference_pb2

MOST_ENTRIES = {"SubmitRelQueryRequest": 250_000, "GenerateRequest": 100_000}
"""Fields of a message and of the messages in it; 100,000 rows of a relQuery with one column have 200,000."""
MOST_ENTRIES_OF_OTHERS = 10_000
ENTRY_BYTES = 100
"""Of memory that a decoded entry takes."""
LARGE_BYTES, FEW_ENTRIES = 32 * 1024, 1000
"""Messages that have more are decoded in another thread, one after the other."""


class _Kind:
    """A kind of messages."""

    def __init__(self, described: descriptor.Descriptor) -> None:
        self.nested = message_entries.nested(described)
        self.most_entries = MOST_ENTRIES.get(described.name, MOST_ENTRIES_OF_OTHERS)


class Messages(grpc.aio.ServerInterceptor):
    """Decodes the messages of clients. Answers INVALID_ARGUMENT to bytes that are not the message of the method, where gRPC
    itself would answer UNKNOWN, and RESOURCE_EXHAUSTED while all messages together are too large."""

    def __init__(self, most_bytes: int) -> None:
        self._bodies = body_budget.BodyBudget(most_bytes)
        self._left_answer_bytes = unread_answers.MOST_BYTES
        self._one_large = asyncio.Lock()
        services = inference_pb2.DESCRIPTOR.services_by_name.values()
        self._kinds = {
            f"/{service.full_name}/{method.name}": _Kind(method.input_type)
            for service in services
            for method in service.methods
        }
        """Of the message that each method takes."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        kind = self._kinds.get(call.method)
        if handler is None or kind is None:
            return handler

        async def one(raw: bytes, context: grpc_answers.Context) -> Any:
            call = self._one(handler, raw, kind, context)
            del raw
            with grpc_answers.forgetting():
                return await call

        async def many(raw: bytes, context: grpc_answers.Context) -> None:
            call = self._many(handler, raw, kind, context)
            del raw
            with grpc_answers.forgetting():
                await call

        if handler.response_streaming:
            return handler._replace(request_deserializer=None, unary_stream=many)
        return handler._replace(request_deserializer=None, unary_unary=one)

    async def _one(self, handler: Any, raw: bytes, kind: _Kind, context: Any) -> Any:
        async with self._decoded(raw, kind, handler.request_deserializer, context) as request:
            answer = await handler.unary_unary(request, context)
        await self._count_answer(answer.ByteSize(), context)
        return answer

    async def _many(self, handler: Any, raw: bytes, kind: _Kind, context: Any) -> None:
        async with self._decoded(raw, kind, handler.request_deserializer, context) as request:
            await handler.unary_stream(request, context)

    @asynccontextmanager
    async def _decoded(
        self, raw: bytes, kind: _Kind, decode: Callable[[bytes], Any], context: Any
    ) -> AsyncIterator[Any]:
        """The message, whose bytes and entries count while the call runs, and until it is decoded."""
        held = self._bodies.hold(http_headers.named_tenant(context.invocation_metadata() or ()))
        held.add(len(raw))
        thread: asyncio.Future[Any] | None = None
        try:
            try:
                _check(held)
                entries = None if len(raw) > LARGE_BYTES else message_entries.some(raw, kind.nested, FEW_ENTRIES)
                if entries is not None:
                    request = decode(raw)
                else:
                    await self._one_large.acquire()
                    thread = asyncio.get_running_loop().run_in_executor(None, _decode, raw, kind, decode)
                    thread.add_done_callback(lambda _: self._one_large.release())
                    request, entries = await asyncio.shield(thread)  # a thread goes on when its call is cancelled
                held.add(entries * ENTRY_BYTES)
                _check(held)
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
                held.release()
            else:
                thread.add_done_callback(lambda _: held.release())

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


def _check(held: body_budget.Bodies) -> None:
    if not held.fits:
        raise error_table.Shed(DropReason.SATURATED)


def _decode(raw: bytes, kind: _Kind, decode: Callable[[bytes], Any]) -> tuple[Any, int]:
    entries = message_entries.count(raw, kind.nested, kind.most_entries)
    return decode(raw), entries
