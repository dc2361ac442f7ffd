"""EngineControl's client: single calls to one engine. `control_connections` keeps streams of reports open to many."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping

from google.protobuf.message import DecodeError

from tidegate_control import grpc_channel, pool_token, translation
from tidegate_policy.engine.engine_status import State, Switched, WatchReport
from tidegate_proto.v1 import control_pb2

CallFailed = grpc_channel.CallFailed

SET_POLICY_TIMEOUT_S = 5.0
"""An engine acknowledges a policy when it is in force, which may take a step of the engine."""
MOST_MESSAGE_BYTES = 64 * 1024
"""Of an answer or a report. An engine's state has a few hundred, and one that sends much takes the caller's time."""
REPORTS_IN_A_ROW = 100
"""Reports that are read without a pause, such as those that came while the caller was busy. An engine that goes on to
send more than two in a period is read more slowly, so that it takes little of the caller's time, and the connection holds
it back."""
UNREADABLE = "its answer cannot be read"
SERVICE = f"/{control_pb2.DESCRIPTOR.services_by_name['EngineControl'].full_name}"


class EngineClient:
    """Calls to the EngineControl at one address (host:port). Every call raises `CallFailed`.

    A call answers None when the engine's answer cannot be read: bytes that are no message, or impossible numbers.
    """

    def __init__(self, address: str, *, token: str | None = None) -> None:
        """Calls carry `token`, which an engine without a token ignores."""
        self.address = address
        self._channel = grpc_channel.Channel(
            address, metadata=pool_token.header(token), most_message_bytes=MOST_MESSAGE_BYTES
        )

    async def get_state(self, *, timeout_s: float) -> State | None:
        """The engine's state, without the list of its waiting calls."""
        request = control_pb2.GetStateRequest(max_waiting_ids=0).SerializeToString()
        answer = await self._channel.call(f"{SERVICE}/GetState", request, timeout_s=timeout_s)
        try:
            return translation.from_state(control_pb2.EngineState.FromString(answer))
        except DecodeError:
            return None

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
        answer = await self._channel.call(f"{SERVICE}/SetPolicy", request.SerializeToString(), timeout_s=timeout_s)
        try:
            switched = control_pb2.SetPolicyResponse.FromString(answer)
        except DecodeError:
            return None
        return Switched(policy=switched.policy, previous=switched.previous, reordered=switched.reordered)

    async def watch(self, period_s: float, *, idle_period_s: float = 0.0) -> AsyncGenerator[WatchReport | None, None]:
        """One report for each `period_s` (0.1 to 60 seconds) until the engine ends the stream; None for a report that
        cannot be read. While nothing happens in the engine, one for each `idle_period_s` if that is longer."""
        request = control_pb2.WatchQosRequest(period_s=period_s, idle_period_s=idle_period_s)
        watched = self._channel.stream(f"{SERVICE}/WatchQos", request.SerializeToString())
        clock = asyncio.get_running_loop().time
        due_s = -math.inf
        async with contextlib.aclosing(watched) as messages:
            async for message in messages:
                yield _report(message)
                due_s = max(due_s, clock() - REPORTS_IN_A_ROW * period_s / 2) + period_s / 2
                if (ahead_s := due_s - clock()) > 0:
                    await asyncio.sleep(ahead_s)

    async def close(self) -> None:
        await self._channel.close()


def _report(message: bytes) -> WatchReport | None:
    try:
        return translation.from_report(control_pb2.QosReport.FromString(message))
    except DecodeError:
        return None
