"""The steps of `e2e` with a pool that scales itself: up and down with the load, to zero engines, and back."""

import json
import time

import e2e_cluster

GATEWAY = f"http://elastic-gateway.{e2e_cluster.WORK}.svc:8000"
MOST = 3
"""`maxReplicas` of the pool."""
MANY, FEW = "2.5:1200:150", "0.5:20:4"
"""2.5 calls a second keep 2.7 engines of the pool's profile occupied, by the cost model; the smaller load keeps none."""


class Autoscaling:
    """The checks, which follow each other and share a load."""

    def __init__(self, cluster: e2e_cluster.Cluster) -> None:
        self._cluster = cluster
        self._load: e2e_cluster.Load | None = None

    def rise(self) -> str:
        self._cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", str(e2e_cluster.E2E / "elastic.yaml"))
        self._cluster.kubectl(
            "wait", "-n", e2e_cluster.WORK, "spool/elastic", "--for=condition=Ready", "--timeout=180s"
        )
        first = self._status("{.engines}")
        e2e_cluster.expect(first == "1/1", first)
        self._load = e2e_cluster.Load(self._cluster, GATEWAY, "", MANY, FEW)
        self._wait(f"{MOST}/{MOST}", timeout_s=120)
        self._load.next_phase()
        return f"{first} engines, then {self._told()}"

    def fall(self) -> str:
        """Engines stop while calls still arrive, and no call of either load has failed."""
        assert self._load is not None
        self._wait("1/1", timeout_s=240)
        told = self._told()
        many, few = self._load.end()
        for counts in (many, few):
            e2e_cluster.expect(set(counts["status"]) == {"200"} and not counts["broken"], (many, few))
        return f"{told}\n{json.dumps(many)}\n{json.dumps(few)}"

    def rest(self) -> str:
        self._wait("0/0", timeout_s=120)
        selector = "tidegate.dev/pool=elastic,app.kubernetes.io/component=engine"
        self._cluster.kubectl("wait", "-n", e2e_cluster.WORK, "pod", "-l", selector, "--for=delete", "--timeout=60s")
        available = self._status('{.conditions[?(@.type=="Available")].reason}')
        e2e_cluster.expect(available == "ScaledToZero", available)
        return f"{self._told()}\nAvailable: {available}"

    def wake(self) -> str:
        before, started = self._status("{.engines}"), time.monotonic()
        answer = e2e_cluster.ask(self._cluster, "chat", GATEWAY, "demo", "Is anybody there?")
        took_s = time.monotonic() - started
        e2e_cluster.expect(before == "0/0", before)
        e2e_cluster.expect(
            answer["status"] == 200 and "simulated" in answer["text"] and answer["streamed"] == answer["text"], answer
        )
        self._wait("1/1", timeout_s=30)
        return f"{before} engines, an answer after {took_s:.0f} s, then {self._told()}\n{json.dumps(answer)}"

    def _wait(self, engines: str, *, timeout_s: float) -> None:
        """Until the pool has these engines, as READY/DESIRED."""
        found = e2e_cluster.wait_for(lambda: self._status("{.engines}") == engines, timeout_s=timeout_s)
        e2e_cluster.expect(found, self._told())

    def _told(self) -> str:
        return f"{self._status('{.engines}')}: {self._status('{.autoscaling.reason}')}"

    def _status(self, path: str) -> str:
        """A field of the pool's status, by its JSON path."""
        path = path.replace("{.", "{.status.", 1)
        return self._cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool/elastic", "-o", f"jsonpath={path}")
