"""Where pods run: accelerators, overrides of node pools, placement of gateways and of the store, trusted certificates."""

import json

import pytest
from localkube import control_plane

import operator_doubles
from tidegate_operator import node_pool_spec

from . import test_render

PRODUCTS = "requiredDuringSchedulingIgnoredDuringExecution"


def node_pool(**fields):
    return {"nodePools": [{**test_render.body()["spec"]["nodePools"][1], **fields}]}


def engine_pod(**changes):
    found = test_render.manifests(**changes)
    return test_render.pick(found, "Deployment", "chat-engine-a6000")["spec"]["template"]["spec"]


def limits(**fields):
    return engine_pod(**node_pool(**fields))["containers"][0]["resources"]["limits"]


def engine(**fields):
    return {"engine": {**test_render.body()["spec"]["engine"], **fields}}


@pytest.mark.parametrize(
    ("resource", "label"),
    [
        ("nvidia.com/gpu", "nvidia.com/gpu.product"),
        ("nvidia.com/mig-3g.40gb", "nvidia.com/gpu.product"),
        ("amd.com/gpu", "amd.com/gpu.product-name"),
        ("gpu.intel.com/xe", "gpu.intel.com/product"),
        ("google.com/tpu", "cloud.google.com/gke-tpu-accelerator"),
    ],
)
def test_each_resource_has_the_product_label_of_its_vendor(resource, label):
    fields = {"acceleratorResource": resource, "accelerator": "product-1", "tensorParallel": 1}
    pod = engine_pod(**node_pool(**fields))
    assert pod["containers"][0]["resources"]["limits"][resource] == "1"
    assert pod["nodeSelector"] == {label: "product-1"}


def test_a_pool_may_name_the_label_of_the_product():
    label = "cloud.google.com/gke-accelerator"
    pod = engine_pod(**node_pool(accelerator="nvidia-h100-80gb", acceleratorLabel=label))
    assert pod["nodeSelector"] == {label: "nvidia-h100-80gb"}


def test_an_engine_may_run_on_any_of_several_products():
    several = {**node_pool()["nodePools"][0], "accelerators": ["H100", "H200"]}
    del several["accelerator"]
    pod = engine_pod(nodePools=[several])
    (term,) = pod["affinity"]["nodeAffinity"][PRODUCTS]["nodeSelectorTerms"]
    assert term == {
        "matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["H100", "H200"]}]
    }
    assert "nodeSelector" not in pod


def test_products_narrow_every_term_of_the_affinity_in_the_spec():
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    affinity = {"nodeAffinity": {PRODUCTS: {"nodeSelectorTerms": zones}}, "podAntiAffinity": {}}
    several = {**node_pool()["nodePools"][0], "accelerators": ["H100", "H200"], "affinity": affinity}
    del several["accelerator"]
    found = engine_pod(nodePools=[several])["affinity"]
    terms = found["nodeAffinity"][PRODUCTS]["nodeSelectorTerms"]
    assert [[item["key"] for item in term["matchExpressions"]] for term in terms] == [
        ["zone", "nvidia.com/gpu.product"]
    ] * 2
    assert found["podAntiAffinity"] == {}


def test_an_engine_without_devices_ignores_the_product():
    assert "nodeSelector" not in engine_pod(**node_pool(gpus=0))


def test_a_node_pool_overrides_the_settings_of_all_engines():
    common = engine(
        image="common:1", args=["--common"], env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
        resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        tolerations=[{"operator": "Exists"}], nodeSelector={"zone": "a", "disk": "ssd"}, podAnnotations={"a": "1"},
        affinity={"podAffinity": {}}, priorityClassName="low", runtimeClassName="runc", serviceAccountName="common",
    )  # fmt: skip
    own = node_pool(
        image="own:1", args=["--own"], env=[{"name": "B", "value": "2"}, {"name": "C", "value": "2"}],
        resources={"requests": {"cpu": "4"}}, tolerations=[{"key": "gpu", "operator": "Exists"}],
        nodeSelector={"zone": "b"}, podAnnotations={"b": "2"}, affinity={"podAntiAffinity": {}},
        priorityClassName="high", runtimeClassName="nvidia", serviceAccountName="own", uri="hf://other/model",
    )  # fmt: skip
    found = test_render.manifests(**common, **own)
    template = test_render.pick(found, "Deployment", "chat-engine-a6000")["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert container["image"] == "own:1"
    assert container["args"][-2:] == ["--common", "--own"]
    assert container["args"][0] == "--model=other/model"
    assert (variables["A"], variables["B"], variables["C"]) == ("1", "2", "2")
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "1Gi"},
        "limits": {"cpu": "72", "memory": "2Gi", "nvidia.com/gpu": "8"},
    }
    assert pod["tolerations"] == [{"operator": "Exists"}, {"key": "gpu", "operator": "Exists"}]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-RTX-A6000", "zone": "b", "disk": "ssd"}
    assert template["metadata"]["annotations"] == {"a": "1", "b": "2"}
    assert pod["affinity"] == {"podAntiAffinity": {}}
    assert (pod["priorityClassName"], pod["runtimeClassName"], pod["serviceAccountName"]) == ("high", "nvidia", "own")


def test_a_node_pool_without_overrides_has_the_settings_of_all_engines():
    pod = engine_pod(**engine(priorityClassName="low", serviceAccountName="common", affinity={"podAffinity": {}}))
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("low", "common")
    assert pod["affinity"] == {"podAffinity": {}}
    assert engine_pod()["serviceAccountName"] == "chat-engine"


def test_settings_of_one_node_pool_leave_the_others_alone():
    first, second = test_render.body()["spec"]["nodePools"]
    found = test_render.manifests(nodePools=[first, {**second, "image": "own:1", "priorityClassName": "high"}])
    assert test_render.pick(found, "Deployment", "chat-engine-a100") == test_render.pick(
        test_render.manifests(), "Deployment", "chat-engine-a100"
    )


PLACEMENT = {
    "nodeSelector": {"role": "frontend"}, "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}}, "priorityClassName": "high",
}  # fmt: skip


def test_gateways_are_placed_and_annotated():
    placed = {**PLACEMENT, "podAnnotations": {"a": "1"}, "serviceAnnotations": {"lb": "internal"}}
    found = test_render.manifests(gateway={**test_render.body()["spec"]["gateway"], **placed})
    template = test_render.pick(found, "Deployment", "chat-gateway")["spec"]["template"]
    assert PLACEMENT.items() <= template["spec"].items()
    assert template["metadata"]["annotations"]["a"] == "1"
    assert "tidegate.dev/config-digest" in template["metadata"]["annotations"]
    assert test_render.pick(found, "Service", "chat-gateway")["metadata"]["annotations"] == {"lb": "internal"}
    assert "annotations" not in test_render.pick(found, "Service", "chat-gateway-internal")["metadata"]


def test_the_embedded_store_is_placed_and_annotated():
    found = test_render.manifests(state={"valkey": {"embedded": True, **PLACEMENT, "podAnnotations": {"a": "1"}}})
    template = test_render.pick(found, "StatefulSet", "chat-valkey")["spec"]["template"]
    assert PLACEMENT.items() <= template["spec"].items()
    assert template["metadata"]["annotations"] == {"a": "1"}


def test_engines_and_gateways_trust_the_certificates_of_the_bundle():
    found = test_render.manifests(caBundle={"configMapName": "company", "key": "ca.crt"})
    for name in ("chat-engine-a100", "chat-gateway"):
        pod = test_render.pick(found, "Deployment", name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = {item["name"]: item.get("value") for item in container["env"]}
        assert variables["SSL_CERT_FILE"] == "/etc/tidegate-ca/ca.crt"
        assert {"name": "ca-bundle", "mountPath": "/etc/tidegate-ca", "readOnly": True} in container["volumeMounts"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["ca-bundle"]["configMap"] == {
            "name": "company", "items": [{"key": "ca.crt", "path": "ca.crt"}]
        }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ['--speculative-config={"method": "ngram", "num_speculative_tokens": 4}'],
        ["--quantization=fp8", "--kv-cache-dtype=fp8"],
        ["--enable-lora", "--lora-modules", "sql=/adapters/sql"],
    ],
)
def test_settings_of_vllm_reach_the_engine_unchanged(arguments):
    container = engine_pod(**node_pool(args=arguments))["containers"][0]
    assert container["args"][-len(arguments) :] == arguments


@pytest.fixture
def mixed_nodes(plane):
    """Nodes with a MIG device, an AMD GPU and two products of NVIDIA, as their discovery labels them."""
    described = (
        ("mig-0", {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "nvidia.com/mig-3g.40gb"),
        ("amd-0", {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "amd.com/gpu"),
        ("h200-0", {"nvidia.com/gpu.product": "NVIDIA-H200"}, "nvidia.com/gpu"),
        ("l40s-0", {"nvidia.com/gpu.product": "NVIDIA-L40S"}, "nvidia.com/gpu"),
    )
    for name, labels, resource in described:
        node = control_plane.fake_gpu_node(name, product="none", gpus=0)
        del node["metadata"]["labels"]["nvidia.com/gpu.product"]
        node["metadata"]["labels"] |= labels
        node["status"]["capacity"] |= {resource: "2"}
        plane.kubectl("apply", "-f", "-", stdin=json.dumps(node))
    yield
    plane.kubectl("delete", "node", *(name for name, *_ in described))


def test_engines_run_on_nodes_with_their_products(mixed_nodes, kubectl, operator, eventually):
    pool = operator_doubles.pool(
        engine={"kind": "vllm"},
        nodePools=[
            {"name": "mig", "acceleratorResource": "nvidia.com/mig-3g.40gb", "accelerator": "NVIDIA-H100-80GB-HBM3"},
            {"name": "amd", "acceleratorResource": "amd.com/gpu", "accelerator": "AMD_Instinct_MI300X_OAM"},
            {"name": "either", "accelerators": ["NVIDIA-H200", "NVIDIA-B200"], "replicas": 2},
        ],
    )
    kubectl("create", "-f", "-", body=pool)
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    path = r"{range .items[*]}{.metadata.labels.tidegate\.dev/node-pool} {.spec.nodeName}{'\n'}{end}"
    selector = "app.kubernetes.io/component=engine"
    lines = kubectl("get", "pods", "-l", selector, "-o", f"jsonpath={path}").splitlines()
    assert sorted(line for line in lines if line.strip()) == [
        "amd amd-0", "either h200-0", "either h200-0", "mig mig-0",
    ]  # fmt: skip


def test_every_known_resource_needs_no_label(plane):
    for start in node_pool_spec.PRODUCT_LABELS:
        resource = start if start.endswith("tpu") else f"{start}gpu"
        pool = operator_doubles.pool(nodePools=[{"name": "a", "accelerator": "x", "acceleratorResource": resource}])
        said = plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pool), check=False)
        assert "created" in said


STORED_STORE = {"embedded": True, "affinity": {"nodeAffinity": {"a": [1]}}, "tolerations": [{"operator": "Exists"}]}


@pytest.mark.parametrize(
    "change",
    [
        {"affinity": {"nodeAffinity": {"a": [2]}}},
        {"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]},
        {"nodeSelector": {"zone": "a"}},
        {"podAnnotations": {"a": "b"}},
        {"priorityClassName": "high"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_store_without_a_volume_cannot_move(kubectl, change):
    kubectl("create", "-f", "-", body=operator_doubles.pool(state={"valkey": STORED_STORE}))
    moved = operator_doubles.pool(state={"valkey": STORED_STORE | change})
    assert "cannot change while the store has no volume" in kubectl("replace", "-f", "-", body=moved, check=False)
    assert "replaced" in kubectl("replace", "-f", "-", body=operator_doubles.pool(state={"valkey": STORED_STORE}))


def test_a_store_with_a_volume_can_move(kubectl):
    volume = {"embedded": True, "storage": {"size": "1Gi"}}
    kubectl("create", "-f", "-", body=operator_doubles.pool(state={"valkey": volume}))
    moved = operator_doubles.pool(state={"valkey": {**volume, "nodeSelector": {"zone": "a"}}})
    assert "replaced" in kubectl("replace", "-f", "-", body=moved)
