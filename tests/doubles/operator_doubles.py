"""Test doubles of the operator: a small pool, a cluster whose writer dies, and the gateways of a pool."""

from collections.abc import Collection, Sequence
from typing import Any

from tidegate_operator import cluster, error_budget, gateway_loads, objects, pool_status
from tidegate_operator.spec import Json
from tidegate_policy.rollout.side_by_side import Service
from tidegate_policy.scale.call_load import CallLoad
from tidegate_policy.steer import steering_loop


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
    """The writing process has died. It is no Exception, so no code handles it."""


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

    async def check_pools(self, namespace: str | None) -> None:
        await self._real.check_pools(namespace)

    async def pool_keys(self, namespace: str | None) -> set[tuple[str, str]]:
        return await self._real.pool_keys(namespace)

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        return await self._real.children(namespace, pool)

    async def get(self, reference: objects.Reference) -> Json | None:
        return await self._real.get(reference)

    async def pods(self, namespace: str, pool: str) -> Sequence[Json]:
        return await self._real.pods(namespace, pool)

    async def last_line(self, namespace: str, pod: str, container: str) -> str | None:
        return await self._real.last_line(namespace, pod, container)

    async def autoscalers(self, namespace: str) -> Sequence[Json]:
        return await self._real.autoscalers(namespace)

    async def secret(self, namespace: str, name: str) -> Json | None:
        return await self._real.secret(namespace, name)

    async def create_secret(self, manifest: Json) -> None:
        self._write()
        await self._real.create_secret(manifest)

    async def apply(self, manifest: Json) -> Json:
        self._write()
        return await self._real.apply(manifest)

    async def claim(self, namespace: str, name: str, owner: str) -> bool:
        self._write()
        return await self._real.claim(namespace, name, owner)

    async def state_replicas(self, namespace: str, name: str, total: int) -> None:
        self._write()
        await self._real.state_replicas(namespace, name, total)

    async def delete(self, reference: objects.Reference, uid: str) -> None:
        self._write()
        await self._real.delete(reference, uid)

    async def apply_status(self, namespace: str, name: str, body: Json, *, writer: str) -> Json:
        self._write()
        return await self._real.apply_status(namespace, name, body, writer=writer)

    async def record(self, event: pool_status.Event) -> None:
        self._write()
        await self._real.record(event)


class FakeAdmin:
    """A pool's gateways, which record the policies that they receive."""

    alpha = 0.2

    rejects_token = False

    def __init__(self, *, has_answered: bool = True) -> None:
        self.has_answered = self.answers = has_answered
        self.manual: steering_loop.Override | None = None
        self.received: list[str] = []
        self._asked: Collection[str] = ()
        self.counted: dict[str, error_budget.Counts] = {}
        self.others_have: dict[str, str] = {}
        self.stores: dict[str, bool | None] = {}
        """Whether each gateway reaches the store."""
        self.load: gateway_loads.GatewayLoad | None = None
        """Of each gateway."""
        self.silent: set[str] = set()
        """The gateways that do not report their load."""
        self.engines: dict[str, Service] = {}
        """How each engine serves, as each gateway reports it."""
        self.divided: tuple[frozenset[str], int | None] = (frozenset(), None)
        """The engines that get a share of the calls, and the share, as they were set last."""

    async def ask(self, gateways: Collection[str]) -> None:
        self._asked = gateways

    def override(self) -> steering_loop.Override | None:
        return self.manual

    def targets(self) -> dict[str, dict[str, error_budget.Counts]]:
        return dict.fromkeys(self._asked, self.counted)

    def take_calls(self, offered: CallLoad, waiting: CallLoad, *, met: int = 0, ended: int = 0) -> None:
        """Each gateway reports these loads, and `met` of `ended` calls in time."""
        self.load = gateway_loads.GatewayLoad(
            offered=offered, waiting=waiting, out=0, queued={}, targets={"": error_budget.Counts(met, ended)}
        )

    async def loads(self, addresses: Collection[str]) -> dict[str, gateway_loads.GatewayLoad]:
        return {} if self.load is None else dict.fromkeys(set(addresses) - self.silent, self.load)

    async def services(self, addresses: Collection[str]) -> dict[str, dict[str, Service]]:
        return {address: dict(self.engines) for address in addresses}

    async def divide(self, addresses: Collection[str], engines: Collection[str], weight: int | None) -> None:
        self.divided = frozenset(engines), weight

    def others(self, policies: Collection[str]) -> dict[str, str]:
        return {address: policy for address, policy in self.others_have.items() if policy not in policies}

    async def follow(self, policy: str, reason: str, *, alternatives: Sequence[str] = (), expected: str = "") -> None:
        if self.received[-1:] != [policy]:
            self.received.append(policy)
