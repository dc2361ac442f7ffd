"""The documented HorizontalPodAutoscalers, with the real HPA controller and a double of the external metrics."""

import http.server
import json
import pathlib
import re
import ssl
import threading

import pytest
import yaml
from localkube import background_processes, pki

import operator_doubles

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "autoscaling.md"
API = "/apis/external.metrics.k8s.io/v1beta1"
METRIC = "tidegate_engine_backlog_seconds"


class ExternalMetrics(http.server.BaseHTTPRequestHandler):
    """Serves one value as every external metric, as an adapter of Prometheus does."""

    backlog_s = 2.0

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.endswith(METRIC):
            value = {
                "metricName": METRIC,
                "timestamp": "2026-01-01T00:00:00Z",
                "value": f"{self.backlog_s * 1000:.0f}m",
            }
            body = {"kind": "ExternalMetricValueList", "items": [value]}
        elif path == API:
            kind = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            body = {"kind": "APIResourceList", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": [kind]}
        else:
            body = {}
        versions = {"kind": "APIResourceList", "groupVersion": ""}
        answer = json.dumps(
            {"apiVersion": "v1" if body.get("kind") == versions["kind"] else API.removeprefix("/apis/"), **body}
        ).encode()
        self.send_response(200 if body else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def metrics(plane, kubectl, tmp_path):
    """Registers the double as the cluster's external metrics, and removes it again."""
    (port,) = background_processes.free_ports(1)
    crt, key = pki.certificate(plane.folder, f"metrics-{port}", subject="/CN=metrics", names=["DNS:localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    handler = type("Handler", (ExternalMetrics,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    namespace = kubectl("create", "configmap", "x", "--dry-run=server", "-o", "jsonpath={.metadata.namespace}")
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics"},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }  # fmt: skip
    kubectl("create", "-f", "-", body=service)
    registered = {
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
            "insecureSkipTLSVerify": True, "service": {"namespace": namespace, "name": "metrics", "port": port},
        },
    }  # fmt: skip
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(registered))
    plane.kubectl("wait", "apiservice/v1beta1.external.metrics.k8s.io", "--for=condition=Available", "--timeout=120s")
    yield handler
    plane.kubectl("delete", "apiservice/v1beta1.external.metrics.k8s.io")
    server.shutdown()
    server.server_close()


def documented_autoscaler(**target):
    """The HPA of the page, with a quick way down."""
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "External" in block]
    autoscaler = yaml.safe_load(text)
    autoscaler["spec"]["scaleTargetRef"] |= target
    autoscaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    return autoscaler


def replicas(kubectl, deployment):
    return kubectl("get", f"deployment/{deployment}", "-o", "jsonpath={.spec.replicas}")


def test_an_autoscaler_scales_one_node_pool_by_an_external_metric(kubectl, operator, metrics, eventually):
    node_pools = [{"name": "a100", "scaledBy": "external"}, {"name": "slow", "replicas": 2}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(nodePools=node_pools))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert kubectl("get", "spool/chat", "-o", "jsonpath={.spec.replicas}") == "2"
    metrics.backlog_s = 8.0
    kubectl("apply", "-f", "-", body=documented_autoscaler())
    eventually(lambda: replicas(kubectl, "chat-engine-a100") == "4", timeout_s=120)
    kubectl("annotate", "spool/chat", "touch=1")  # a reconcile keeps what the autoscaler has set
    eventually(lambda: "6/6" in kubectl("get", "spool/chat"), timeout_s=60)
    assert replicas(kubectl, "chat-engine-slow") == "2"
    metrics.backlog_s = 1.0
    eventually(lambda: replicas(kubectl, "chat-engine-a100") == "1", timeout_s=120)


def test_an_autoscaler_scales_a_whole_pool_by_an_external_metric(kubectl, operator, metrics, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "a"}, {"name": "b"}]))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    metrics.backlog_s = 10.0
    target = {"apiVersion": "tidegate.dev/v1alpha1", "kind": "ServingPool", "name": "chat"}
    kubectl("apply", "-f", "-", body=documented_autoscaler(**target))
    eventually(lambda: kubectl("get", "spool/chat", "-o", "jsonpath={.spec.replicas}") == "5", timeout_s=120)
    eventually(lambda: "5/5" in kubectl("get", "spool/chat"), timeout_s=60)
