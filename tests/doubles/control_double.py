"""A test double of an engine: a real EngineControl server on loopback whose reports a test writes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tidegate_control import pool_token
from tidegate_policy import policies
from tidegate_proto.v1 import control_pb2, control_pb2_grpc


class FakeEngine(control_pb2_grpc.EngineControlServicer):
    """An engine as the steering loop sees it."""

    def __init__(self) -> None:
        self.policy = "fcfs"
        self.parameters: dict[str, float] = {}
        """The values of the policy's parameters."""
        self.bypass = False
        self.report = control_pb2.QosReport()
        """Sent once in each period, with the policy in force."""
        self.set_to: list[str] = []
        """Every policy that was set, in order."""
        self.parameters_set_to: list[dict[str, float]] = []
        """The parameters that came with each policy, in order."""
        self.token: str | None = None
        """Calls must carry it; None = every call is taken."""
        self.rejects = False
        self.stalls = False
        """It answers no call that sets a policy, and sets none."""
        self.disobeys = False
        """It accepts a policy and goes on with the one that it has."""
        self.unknown: set[str] = set()
        """Policies that this engine does not know, as one of another version."""
        self.babbles = False
        """New calls are answered with bytes that cannot be parsed."""
        self.periods: list[float] = []
        """Report periods of the open streams, in seconds."""
        self.mute = False
        """Streams stay open and carry no report."""
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(interceptors=[_Babble(self)])
        control_pb2_grpc.add_EngineControlServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def SetPolicy(self, request: control_pb2.SetPolicyRequest, context: Any) -> control_pb2.SetPolicyResponse:
        await self._check_token(context)
        if self.stalls:
            await asyncio.Event().wait()
        if self.rejects:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        if request.policy in self.unknown:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown policy {request.policy!r}")
        try:
            policy = policies.create(request.policy, request.parameters)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        previous = self.policy
        if not self.disobeys:
            self.policy, self.parameters, self.bypass = request.policy, dict(policy.parameters), request.bypass
        self.set_to.append(request.policy)
        self.parameters_set_to.append(dict(request.parameters))
        return control_pb2.SetPolicyResponse(policy=request.policy, previous=previous)

    async def WatchQos(
        self, request: control_pb2.WatchQosRequest, context: Any
    ) -> AsyncIterator[control_pb2.QosReport]:
        await self._check_token(context)
        if not 0.1 <= request.period_s <= 60:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "period_s must be between 0.1 and 60")
        self.periods.append(request.period_s)
        try:
            while True:
                if not self.mute:
                    report = control_pb2.QosReport()
                    report.CopyFrom(self.report)
                    report.policy, report.window_s, report.bypass = self.policy, request.period_s, self.bypass
                    report.policy_parameters.update(self.parameters)
                    yield report
                await asyncio.sleep(request.period_s)
        finally:
            self.periods.remove(request.period_s)

    async def _check_token(self, context: Any) -> None:
        if problem := pool_token.problem(self.token, context.invocation_metadata()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)


class _Babble(grpc.aio.ServerInterceptor):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(_babble) if self._engine.babbles else await continuation(details)


async def _babble(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"\xff"


def calm() -> control_pb2.QosReport:
    """A window in which every target was met."""
    return control_pb2.QosReport(
        window_s=10.0, arrived=30, finished=30, with_target=30, ttft=control_pb2.Histogram(counts=[0] * 8 + [30])
    )


def blocked() -> control_pb2.QosReport:
    """A window in which short calls waited behind long ones."""
    mixed = control_pb2.Histogram(counts=[0] * 8 + [25] + [0] * 20 + [5])
    return control_pb2.QosReport(
        window_s=10.0, arrived=30, finished=30, waiting=5, with_target=30, missed=6, blocked=15, service=mixed,
        ttft=control_pb2.Histogram(counts=[0] * 16 + [30]),
    )  # fmt: skip


def worse() -> control_pb2.QosReport:
    """A window in which first tokens took ten times as long as in `blocked`, so that no target was met."""
    report = blocked()
    report.missed = 30
    report.ttft.counts[:] = [0] * 24 + [30]
    return report
