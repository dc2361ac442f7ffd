"""EngineControl's client: single calls to one engine. `control_connections` keeps streams of reports open to many."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping

import grpc

from tidegate_control import pool_token, translation
from tidegate_policy.engine.engine_status import State, Switched, WatchReport
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

SET_POLICY_TIMEOUT_S = 5.0
"""An engine acknowledges a policy when it is in force, which may take a step of the engine."""
MOST_MESSAGE_BYTES = 64 * 1024
"""Of an answer or a report. An engine's state has a few hundred, and one that sends much takes the caller's time."""
REPORTS_IN_A_ROW = 100
"""Reports that are read without a pause, such as those that came while the caller was busy. An engine that goes on to
send more than two in a period is read more slowly, so that it takes little of the caller's time, and the connection holds
it back."""
UNREADABLE = "its answer cannot be read"


class CallFailed(Exception):
    """An engine did not answer a call, or answered with an error; the message is `CODE: details`."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.is_unreachable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        """Whether the engine could not be reached, as opposed to having rejected the call."""
        self.is_unauthenticated = code is grpc.StatusCode.UNAUTHENTICATED
        """Whether the engine did not accept the token of the call."""
        self.is_invalid = code is grpc.StatusCode.INVALID_ARGUMENT
        """Whether the engine does not know what the call asks for."""


class EngineClient:
    """Calls to the EngineControl at one address (host:port). Every call raises `CallFailed`.

    A call answers None when the engine's answer cannot be read: bytes that are no message, or impossible numbers.
    """

    def __init__(self, address: str, *, token: str | None = None) -> None:
        """Calls carry `token`, which an engine without a token ignores."""
        self.address = address
        self._metadata = tuple(pool_token.header(token).items())
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[("grpc.max_receive_message_length", MOST_MESSAGE_BYTES), ("grpc.http2.bdp_probe", 0)],
        )  # without probes the window for what has not been read stays at 64 KiB
        self._stub = control_pb2_grpc.EngineControlStub(self._channel)  # type: ignore[no-untyped-call]

    async def get_state(self, *, timeout_s: float) -> State | None:
        """The engine's state, without the list of its waiting calls."""
        request = control_pb2.GetStateRequest(max_waiting_ids=0)
        try:
            message = await self._stub.GetState(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from error
        # grpc.aio answers None for bytes that it cannot parse.
        return None if message is None else translation.from_state(message)

    async def set_policy(
        self,
        policy: str,
        reason: str,
        parameters: Mapping[str, float] | None = None,
        *,
        bypass: bool = False,
        timeout_s: float = SET_POLICY_TIMEOUT_S,
    ) -> Switched | None:
        """Puts `policy` in force; returns when it is. A parameter that is not given takes its default. A `bypass` lasts
        until the next call."""
        request = control_pb2.SetPolicyRequest(policy=policy, reason=reason, parameters=parameters, bypass=bypass)
        try:
            answer = await self._stub.SetPolicy(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from error
        if answer is None:
            return None
        return Switched(policy=answer.policy, previous=answer.previous, reordered=answer.reordered)

    async def watch(self, period_s: float, *, idle_period_s: float = 0.0) -> AsyncGenerator[WatchReport | None, None]:
        """One report for each `period_s` (0.1 to 60 seconds) until the engine ends the stream; None for a report that
        cannot be read. While nothing happens in the engine, one for each `idle_period_s` if that is longer."""
        request = control_pb2.WatchQosRequest(period_s=period_s, idle_period_s=idle_period_s)
        stream = self._stub.WatchQos(request, metadata=self._metadata)
        clock = asyncio.get_running_loop().time
        due_s = -math.inf
        try:
            async for message in stream:
                yield None if message is None else translation.from_report(message)
                due_s = max(due_s, clock() - REPORTS_IN_A_ROW * period_s / 2) + period_s / 2
                if (ahead_s := due_s - clock()) > 0:
                    await asyncio.sleep(ahead_s)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from error
        finally:
            stream.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _failed(error: grpc.aio.AioRpcError) -> CallFailed:
    return CallFailed(error.code(), error.details() or "")
