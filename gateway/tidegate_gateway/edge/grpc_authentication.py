"""Authenticates gRPC calls: if the gateway knows callers, all services but health and reflection need a key or a token."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tidegate_gateway.callers import authentication, caller
from tidegate_gateway.edge import grpc_answers
from tidegate_gateway.openai import error_table


class CallerContext:
    """The context of a call, with metadata that the caller's key or token has bound."""

    def __init__(self, context: grpc_answers.Context, metadata: list[tuple[str, str]], known: caller.Caller) -> None:
        self._context = context
        self._metadata = metadata
        self._caller = known

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def check_class(self, request: Any) -> None:
        """Raises `GatewayError` if the caller may not use the class that a message names."""
        self._caller.check_class(getattr(request, "slo_class", ""), "slo_class")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Authentication(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED and PERMISSION_DENIED, and binds the tenant of all other calls."""

    def __init__(self, callers: authentication.Authentication, *, without_key: tuple[str, ...]) -> None:
        """`without_key` names the services that need none."""
        self._callers = callers
        self._without_key = without_key

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or call.method.split("/")[1] in self._without_key:
            return handler

        async def one(request: Any, context: grpc_answers.Context) -> Any:
            call = self._call(handler.unary_unary, request, context)
            del request
            with grpc_answers.forgetting():
                return await call

        async def many(request: Any, context: grpc_answers.Context) -> None:
            call = self._call(handler.unary_stream, request, context)
            del request
            with grpc_answers.forgetting():
                await call

        if handler.response_streaming:
            return handler._replace(unary_stream=many)
        return handler._replace(unary_unary=one)

    async def _call(self, method: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
        return await method(request, await self._bound(context))

    async def _bound(self, context: grpc_answers.Context) -> CallerContext:
        given = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
        try:
            known = self._callers.caller_of(given)
            return CallerContext(context, known.bound(given), known)
        except error_table.GatewayError as error:
            await grpc_answers.abort(context, error)
