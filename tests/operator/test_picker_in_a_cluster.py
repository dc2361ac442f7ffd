"""`tidegate picker` in the place of the reference picker: with the arguments, the rights and the probes of the Gateway API
Inference Extension's conformance suite, on a real API server and behind a real Envoy. Its pods are echo servers."""

import asyncio
import base64
import collections
import contextlib
import json
import pathlib
import sys

import aiohttp
import echo_pods
import envoy_process
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate_cli import processes

KINDS = pathlib.Path(__file__).parent / "gateway_api_kinds.yaml"
SELECTION = "test-epp-endpoint-selection"
RIGHTS = [
    {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
]
"""As in the suite's base.yaml."""
STREAMED = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
}
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def objects(pods):
    """An InferencePool with the ports of the pods, the pods, which nothing starts, and the account of the picker."""
    number = [{"number": port} for port in pods[0].ports]
    picker = {"name": "dp-endpoint-picker-svc", "port": {"number": 9002}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    yield "v1", "ServiceAccount", "picker", {}
    yield "inference.networking.k8s.io/v1", "InferencePool", "dp-inference-pool", {
        "spec": {"selector": {"matchLabels": {"app": "server"}}, "targetPorts": number, "endpointPickerRef": picker}
    }  # fmt: skip
    for pod in pods:
        yield "v1", "Pod", pod.name, {
            "spec": {
                "schedulerName": "none",
                "serviceAccountName": "picker",
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{"name": "echo", "image": "echo", "securityContext": SECURITY}],
            }
        }  # fmt: skip
    yield "rbac.authorization.k8s.io/v1", "Role", "reader", {"rules": RIGHTS}
    subjects = [{"kind": "ServiceAccount", "name": "picker"}]
    yield "rbac.authorization.k8s.io/v1", "RoleBinding", "reader", {"subjects": subjects, "roleRef": role}


def make_ready(kubectl, pod, ready="True"):
    status = {"podIP": pod.ip, "podIPs": [{"ip": pod.ip}], "conditions": [{"type": "Ready", "status": ready}]}
    patch = json.dumps({"status": status})
    kubectl("patch", f"pod/{pod.name}", "--subresource=status", "--type=merge", "-p", patch)


@contextlib.asynccontextmanager
async def picker(folder, plane, token, *words):
    """`tidegate picker` as the suite's Deployments start it; the ports of the proxy and of the probes."""
    authority, named = folder / "ca.crt", folder / "token"
    kubeconfig = json.loads(plane.kubeconfig.read_text())
    authority.write_bytes(base64.b64decode(kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"]))
    named.write_text(token)
    file, free = folder / "picker.json", [processes.free_port() for _ in range(4)]
    pool = {"apiUrl": plane.server, "tokenFile": str(named), "caFile": str(authority)}
    listen = {"port": free[3]}
    file.write_text(json.dumps({"inferencePool": pool, "listen": listen, "health": {"resolve": "100ms"}}))
    of_the_suite = [
        "--v",
        "4",
        "--zap-encoder",
        "json",
        "--grpc-port",
        str(free[0]),
        "--grpc-health-port",
        str(free[1]),
    ]
    of_the_suite += ["--config-file", "/config/conformance-plugins.yaml", "--metrics-port", str(free[2])]
    command = ["-m", "tidegate_cli.main", "picker", *of_the_suite, f"--config={file}", *words]
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        yield f"127.0.0.1:{free[0]}", f"127.0.0.1:{free[1]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        assert await process.wait() == 0


async def serves(address, service):
    """Whether a probe of Kubernetes would succeed."""
    async with grpc.aio.insecure_channel(address) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=False)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


async def until(condition, within_s=60.0):
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.fixture
def kinds(plane):
    plane.add_kinds(KINDS, "inference.networking.k8s.io/v1")


async def test_the_picker_takes_the_place_of_the_reference_picker(kinds, plane, kubectl, namespace, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        names = ("dp-0", "dp-1", "dp-2")
        pods = await stack.enter_async_context(echo_pods.echo_pods(*names, ports=3))
        for version, kind, name, body in objects(pods):
            metadata = {"name": name, "labels": {"app": "server"}}
            kubectl("create", "-f", "-", body={"apiVersion": version, "kind": kind, "metadata": metadata, **body})
        for pod in pods:
            make_ready(kubectl, pod)
        token = kubectl("create", "token", "picker").strip()
        words = ["--pool-name", "dp-inference-pool", "--pool-namespace", namespace, "--conformance-tests"]
        address, probes = await stack.enter_async_context(picker(tmp_path, plane, token, *words))
        await until(lambda: serves(probes, "readiness"))
        assert await serves(probes, "inference-extension")

        endpoints = echo_pods.all_endpoints(pods)
        config = envoy_process.configuration(address, endpoints, failure_mode_allow=False, processing_mode=STREAMED)
        envoy_process.route_all(config)
        envoy_process.tls_to_picker(config)
        url = await stack.enter_async_context(envoy_process.envoy(tmp_path, config))
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(selection=None):
            headers = {} if selection is None else {SELECTION: selection}
            path = f"{url}/primary-gateway-dp-test"
            async with http.post(
                path, json={"model": "conformance-fake-model", "prompt": "x"}, headers=headers
            ) as answer:
                said = await answer.json(content_type=None)
                return answer.status, said, answer.headers

        async def reaches(pod):
            return (await ask(pod.ip))[0] == 200

        for pod in pods:
            await until(lambda pod=pod: reaches(pod))
            status, said, headers = await ask(pod.endpoints[1])
            assert (status, said["pod"], said["port"]) == (200, pod.name, pod.ports[1])
            assert headers["x-conformance-test-served-endpoint"] == pod.endpoints[1]
            assert headers["x-conformance-test-epp-pool"] == f"{namespace}/dp-inference-pool"
        chosen = f"{pods[0].ip},{pods[2].ip}:{pods[2].ports[1]}"
        found = collections.Counter()
        for status, said, _ in await asyncio.gather(*(ask(chosen) for _ in range(100))):
            assert status == 200
            found[said["pod"], said["port"]] += 1
        assert set(found) == {*(("dp-0", port) for port in pods[0].ports), ("dp-2", pods[2].ports[1])}

        make_ready(kubectl, pods[1], "False")  # the pool follows its pods

        async def is_gone():
            return (await ask(pods[1].ip))[0] == 503

        await until(is_gone)
        assert (await ask())[0] == 200
        kubectl("delete", "inferencepool/dp-inference-pool")

        async def is_unknown():
            return not await serves(probes, "inference-extension")

        await until(is_unknown)
        assert await serves(probes, "liveness")
        assert (await ask())[0] == 503
