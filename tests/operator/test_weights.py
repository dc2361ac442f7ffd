"""Weights in a pool: manifests, progress in the status, and failures that become conditions."""

import asyncio
import dataclasses
import datetime
import http.server
import json
import ssl
import threading
from types import SimpleNamespace

import pytest
from localkube import background_processes, control_plane, pki

import operator_doubles
from tidegate_operator import pod_trouble, pool_status, weight_status
from tidegate_operator.weights import weight_report

from . import test_render

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
CACHE = {"claimName": "cache", "downloadTimeout": "2h"}


def pod(**changes):
    found = test_render.manifests(**changes)
    return test_render.pick(found, "Deployment", "chat-engine-a100")["spec"]["template"]["spec"]


def model(uri, **fields):
    return {"model": {"name": "demo", "uri": uri, **fields}}


def named(items, name):
    (one,) = [item for item in items if item["name"] == name]
    return one


def test_a_cached_model_is_downloaded_before_the_engine_starts():
    found = pod(**model("hf://Qwen/Qwen3-8B", cache=CACHE, secretRef={"name": "hub"}, endpoint="https://mirror"))
    (download,) = found["initContainers"]
    (engine,) = found["containers"]
    assert download["image"] == "tidegate:1"
    assert download["command"] == ["tidegate", "weights"]
    assert download["args"] == [
        "hf://Qwen/Qwen3-8B", "--cache=/weights", "--report=/dev/termination-log", "--endpoint=https://mirror",
    ]  # fmt: skip
    assert download["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "envFrom" not in engine
    (path,) = (word.removeprefix("--model=/weights/") for word in engine["args"] if word.startswith("--model="))
    assert path.startswith("hf-Qwen-Qwen3-8B-")
    mounts = {item["mountPath"]: item for item in engine["volumeMounts"]}
    assert mounts["/weights"] == {"name": "tidegate-weights", "mountPath": "/weights", "readOnly": True}
    assert named(found["volumes"], "tidegate-weights")["persistentVolumeClaim"] == {"claimName": "cache"}


def test_a_download_runs_without_the_devices_of_its_engine():
    resources = {"requests": {"cpu": "8", "memory": "32Gi"}, "limits": {"cpu": "8", "memory": "32Gi"}}
    engine = {**test_render.body()["spec"]["engine"], "resources": resources}
    (download,) = pod(engine=engine, **model("s3://b/m", cache=CACHE))["initContainers"]
    assert download["resources"] == resources
    (download,) = pod(**model("s3://b/m", cache=CACHE))["initContainers"]
    assert download["resources"]["requests"]


def test_the_time_of_a_download_counts_before_an_edit_is_taken_back():
    def deadline(**changes):
        found = test_render.pick(test_render.manifests(**changes), "Deployment", "chat-engine-a100")
        return found["spec"]["progressDeadlineSeconds"]

    assert deadline(**model("s3://b/m", cache=CACHE)) == deadline() + 2 * 3600


def test_a_node_can_keep_its_own_copy():
    cache = {"hostPath": "/var/lib/weights", "downloadTimeout": "2h"}
    found = pod(**model("s3://b/m", cache=cache))
    assert named(found["volumes"], "tidegate-weights")["hostPath"] == {"path": "/var/lib/weights", "type": "Directory"}


@pytest.mark.parametrize(
    ("uri", "source", "path"),
    [
        ("pvc://models/qwen", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, "/weights/qwen"),
        ("pvc://models", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, "/weights"),
        ("oci://registry.example/qwen:1", {"image": {"reference": "registry.example/qwen:1"}}, "/weights"),
        (
            "oci://registry.example/qwen:1#models",
            {"image": {"reference": "registry.example/qwen:1"}},
            "/weights/models",
        ),
        ("hostpath:///data/qwen", {"hostPath": {"path": "/data/qwen", "type": "Directory"}}, "/weights"),
    ],
)
def test_weights_that_exist_are_mounted(uri, source, path):
    found = pod(**model(uri, cache=CACHE))
    assert "initContainers" not in found
    assert named(found["volumes"], "tidegate-weights") == {"name": "tidegate-weights", **source}
    assert f"--model={path}" in found["containers"][0]["args"]


def test_without_a_cache_vllm_downloads_with_the_token():
    found = pod(**model("hf://Qwen/Qwen3-8B@v2", secretRef={"name": "hub"}, endpoint="https://mirror"))
    (engine,) = found["containers"]
    assert "initContainers" not in found
    assert engine["args"][:2] == ["--model=Qwen/Qwen3-8B", "--revision=v2"]
    assert engine["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert named(engine["env"], "HF_ENDPOINT")["value"] == "https://mirror"


def test_simulated_engines_download_nothing():
    engine = {**test_render.body()["spec"]["engine"], "kind": "sim"}
    found = pod(engine=engine, **model("s3://b/m", cache=CACHE))
    assert "initContainers" not in found
    assert "--model=demo" in found["containers"][0]["args"]


ADAPTERS = [
    {"name": "sql", "uri": "s3://adapters/sql"},
    {"name": "chat", "uri": "pvc://claim/chat"},
    {"name": "team/x", "uri": "file:///baked/in, by=hand"},
]


def loras(container):
    """Path by name of the adapters that vLLM is told of."""
    at = container["args"].index("--lora-modules")
    modules = [json.loads(word) for word in container["args"][at + 1 :] if word.startswith("{")]
    assert {module["base_model_name"] for module in modules} == {"demo"}
    return {module["name"]: module["path"] for module in modules}


def test_adapters_come_from_the_cache_from_volumes_and_from_the_image():
    found = pod(**model("hf://Qwen/Qwen3-8B", cache=CACHE, adapters=ADAPTERS))
    (engine,) = found["containers"]
    assert "--enable-lora" in engine["args"]
    assert "--max-loras=3" in engine["args"]
    assert [item["name"] for item in found["initContainers"]] == ["weights", "adapter-0"]
    paths = loras(engine)
    assert paths["sql"].startswith("/weights/s3-adapters-sql-")
    assert (paths["chat"], paths["team/x"]) == ("/adapters/1/chat", "/baked/in, by=hand")
    mounts = {item["mountPath"]: item["name"] for item in engine["volumeMounts"]}
    assert (mounts["/weights"], mounts["/adapters/1"]) == ("tidegate-weights", "tidegate-adapter-1")
    claim = named(found["volumes"], "tidegate-adapter-1")["persistentVolumeClaim"]
    assert claim == {"claimName": "claim", "readOnly": True}
    assert len({item["name"] for item in found["volumes"]}) == len(found["volumes"])


def test_vllm_downloads_adapters_too_where_there_is_no_cache():
    adapters = [{"name": "sql", "uri": "hf://o/sql"}]
    found = pod(**model("pvc://claim", secretRef={"name": "hub"}, adapters=adapters))
    (engine,) = found["containers"]
    assert loras(engine) == {"sql": "o/sql"}
    assert engine["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "initContainers" not in found


def test_a_node_pool_loads_the_adapters_that_it_names():
    found = test_render.body()["spec"]["nodePools"]
    found = [{**item, "adapters": ["chat"] if item["name"] == "a100" else []} for item in found]
    (engine,) = pod(nodePools=found, **model("hf://Qwen/Qwen3-8B", cache=CACHE, adapters=ADAPTERS))["containers"]
    assert loras(engine) == {"chat": "/adapters/0/chat"}
    every = test_render.manifests(nodePools=found, **model("hf://a/b", cache=CACHE, adapters=ADAPTERS))
    others = [item for item in every if item["kind"] == "Deployment" and "engine-a100" not in item["metadata"]["name"]]
    assert "--enable-lora" not in json.dumps(others)


def test_simulated_engines_serve_the_adapters_by_name():
    engine = {**test_render.body()["spec"]["engine"], "kind": "sim"}
    (container,) = pod(engine=engine, **model("hf://a/b", cache=CACHE, adapters=ADAPTERS))["containers"]
    assert [word for word in container["args"] if word.startswith("--adapter=")] == [
        "--adapter=sql", "--adapter=chat", "--adapter=team/x",
    ]  # fmt: skip


def test_downloads_can_pull_their_image_beside_the_engines_own_secrets():
    engine = {**test_render.body()["spec"]["engine"], "imagePullSecrets": [{"name": "own"}]}
    images = dataclasses.replace(test_render.IMAGES, pull_secrets=("registry", "own"))
    found = pod(engine=engine, images=images, **model("s3://b/m", cache=CACHE))
    assert sorted(item["name"] for item in found["imagePullSecrets"]) == ["own", "registry"]


SENTENCE = "s3://b/m is not there: correct the URI"
CRASHED = {
    "name": "weights", "restartCount": 1,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": f"WeightsNotFound: {SENTENCE}"}},
}  # fmt: skip
RUNNING = {"name": "weights", "state": {"running": {"startedAt": "2026-01-02T03:00:00Z"}}}
ENDED = {"name": "weights", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}


def engine_pod(name, container, node_pool="a"):
    return {
        "metadata": {
            "name": name, "creationTimestamp": "2026-01-02T03:00:00Z",
            "labels": {"tidegate.dev/pool": "chat", "tidegate.dev/node-pool": node_pool},
        },
        "spec": {"initContainers": [{"name": "weights"}]},
        "status": {"initContainerStatuses": [container] if container else []},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([RUNNING], {"state": "Downloading", "message": "45% of 1.0 GiB"}),
        ([ENDED], {"state": "Ready"}),
        ([{}], {"state": "Waiting"}),
        ([CRASHED], {"state": "Failed", "message": SENTENCE}),
        ([ENDED, RUNNING], {"state": "Downloading", "message": "45% of 1.0 GiB"}),
        ([ENDED, RUNNING, CRASHED], {"state": "Failed", "message": SENTENCE}),
    ],
)
def test_the_status_of_a_node_pool_is_that_of_its_least_advanced_pod(containers, expected):
    pods = [engine_pod(f"pod-{number}", container) for number, container in enumerate(containers)]
    lines = {f"pod-{number}": "45% of 1.0 GiB" for number in range(len(pods))}
    assert weight_status.of_pods(pods, lines) == {"a": expected}


async def test_downloads_of_adapters_show_too():
    one = engine_pod("a-1", ENDED)
    one["spec"]["initContainers"].append({"name": "adapter-0"})
    assert weight_status.of_pods([one]) == {"a": {"state": "Waiting"}}
    one["status"]["initContainerStatuses"].append(RUNNING | {"name": "adapter-0"})

    async def last_line(pod, container):
        return f"10% of {container}"

    lines = await weight_status.progress([one], last_line)
    assert weight_status.of_pods([one], lines) == {"a": {"state": "Downloading", "message": "10% of adapter-0"}}
    one["status"]["initContainerStatuses"][1] = CRASHED | {"name": "adapter-0"}
    assert weight_status.of_pods([one]) == {"a": {"state": "Failed", "message": SENTENCE}}


PODS = [
    engine_pod("a-2", RUNNING), engine_pod("a-1", RUNNING), engine_pod("a-0", ENDED), engine_pod("b-1", RUNNING, "b"),
]  # fmt: skip


async def test_one_log_is_read_for_each_node_pool_and_all_at_the_same_time():
    asked, both = [], asyncio.Event()

    async def last_line(pod, container):
        assert container == "weights"
        asked.append(pod)
        if len(asked) == 2:
            both.set()
        await both.wait()
        return f"line of {pod}"

    lines = await weight_status.progress(PODS, last_line)
    assert sorted(asked) == ["a-1", "b-1"]
    assert {name: item["message"] for name, item in weight_status.of_pods(PODS, lines).items()} == {
        "a": "line of a-1", "b": "line of b-1",
    }  # fmt: skip


async def test_a_kubelet_that_does_not_answer_hides_only_its_own_line():
    async def last_line(pod, container):
        return await asyncio.Event().wait() if pod == "a-1" else "45%"

    assert await weight_status.progress(PODS, last_line, timeout_s=0.01) == {"b-1": "45%"}


def test_a_failed_download_is_a_condition_with_its_sentence():
    conditions = pool_status.conditions(
        [],
        [],
        [engine_pod("pod", CRASHED)],
        needs=pool_status.Needs(components=("engine",), autoscaled=False, store={}),
        now=NOW,
    )
    (degraded,) = [each for each in conditions if each.type == "Degraded"]
    assert (degraded.status, degraded.reason) == (True, "WeightsNotFound")
    assert degraded.message == f"pod: WeightsNotFound: {SENTENCE}"


@pytest.mark.parametrize("reason", list(weight_report.Reason))
def test_an_edit_is_taken_back_at_once_only_when_another_attempt_cannot_help(reason):
    terminated = {"exitCode": 1, "message": f"{reason}: do this"}
    trouble = pod_trouble.of(engine_pod("pod", {**CRASHED, "lastState": {"terminated": terminated}}))
    assert (trouble.final_after_s == 0) == (reason in weight_report.LASTING)
    often = {**CRASHED, "restartCount": pod_trouble.CRASHES, "lastState": {"terminated": terminated}}
    assert pod_trouble.of(engine_pod("pod", often)).final_after_s == 0


def test_a_termination_message_of_another_program_is_no_reason():
    assert weight_report.parse("Segmentation fault: core dumped") is None
    assert weight_report.parse("") is None


@pytest.fixture
def silent_node(plane):
    """A node whose pods stay as the test states them, with a volume, and with a double of its kubelet for logs."""
    (port,) = background_processes.free_ports(1)
    name, lines = f"silent-{port}", {}

    class Kubelet(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            pod = self.path.partition("?")[0].split("/")[3]
            body = f"{lines.get(pod, '')}\n".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    crt, key = pki.certificate(plane.folder, name, subject="/CN=kubelet", names=["IP:127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Kubelet)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node = control_plane.fake_gpu_node(name, product="none", gpus=0)
    del node["metadata"]["annotations"]
    node["status"] |= {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"], "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/tmp"},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }  # fmt: skip
    for body in (node, volume):
        plane.kubectl("create", "-f", "-", stdin=json.dumps(body))
    yield SimpleNamespace(name=name, volume=name, lines=lines)
    plane.kubectl("delete", f"node/{name}", f"pv/{name}", "--wait=false")
    server.shutdown()
    server.server_close()


def test_downloads_show_in_the_status_of_a_pool(kubectl, operator, eventually, silent_node):
    pool = operator_doubles.pool(
        model={"name": "demo", "uri": "s3://models/qwen", "cache": {"claimName": "cache"}},
        engine={"kind": "vllm", "tolerations": [{"operator": "Exists"}]},
        nodePools=[{"name": "a", "gpus": 0, "nodeSelector": {"kubernetes.io/hostname": silent_node.name}}],
    )
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "cache"},
        "spec": {
            "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "", "volumeName": silent_node.volume,
        },
    }  # fmt: skip
    kubectl("create", "-f", "-", body=claim)
    kubectl("create", "-f", "-", body=pool)
    selector = "app.kubernetes.io/component=engine"

    def engine():
        items = json.loads(kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return next((item["metadata"]["name"] for item in items if "nodeName" in item["spec"]), None)

    name = eventually(engine)

    def report(container):
        patch = json.dumps({"status": {"initContainerStatuses": [{**IMAGE, **container}]}})
        kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    def weights():
        found = kubectl("get", "spool/chat", "-o", "jsonpath={.status.nodePools}")
        pools = json.loads(found) if found else []  # kubectl fails on an entry that is not there yet
        return pools[0].get("weights") if pools else None

    eventually(lambda: weights() == {"state": "Waiting"})
    silent_node.lines[name] = "45% of 15.2 GiB, 118.0 MiB/s"
    report(RUNNING)
    eventually(lambda: weights() == {"state": "Downloading", "message": silent_node.lines[name]})
    silent_node.lines[name] = "46% of 15.2 GiB, 118.0 MiB/s"
    eventually(lambda: weights() == {"state": "Downloading", "message": silent_node.lines[name]})
    report(CRASHED)
    eventually(lambda: weights() == {"state": "Failed", "message": SENTENCE})
    path = "jsonpath={.status.conditions[?(@.type=='Degraded')].reason}"
    eventually(lambda: kubectl("get", "spool/chat", "-o", path) == "WeightsNotFound")
    report(ENDED)
    eventually(lambda: weights() == {"state": "Ready"})


IMAGE = {"image": "x", "imageID": "x", "ready": False, "restartCount": 0}
