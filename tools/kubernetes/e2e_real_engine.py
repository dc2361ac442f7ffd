"""The steps of `e2e` with a real engine: vLLM's CPU build, with weights from an object store in the cluster."""

import json
import os
import pathlib
import shutil
import sysconfig

import e2e_cluster
from localkube import images

OBJECT_STORE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "operator" / "object_store.py"


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster, vllm: str) -> None:
    story.check("an object store with the weights of a model", lambda: start_store(cluster))
    story.check(
        "a pool with a real vLLM engine, whose weights come from it: ready", lambda: apply_real_pool(cluster, vllm)
    )
    story.check(
        "the weights are cached, and an engine that starts later downloads nothing", lambda: warm_start(cluster)
    )
    story.check("sensible text from the real model", lambda: real_chat(cluster))
    story.check("our scheduler runs inside vLLM, under the pool's policy", lambda: real_state(cluster))


def start_store(cluster: e2e_cluster.Cluster) -> str:
    """An S3-compatible store in a pod, which serves the demo model from this machine's disk."""
    store = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "store", "labels": {"app": "store"}},
        "spec": {
            "containers": [
                {
                    "name": "store",
                    "image": e2e_cluster.LOCAL_IMAGES[0],
                    "command": ["python", "-c", OBJECT_STORE.read_text(), "models/smollm2", "/model", "9000"],
                    "ports": [{"containerPort": 9000}],
                    "readinessProbe": {"tcpSocket": {"port": 9000}, "periodSeconds": 1},
                    "volumeMounts": [{"name": "model", "mountPath": "/model", "readOnly": True}],
                }
            ],
            "volumes": [{"name": "model", "hostPath": {"path": str(readable_model()), "type": "Directory"}}],
        },
    }
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", "-", stdin=json.dumps(store))
    cluster.kubectl("expose", "-n", e2e_cluster.WORK, "pod/store", "--port=9000")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "pod/store", "--for=condition=Ready", "--timeout=60s")
    return "s3://models/smollm2"


def weights_folder() -> pathlib.Path:
    """The cache: a folder of the node that is empty at first and that the user of the containers can write."""
    folder = images.folder().parent / "e2e-weights"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chown(folder, 65532, 65532)
    return folder


def apply_real_pool(cluster: e2e_cluster.Cluster, vllm: str) -> str:
    mounts: dict[str, pathlib.Path] = {}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if vllm == "mount":
        mounts["/vllm"], env["PYTHONPATH"] = pathlib.Path(sysconfig.get_path("purelib")), "/vllm"
    pool = {
        "apiVersion": "tidegate.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": "real"},
        "spec": {
            "model": {
                "name": "smollm2",
                "uri": "s3://models/smollm2",
                "endpoint": f"http://store.{e2e_cluster.WORK}.svc:9000",
                "cache": {"hostPath": str(weights_folder())},
                "maxModelLen": 2048,
            },
            "engine": {
                "kind": "vllm",
                "image": e2e_cluster.LOCAL_IMAGES[0] if vllm == "mount" else e2e_cluster.LOCAL_ENGINE,
                # In bfloat16 the demo model's answers depend on the CPU's instruction set.
                "args": ["--enforce-eager", "--max-num-seqs=8", "--dtype=float32"],
                "sharedMemory": "1Gi",
                "startupTimeout": "10m",
                "env": [{"name": name, "value": value} for name, value in env.items()],
                "volumes": [
                    {"name": path[1:], "hostPath": {"path": str(source), "type": "Directory"}}
                    for path, source in mounts.items()
                ],
                "volumeMounts": [{"name": path[1:], "mountPath": path, "readOnly": True} for path in mounts],
            },
            "nodePools": [{"name": "cpu", "gpus": 0}],
            "policy": {"mode": "fixed", "name": "edf", "interval": "2s"},
            "gateway": {"replicas": 1, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}},
        },
    }
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", "-", stdin=json.dumps(pool))
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready", "--timeout=420s")
    return cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool")


def warm_start(cluster: e2e_cluster.Cluster) -> str:
    """The pod that follows the first one finds the weights, though the store is gone."""
    path = "jsonpath={.status.nodePools[0].weights.state}"
    e2e_cluster.expect(
        cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool/real", "-o", path) == "Ready",
        "weights that are not ready",
    )
    cluster.kubectl("delete", "-n", e2e_cluster.WORK, "pod/store", "service/store", "--now")
    selector = "tidegate.dev/pool=real,app.kubernetes.io/component=engine"
    cluster.kubectl("delete", "-n", e2e_cluster.WORK, "pod", "-l", selector, "--now")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready=False", "--timeout=30s")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready", "--timeout=420s")
    lines = cluster.kubectl("logs", "-n", e2e_cluster.WORK, "-l", selector, "-c", "weights").strip()
    e2e_cluster.expect(lines.endswith("are in the cache") and "\n" not in lines, lines)
    return lines


def readable_model() -> pathlib.Path:
    """A copy of the demo model that every user of this machine can read: the container runs as an unprivileged user."""
    from tidegate_engine import checkpoints

    copy = images.folder().parent / "e2e-model"
    if not copy.exists():
        partial = copy.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoints.smollm2(), partial, copy_function=shutil.copyfile)
        partial.chmod(0o755)
        partial.rename(copy)
    return copy


def real_chat(cluster: e2e_cluster.Cluster) -> str:
    answer = e2e_cluster.ask(cluster, "chat", e2e_cluster.REAL_GATEWAY, "smollm2", "What is the capital of France?")
    e2e_cluster.expect(
        answer["status"] == 200 and "Paris" in answer["text"] and answer["streamed"] == answer["text"], answer
    )
    return json.dumps(answer)


def real_state(cluster: e2e_cluster.Cluster) -> str:
    e2e_cluster.wait_for(lambda: e2e_cluster.policies(cluster, "real") == {"edf"}, timeout_s=60)
    found = e2e_cluster.engine_states(cluster, "real")
    e2e_cluster.expect({(state["policy"], state["fallback"]) for state in found.values()} == {("edf", "")}, found)
    return json.dumps(found)
