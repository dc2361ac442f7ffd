"""The steps of `e2e` with a real Prometheus: it reads every component, and an alert fires when engines become slow.

Prometheus is Debian's, and runs in the node's network. It has the chart's rules as they are, and the relabelling of
docs/examples/prometheus.yaml. Debian builds it without discovery in Kubernetes, so this program lists the pods for it,
with the labels that discovery would give them.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import e2e_cluster
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "prometheus.yaml"
RULES = ROOT / "helm" / "tidegate" / "files" / "rules.yaml"
GATEWAY = f"http://edge-gateway.{e2e_cluster.WORK}.svc:8000"
SERVER = "http://127.0.0.1:9090"
INTERVAL = "5s"
PODS = "pods.json"
"""The list of pods, beside the configuration."""
ALERT = "TidegateErrorBudgetBurnsFast"
FIRING = f'ALERTS{{alertname="{ALERT}", pool="edge", alertstate="firing"}}'
MISSED = 'tidegate:slo_call_error:ratio_rate30m{pool="edge", class="live"}'
COUNTED = 'tidegate:slo_calls:rate6h{pool="edge", class="live"} * 21600'
ENOUGH = 25
"""Calls below which no alert fires (tools/monitoring/slo_rules.py)."""
BEFORE, AFTER = "3:20:30", "20:20:30"
"""After the trouble many calls are served well, so that the share of missed targets in the windows becomes small again."""
STOPPED_S, RUNS_S = 0.9, 0.1
"""A slow engine runs for a tenth of the time. Probes wait longer than it stands still."""


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster) -> None:
    alerts = Alerts(cluster)
    story.check("a real Prometheus reads gateways, engines and the operator", alerts.scrape)
    story.check("calls meet their targets: no alert", alerts.silence)
    story.check("the engines become slow: an alert fires", alerts.fire)
    story.check("the engines are fast again: the alert ends", alerts.end)


class Alerts:
    """The checks, which follow each other and share a Prometheus and a load."""

    def __init__(self, cluster: e2e_cluster.Cluster) -> None:
        self._cluster = cluster
        self._load: e2e_cluster.Load | None = None

    def scrape(self) -> str:
        folder = self._cluster.node.folder / "prometheus"
        folder.mkdir()
        shutil.copy(RULES, folder / "rules.yaml")
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(_configuration()))
        words = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        words += [f"--web.listen-address={SERVER.removeprefix('http://')}"]
        pods = folder / PODS
        pods.write_text("[]")
        self._cluster.node.run("prometheus", [_program("prometheus"), *words], self._answers)
        wanted = ("tidegate_policy_info", "vllm:num_requests_running", "tidegate_operator_active")

        def found() -> bool:
            pods.write_text(json.dumps(_targets(self._cluster)))
            return all(self._query(name) for name in wanted) and not self._query("up == 0")

        e2e_cluster.wait_for(found, timeout_s=60)
        e2e_cluster.expect(found(), self._query("up"))
        return "\n".join(
            f"{each['value'][1]} {each['metric']['job']} {each['metric'].get('pool', '')}"
            for each in self._query("sum by (job, pool) (up)")
        )

    def silence(self) -> str:
        self._load = e2e_cluster.Load(self._cluster, GATEWAY, "live", BEFORE, AFTER)
        e2e_cluster.wait_for(lambda: self._value(COUNTED) >= ENOUGH, timeout_s=90)
        counted, missed = self._value(COUNTED), self._value(MISSED)
        e2e_cluster.expect(counted >= ENOUGH and missed < 0.05, f"{missed:.0%} of {counted:.0f} calls missed")
        pending = self._query(f'ALERTS{{alertname="{ALERT}"}}')
        e2e_cluster.expect(not pending, pending)
        return f"{missed:.0%} of {counted:.0f} calls missed a target"

    def fire(self) -> str:
        assert self._load is not None
        with slowed(self._engine_processes()):
            e2e_cluster.wait_for(lambda: bool(self._query(FIRING)), timeout_s=240)
            alerts, missed = self._query(FIRING), self._value(MISSED)
        self._load.next_phase()
        e2e_cluster.expect(bool(alerts), f"{missed:.0%} of {self._value(COUNTED):.0f} calls missed, no alert fires")
        return f"{missed:.0%} of the calls missed a target\n{json.dumps([each['metric'] for each in alerts])}"

    def end(self) -> str:
        assert self._load is not None
        e2e_cluster.wait_for(lambda: not self._query(FIRING), timeout_s=180)
        alerts, missed = self._query(FIRING), self._value(MISSED)
        before, after = self._load.end()
        e2e_cluster.expect(not alerts, f"{missed:.0%} missed, {alerts}")
        return f"{missed:.0%} of the calls missed a target\n{json.dumps(before)}\n{json.dumps(after)}"

    def _engine_processes(self) -> list[int]:
        selector = "tidegate.dev/pool=edge,app.kubernetes.io/component=engine"
        path = "jsonpath={range .items[*]}{.status.containerStatuses[0].containerID} {end}"
        found = self._cluster.kubectl("get", "pods", "-n", e2e_cluster.WORK, "-l", selector, "-o", path).split()
        return [self._cluster.node.process_of(each.removeprefix("containerd://")) for each in found]

    def _answers(self) -> bool:
        try:
            self._query("vector(1)")
        except e2e_cluster.FailedError:
            return False
        return True

    def _query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        words = (_program("promtool"), "query", "instant", "--format=json", SERVER, expr)
        found: list[dict[str, Any]] = json.loads(self._cluster.ask_machine(*words))
        return found

    def _value(self, expr: str) -> float:
        """The value of the only series; 0 without one."""
        found = self._query(expr)
        return float(found[0]["value"][1]) if found else 0.0


def _configuration() -> dict[str, Any]:
    """The example with a short interval, and with the list of pods in the place of discovery."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]
        job["file_sd_configs"] = [{"files": [PODS], "refresh_interval": INTERVAL}]
    return config


def _targets(cluster: e2e_cluster.Cluster) -> list[dict[str, Any]]:
    """A target for each port of each pod, with the labels that discovery of pods in Kubernetes gives it."""
    found = []
    for pod in json.loads(cluster.kubectl("get", "pods", "--all-namespaces", "-o", "json"))["items"]:
        metadata, address = pod["metadata"], pod["status"].get("podIP")
        conditions = {item["type"]: item["status"] for item in pod["status"].get("conditions", ())}
        labels = {
            "__meta_kubernetes_namespace": metadata["namespace"],
            "__meta_kubernetes_pod_name": metadata["name"],
            "__meta_kubernetes_pod_ready": conditions.get("Ready", "").lower(),
            **{
                f"__meta_kubernetes_pod_label_{_label(key)}": value for key, value in metadata.get("labels", {}).items()
            },
        }
        for port in (port for container in pod["spec"]["containers"] for port in container.get("ports", ())):
            named = {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
            if address:
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels | named})
    return found


def _label(name: str) -> str:
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise e2e_cluster.FailedError(f"there is no {name}; install the packages of tools/kubernetes/packages.txt")
    return found


@contextlib.contextmanager
def slowed(processes: Sequence[int]) -> Iterator[None]:
    """Processes that stand still for most of the time, as on a machine that does something else."""
    ended = threading.Event()

    def hold() -> None:
        while not ended.is_set():
            for each, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNS_S)):
                for process in processes:
                    os.kill(process, each)
                ended.wait(pause_s)

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    try:
        yield
    finally:
        ended.set()
        holding.join()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
