"""Helpers for tests: a small pool, a cluster that dies, and engines that report what a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from tidegate_operator import cluster, objects, status, steering
from tidegate_operator.spec import Json
from tidegate_proto.v1 import control_pb2, control_pb2_grpc


def pool(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """A ServingPool of two simulated node pools, to apply; `spec` replaces or adds top-level fields of its spec."""
    return {
        "apiVersion": "tidegate.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "demo"},
            "engine": {"kind": "sim"},
            "nodePools": [{"name": "fast", "replicas": 2}, {"name": "slow", "replicas": 1}],
            **spec,
        },
    }


class Died(BaseException):
    """The process that wrote is no more. Not an Exception: nobody handles it."""


class MortalCluster:
    """A cluster whose writer dies just before its write number `after` + 1."""

    def __init__(self, real: cluster.Cluster, *, after: int) -> None:
        self._real = real
        self._left = after
        self.writes = 0

    def _write(self) -> None:
        if not self._left:
            raise Died
        self._left -= 1
        self.writes += 1

    async def pool(self, namespace: str, name: str) -> Json | None:
        return await self._real.pool(namespace, name)

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        return await self._real.children(namespace, pool)

    async def get(self, reference: objects.Reference) -> Json | None:
        return await self._real.get(reference)

    async def engine_pods(self, namespace: str, pool: str) -> Sequence[Json]:
        return await self._real.engine_pods(namespace, pool)

    async def apply(self, manifest: Json) -> Json:
        self._write()
        return await self._real.apply(manifest)

    async def delete(self, reference: objects.Reference, uid: str) -> None:
        self._write()
        await self._real.delete(reference, uid)

    async def apply_status(self, namespace: str, name: str, body: Json, *, writer: str) -> None:
        self._write()
        await self._real.apply_status(namespace, name, body, writer=writer)

    async def record(self, event: status.Event) -> None:
        self._write()
        await self._real.record(event)


class FakeAdmin:
    """A pool's gateways, which keep what they are told."""

    alpha = 0.2

    def __init__(self, *, heard: bool = True) -> None:
        self.heard = heard
        self.by_hand: steering.Override | None = None
        self.told: list[str] = []

    async def override(self) -> steering.Override | None:
        return self.by_hand

    async def follow(self, policy: str, reason: str) -> None:
        if self.told[-1:] != [policy]:
            self.told.append(policy)


class FakeEngine(control_pb2_grpc.EngineControlServicer):
    """An engine as the steering loop sees it: a real gRPC server on loopback whose reports a test writes."""

    def __init__(self) -> None:
        self.policy = "fcfs"
        self.report = control_pb2.QosReport()
        """Sent again and again, with the policy that is in force."""
        self.set_to: list[str] = []
        """Every policy that was set, in order."""
        self.refuses = False
        self.babbles = False
        """New calls are answered with bytes that are no message."""
        self.periods: list[float] = []
        """Of the streams of reports that are open, in seconds."""
        self.mute = False
        """Streams stay open, and nothing comes."""
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
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        previous, self.policy = self.policy, request.policy
        self.set_to.append(request.policy)
        return control_pb2.SetPolicyResponse(policy=request.policy, previous=previous)

    async def WatchQos(
        self, request: control_pb2.WatchQosRequest, context: Any
    ) -> AsyncIterator[control_pb2.QosReport]:
        if not 0.1 <= request.period_s <= 60:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "period_s must be between 0.1 and 60")
        self.periods.append(request.period_s)
        try:
            while True:
                if not self.mute:
                    report = control_pb2.QosReport()
                    report.CopyFrom(self.report)
                    report.policy, report.window_s = self.policy, request.period_s
                    yield report
                await asyncio.sleep(request.period_s)
        finally:
            self.periods.remove(request.period_s)


class _Babble(grpc.aio.ServerInterceptor):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(_babble) if self._engine.babbles else await continuation(details)


async def _babble(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"\xff"


def calm() -> control_pb2.QosReport:
    """A window in which everything went well."""
    return control_pb2.QosReport(
        arrived=30, finished=30, with_target=30, ttft=control_pb2.Histogram(counts=[0] * 8 + [30])
    )


def blocked() -> control_pb2.QosReport:
    """A window in which short calls stood behind long ones."""
    mixed = control_pb2.Histogram(counts=[0] * 8 + [25] + [0] * 20 + [5])
    return control_pb2.QosReport(
        arrived=30, finished=30, waiting=20, with_target=30, missed=12, blocked=15, service=mixed,
        ttft=control_pb2.Histogram(counts=[0] * 16 + [30]),
    )  # fmt: skip


def worse() -> control_pb2.QosReport:
    """A window in which first tokens took ten times as long as in `blocked`."""
    report = blocked()
    report.ttft.counts[:] = [0] * 24 + [30]
    return report
