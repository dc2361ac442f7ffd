"""The steps of `e2e` with a pool whose engines change under load: a canary that is slower is taken back, the API server
hangs for a while, a good canary is followed by all engines, and no call fails.

The two versions of the engines are two names of one image.
"""

import collections
import contextlib
import json
import time

import e2e_cluster

GATEWAY = f"http://rolling-gateway.{e2e_cluster.WORK}.svc:8000"
LOAD = "10:800:10"
HANG_S = 45.0
"""Longer than the API server waits before it counts a node as lost (40 s), so pools would lose engines if nobody waited."""
PRESENT, NEXT = e2e_cluster.LOCAL_IMAGES[0], f"{e2e_cluster.LOCAL_IMAGES[0]}-next"


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster) -> None:
    rollout = Rollout(cluster)
    story.check("a canary that answers slowly is taken back, under load", rollout.take_back)
    story.check("the API server hangs for 45 s under load: no call fails meanwhile", rollout.hang)
    story.check("a canary with the next image is followed by all engines, under load: no call failed", rollout.promote)


class Rollout:
    """The checks, which share a load."""

    def __init__(self, cluster: e2e_cluster.Cluster) -> None:
        self._cluster = cluster
        self._load: e2e_cluster.Load | None = None

    def take_back(self) -> str:
        self._kubectl("apply", "-f", str(e2e_cluster.E2E / "rolling.yaml"))
        self._kubectl("wait", "spool/rolling", "--for=condition=Ready", "--timeout=180s")
        self._load = e2e_cluster.Load(self._cluster, GATEWAY, "", LOAD, LOAD, LOAD)
        before = self._engines()
        self._edit({"simSpeed": 1})
        came_back = e2e_cluster.wait_for(lambda: self._condition("Degraded", "reason") == "RolledBack", timeout_s=240)
        said = self._condition("Degraded", "message")
        e2e_cluster.expect(came_back and "times as long" in said, said or self._condition("Progressing", "message"))
        self._wait_until_settled()
        e2e_cluster.expect(set(before) <= set(self._engines()), (before, self._engines()))
        return said

    def hang(self) -> str:
        """Ends the phase of the load, whose calls are counted in `promote`."""
        assert self._load is not None
        self._load.next_phase()
        before = self._engines()
        with self._cluster.node.without_api_server():
            time.sleep(HANG_S)
        answers = e2e_cluster.wait_for(self._api_server_answers, timeout_s=60)
        e2e_cluster.expect(answers, "the API server does not come back")
        self._wait_until_settled()
        e2e_cluster.expect(self._engines() == before, (before, self._engines()))
        self._load.next_phase()
        return ", ".join(before)

    def promote(self) -> str:
        """The edit also undoes the one that was taken back."""
        self._cluster.node.name_image(PRESENT, NEXT)
        self._edit({"simSpeed": 8, "image": NEXT})
        done = e2e_cluster.wait_for(lambda: set(self._engines().values()) == {NEXT}, timeout_s=300)
        e2e_cluster.expect(done, f"{self._engines()}: {self._condition('Progressing', 'message')}")
        self._wait_until_settled()
        assert self._load is not None
        phases = self._load.end()
        for counts in phases:
            e2e_cluster.expect(set(counts["status"]) == {"200"} and not counts["broken"], phases)
        reasons = self._kubectl("events", "--for", "spool/rolling", "-o", "jsonpath={.items[*].reason}").split()
        e2e_cluster.expect({"RolledBack", "CanaryStep", "CanaryPromoted"} <= set(reasons), reasons)
        return f"{json.dumps(phases)}\n{dict(collections.Counter(reasons))}"

    def _api_server_answers(self) -> bool:
        with contextlib.suppress(e2e_cluster.FailedError):
            return bool(self._kubectl("get", "spool/rolling", "-o", "name"))
        return False

    def _edit(self, engine: dict[str, str | int]) -> None:
        self._kubectl("patch", "spool/rolling", "--type=merge", "-p", json.dumps({"spec": {"engine": engine}}))

    def _wait_until_settled(self) -> None:
        self._kubectl("wait", "spool/rolling", "--for=jsonpath={.status.engines}=3/3", "--timeout=180s")
        gone = e2e_cluster.wait_for(lambda: len(self._engines()) == 3 and not self._status("{.rollout}"), timeout_s=180)
        e2e_cluster.expect(gone, f"{self._engines()}, {self._status('{.rollout}')}")

    def _engines(self) -> dict[str, str]:
        """The image of each engine's pod."""
        path = "{range .items[*]}{.metadata.name} {.spec.containers[0].image}{'\\n'}{end}"
        selector = "tidegate.dev/pool=rolling,app.kubernetes.io/component=engine"
        lines = self._kubectl("get", "pods", "-l", selector, "-o", f"jsonpath={path}").splitlines()
        return dict(line.split() for line in lines)

    def _condition(self, name: str, field: str) -> str:
        return self._status(f'{{.conditions[?(@.type=="{name}")].{field}}}')

    def _status(self, path: str) -> str:
        """A field of the pool's status, by its JSON path."""
        path = path.replace("{.", "{.status.", 1)
        return self._kubectl("get", "spool/rolling", "-o", f"jsonpath={path}")

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.kubectl(arguments[0], "-n", e2e_cluster.WORK, *arguments[1:])
