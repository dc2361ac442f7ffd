"""What the API server itself makes of a ServingPool: schema, defaults, rules, columns. No operator runs here."""

import json
import pathlib

import pytest
import yaml

import operator_doubles
from tidegate_operator import spec, spec_problems
from tidegate_policy import policies
from tidegate_policy.steer import selectors
from tidegate_sim import engine_double

from . import conftest

EXAMPLE = pathlib.Path(__file__).parent / "golden" / "chat.yaml"


def test_the_chart_carries_the_same_bytes():
    root = pathlib.Path(__file__).parents[2]
    name = "servingpools.tidegate.dev.yaml"
    assert (root / "helm/tidegate/files" / name).read_bytes() == (root / "crds" / name).read_bytes()


def test_every_field_has_a_description():
    crd = yaml.safe_load((pathlib.Path(__file__).parents[2] / "crds/servingpools.tidegate.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert list(undescribed(schema, "")) == [".metadata"]


def test_the_schema_allows_the_speeds_that_simulated_engines_accept():
    speed = schema_of_spec()["properties"]["engine"]["properties"]["simSpeed"]
    assert (speed["minimum"], speed["maximum"]) == (1, engine_double.FASTEST)
    assert spec_problems.SIM_SPEED == (engine_double.SLOWEST, engine_double.FASTEST)


def test_the_schema_allows_every_selector_and_no_other():
    crd = yaml.safe_load((pathlib.Path(__file__).parents[2] / "crds/servingpools.tidegate.dev.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["properties"]["policy"]["properties"]["selector"]["enum"] == list(selectors.SELECTORS)


def undescribed(schema, path):
    for name, field in schema.get("properties", {}).items():
        if not isinstance(field.get("description"), str) or None in field.values():
            yield f"{path}.{name}"
        yield from undescribed(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from undescribed(schema[key], f"{path}[]")


def test_kubectl_explain_prints_the_purpose_of_a_field(kubectl):
    assert "The store of workflows and backlogs." in kubectl("explain", "spool.spec")
    assert "A duration such as 60ms" in kubectl("explain", "spool.spec.classes.ttft")


def test_the_documented_example_is_accepted_with_these_defaults(kubectl, golden):
    kubectl("create", "-f", str(EXAMPLE))
    stored = yaml.safe_load(kubectl("get", "spool", "chat", "-o", "yaml"))
    golden("chat.stored.yaml", {"spec": stored["spec"]})


def test_a_pool_without_a_beta_gets_the_measured_default(kubectl):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert kubectl("get", "spool", "chat", "-o", "jsonpath={.spec.gateway.dispatch.beta}") == "300"


def test_the_api_server_accepts_a_dispatch_rule_that_this_version_does_not_know(kubectl):
    body = operator_doubles.pool(gateway={"dispatch": {"rule": "of-tomorrow"}})
    assert "created" in kubectl("create", "--dry-run=server", "-f", "-", body=body)


def test_the_resource_is_in_its_category_and_has_its_columns(kubectl):
    kubectl("create", "-f", "-", body=operator_doubles.pool("listed"))
    head, row = kubectl("get", "tidegate").splitlines()
    assert head.split() == [
        "NAME", "READY", "AVAILABLE", "MODEL", "POLICY", "ENGINES", "GATEWAYS", "SLO", "ALPHA", "AGE",
    ]  # fmt: skip
    assert row.startswith("listed")


def node_pool(**fields):
    return {"nodePools": [{"name": "a", **fields}]}


def stages(*items):
    return {"workflows": [{"name": "w", "stages": list(items)}]}


def parameters(*items):
    return {"policy": {"parameters": [{"policy": "two-lane", "name": "threshold_s", **item} for item in items]}}


def schema_of_spec():
    crd = yaml.safe_load((pathlib.Path(__file__).parents[2] / "crds/servingpools.tidegate.dev.yaml").read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


DURATION = "write a duration with a unit"

BAD_EDITS = {
    "min above max": (node_pool(replicas=3, minReplicas=3, maxReplicas=2), "replicas is more than maxReplicas: lower it"),
    "replicas above max": (node_pool(replicas=3, maxReplicas=2), "replicas is more than maxReplicas: lower it"),
    "replicas below min": (node_pool(minReplicas=2), "is less than minReplicas: raise it"),
    "total above all maxima": (
        {"replicas": 5, **node_pool(maxReplicas=4)}, "more than all spec.nodePools[].maxReplicas together: lower it",
    ),
    "total below all minima": (
        {"replicas": 1, **node_pool(replicas=2, minReplicas=2)},
        "less than all spec.nodePools[].minReplicas together: raise it",
    ),
    "a name that no Service could have": ({"nodePools": [{"name": "A_1"}]}, "write a name of lower-case letters"),
    "two node pools of one name": ({"nodePools": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    "two classes of one name": ({"classes": [{"name": "x"}, {"name": "x"}]}, "Duplicate value"),
    "an adapter with the name of the model": (
        {"model": {"name": "demo", "adapters": [{"name": "demo", "uri": "file:///a"}]}},
        "an adapter has the name of the model: give it another one",
    ),
    "an adapter from a store without a cache": (
        {"model": {"name": "demo", "adapters": [{"name": "sql", "uri": "s3://adapters/sql"}]}}, "add spec.model.cache",
    ),
    "a revision of an adapter without a cache": (
        {"model": {"name": "demo", "adapters": [{"name": "sql", "uri": "hf://o/sql@v2"}]}}, "add spec.model.cache",
    ),
    "an adapter whose name no request can have": (
        {"model": {"name": "demo", "adapters": [{"name": "a b", "uri": "file:///a"}]}}, "write an adapter's name",
    ),
    "two adapters of one name": (
        {"model": {"name": "demo", "adapters": [{"name": "a", "uri": "file:///a"}] * 2}}, "Duplicate value",
    ),
    "fewer GPUs than tensor-parallel parts": (
        node_pool(gpus=2, tensorParallel=4),
        "gpus is less than tensorParallel: each part of the model needs a GPU of its own",
    ),
    "GPUs by number and by claim": (
        node_pool(gpus=1, resourceClaimTemplateName="gpu"), "remove one of them",
    ),
    "an accelerator that is no label": (
        node_pool(accelerator="NVIDIA A100"),
        "write the value of the node label of the product (nvidia.com/gpu.product by default)",
    ),
    "one product and several": (
        node_pool(accelerator="NVIDIA-H200", accelerators=["NVIDIA-H100"]), "write all products into accelerators",
    ),
    "a resource without a domain": (
        node_pool(acceleratorResource="gpu"), "write the name of a resource with its domain, such as nvidia.com/gpu",
    ),
    "a product of a device without a known label": (
        node_pool(accelerator="gaudi2", acceleratorResource="habana.ai/gaudi"),
        "write the label into acceleratorLabel, or use nodeSelector",
    ),
    "a label without a product": (
        node_pool(acceleratorLabel="nvidia.com/gpu.product"), "add one of them, or remove the label",
    ),
    "a label that cannot be one": (
        node_pool(accelerator="x", acceleratorLabel="a b"), "write the name of a node label, such as",
    ),
    "parts of a model on MIG devices": (
        node_pool(acceleratorResource="nvidia.com/mig-3g.40gb", tensorParallel=2),
        "MIG devices cannot share one copy of the model: write tensorParallel: 1",
    ),
    "a resource beside a claim": (
        node_pool(acceleratorResource="amd.com/gpu", resourceClaimTemplateName="gpu"), "remove one of them",
    ),
    "a toleration with an unknown effect": (
        node_pool(tolerations=[{"key": "a", "effect": "noschedule"}]), "write NoSchedule, PreferNoSchedule or NoExecute",
    ),
    "a toleration with an unknown operator": (
        node_pool(tolerations=[{"key": "a", "operator": "In"}]), "write Exists or Equal",
    ),
    "a toleration of nothing": (
        {"gateway": {"tolerations": [{"effect": "NoSchedule"}]}}, "a toleration without a key needs operator: Exists",
    ),
    "a toleration of every value and of one": (
        {"engine": {"kind": "sim", "tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
        "operator: Exists takes no value: remove the value",
    ),
    "a time for a taint that evicts nothing": (
        node_pool(tolerations=[{"key": "a", "operator": "Exists", "tolerationSeconds": 5}]),
        "tolerationSeconds applies to effect: NoExecute only",
    ),
    "an affinity that does not exist": (
        {"gateway": {"affinity": {"nodeAffinty": {}}}}, 'unknown field "spec.gateway.affinity.nodeAffinty"',
    ),
    "a place for a store that runs elsewhere": (
        {"state": {"valkey": {"url": "redis://x", "nodeSelector": {"a": "b"}}}},
        "are of the embedded store: remove them, because the store at url runs elsewhere",
    ),
    "resources of a store that runs elsewhere": (
        {"state": {"valkey": {"url": "redis://x", "resources": {"limits": {"memory": "1Gi"}}}}},
        "are of the embedded store: remove them",
    ),
    "a profile that is no name": (node_pool(profile="A100 TP8"), "write the name of a cost profile"),
    "a node label that cannot be": (node_pool(nodeSelector={"zone": "a b"}), "write a label's value"),
    "a weight of nothing": ({"classes": [{"name": "x", "weight": 0}]}, "should be greater than or equal to 1"),
    "a body above all sense": ({"gateway": {"limits": {"body": "2Gi"}}}, "write a size of at most 1Gi"),
    "a body that is no size": ({"gateway": {"limits": {"body": "much"}}}, "write a size of at most 1Gi"),
    "rows from a file": ({"gateway": {"relQueries": {"rowsUrls": ["file:///etc"]}}}, "write an address that starts with"),
    "a timeout without a unit": ({"gateway": {"timeouts": {"answer": "600"}}}, DURATION),
    "a model's address without a scheme": (
        {"policy": {"llm": {"url": "llm.example.com"}}}, "write the base address of an OpenAI-compatible API",
    ),
    "a duration without a unit": ({"classes": [{"name": "x", "ttft": "60"}]}, DURATION),
    "a duration of zero": ({"classes": [{"name": "x", "ttft": "0s"}]}, "more than 0"),
    "a duration of years": ({"classes": [{"name": "x", "deadline": "9000h"}]}, "at most 168h"),
    "a first token later than the last": (
        {"classes": [{"name": "x", "ttft": "9s", "deadline": "8s"}]},
        "ttft is longer than deadline: the first token cannot",
    ),
    "an unknown default class": (
        {"gateway": {"defaultClass": "y"}, "classes": [{"name": "x"}]}, "not one of spec.classes: add the class",
    ),
    "keys of an issuer over plain text": (
        {"gateway": {"auth": {"jwt": {"issuer": "x", "audience": "x", "jwksUrl": "http://login.example/keys"}}}},
        "write an address that starts with https://",
    ),
    "a class with a space in its name": ({"classes": [{"name": "my class"}]}, "write a name of letters, digits"),
    "an urgency that does not exist": ({"tenants": [{"name": "t", "maxUrgency": 5}]}, "should be less than or equal to 4"),
    "after a stage that is not there": (
        stages({"name": "a", "after": ["b"]}),
        "must name other stages of the same workflow: add",
    ),
    "after itself": (stages({"name": "a", "after": ["a"]}), "must name other stages"),
    "fixed without a name": ({"policy": {"mode": "fixed"}}, "policy.name is required with mode: fixed"),
    "a name without fixed": ({"policy": {"name": "edf"}}, "policy.name is required with mode: fixed"),
    "an unknown policy": (
        {"policy": {"mode": "fixed", "name": "magic"}},
        "there is no such policy; this version has augmented,",
    ),
    "an unknown policy among the allowed": (
        {"policy": {"allow": ["edf", "magic"]}},
        "there is no such policy; this version has",
    ),
    "a parameter of an unknown policy": (parameters({"policy": "magic", "value": "1"}), "there is no such policy"),
    "a policy parameter that is no decimal": (parameters({"value": "half"}), "write a decimal number"),
    "two values of one policy parameter": (parameters({"value": "1"}, {"value": "2"}), "Duplicate value"),
    "an interval shorter than engines can report in": ({"policy": {"interval": "200ms"}}, "from 1s to 10m, such as 30s"),
    "an interval longer than engines can report in": ({"policy": {"interval": "11m"}}, "from 1s to 10m, such as 30s"),
    "a dwell of nothing": ({"policy": {"dwell": "10ms"}}, "from 1s to 24h"),
    "a rollback window of a day": ({"policy": {"rollback": {"window": "24h"}}}, "from 2s to 1h"),
    "a rollback below one": ({"policy": {"rollback": {"rho": 0.5}}}, "should be greater than or equal to 1"),
    "embedded and url": (
        {"state": {"valkey": {"embedded": True, "url": "redis://x"}}},
        "exactly one of embedded: true and url",
    ),
    "neither embedded nor url": ({"state": {"valkey": {"embedded": False}}}, "exactly one of embedded: true and url"),
    "a url with a password in it": (
        {"state": {"valkey": {"url": "redis://:secret@x"}}},
        "the password comes from secretRef",
    ),
    "a password without a url": (
        {"state": {"valkey": {"embedded": True, "secretRef": {"name": "s"}}}}, "secretRef requires url: the embedded store",
    ),
    "a volume of an existing store": (
        {"state": {"valkey": {"url": "redis://x", "storage": {"size": "1Gi"}}}},
        "storage requires embedded: true; remove storage",
    ),
    "a volume of no size": (
        {"state": {"valkey": {"embedded": True, "storage": {"size": "big"}}}},
        "write a size, such as 1Gi",
    ),
    "alpha above one": ({"gateway": {"dispatch": {"alpha": "1.5"}}}, "write auto, or a number from 0 to 1"),
    "a dispatch rule that cannot be a name": (
        {"gateway": {"dispatch": {"rule": "Magic!"}}},
        "write the name of a dispatch rule",
    ),
    "a scale of nothing": ({"gateway": {"dispatch": {"beta": 0}}}, "should be greater than or equal to 1"),
    "spans to no address": ({"gateway": {"tracing": {"endpoint": "otel:4317"}}}, "write the address of an OTLP collector"),
    "a drain of days": ({"gateway": {"drainTimeout": "48h"}}, "from 1s to 2h"),
    "simSpeed of a real engine": (
        {"engine": {"kind": "vllm", "simSpeed": 2}},
        "simSpeed applies to kind: sim only; remove it",
    ),
    "a simSpeed that no engine takes": ({"engine": {"kind": "sim", "simSpeed": 1001}}, "less than or equal to 1000"),
    "a quantity that is none": (
        {"engine": {"kind": "sim", "resources": {"requests": {"cpu": "four"}}}},
        "write a quantity, such as 500m, 4 or 16Gi",
    ),
    "shared memory in words": ({"engine": {"kind": "sim", "sharedMemory": "8 GB"}}, "write a size, such as 8Gi"),
    "a size of the time before quantities": (
        {"engine": {"kind": "vllm", "offloadGiB": 64}}, "write offload: 64Gi in place of offloadGiB: 64",
    ),
    "an offload in a few bytes": ({"engine": {"kind": "vllm", "offload": 64}}, "a size of at least 1Gi, such as 64Gi"),
    "an offload in words": ({"engine": {"kind": "vllm", "offload": "64 GB"}}, "a size of at least 1Gi, such as 64Gi"),
    "a start in bare seconds": ({"engine": {"kind": "sim", "startupTimeout": "600"}}, "from 10s to 24h, such as 20m"),
    "a mount of no volume": (
        {"engine": {"kind": "sim", "volumeMounts": [{"name": "models", "mountPath": "/m"}]}},
        "every volumeMount must name one of spec.engine.volumes: add the volume",
    ),
    "a variable with two values": (
        {"engine": {"kind": "sim", "env": [{"name": "A", "value": "b", "valueFrom": {}}]}},
        "exclude each other: remove one",
    ),
    "weights from nowhere": (
        {"model": {"name": "demo", "uri": "ftp://host/model"}},
        "write hf://OWNER/NAME, s3://BUCKET/FOLDER, oci://IMAGE, pvc://CLAIM/FOLDER",
    ),
    "weights above a folder": (
        {"model": {"name": "demo", "uri": "hostpath:///models/../etc"}}, "write the folder without . and ..",
    ),
    "weights above the folder of an image": (
        {"model": {"name": "demo", "uri": "oci://image#.."}}, "write the folder without . and ..",
    ),
    "weights in no folder of the node": (
        {"model": {"name": "demo", "uri": "hostpath:////"}}, "hostpath:///FOLDER or file:///FOLDER",
    ),
    "weights in no folder of the container": (
        {"model": {"name": "demo", "uri": "file:///"}}, "hostpath:///FOLDER or file:///FOLDER",
    ),
    "a bucket without a cache": (
        {"model": {"name": "demo", "uri": "s3://bucket/model"}}, "weights from s3:// need a cache: add spec.model.cache",
    ),
    "a bucket of a node pool without a cache": (
        node_pool(uri="s3://bucket/model"), "weights from s3:// need a cache: add spec.model.cache",
    ),
    "a cache of nothing": (
        {"model": {"name": "demo", "cache": {"claimName": "c"}}}, "add spec.model.uri, such as hf://OWNER/NAME",
    ),
    "a cache at two places": (
        {"model": {"name": "demo", "uri": "hf://a/b", "cache": {"claimName": "c", "hostPath": "/c"}}},
        "exactly one of claimName and hostPath",
    ),
    "a cache at no place": (
        {"model": {"name": "demo", "uri": "hf://a/b", "cache": {}}}, "exactly one of claimName and hostPath",
    ),
    "a cache in a folder that is not absolute": (
        {"model": {"name": "demo", "uri": "hf://a/b", "cache": {"hostPath": "cache"}}},
        "write an absolute folder of the node",
    ),
    "a download of seconds": (
        {"model": {"name": "demo", "uri": "hf://a/b", "cache": {"claimName": "c", "downloadTimeout": "5s"}}},
        "write a duration with a unit from 1m to 48h",
    ),
    "an endpoint with a password": (
        {"model": {"name": "demo", "uri": "hf://a/b", "endpoint": "https://me:secret@host"}},
        "credentials come from secretRef",
    ),
    "a model's name with a space": ({"model": {"name": "my model"}}, "write a model's name"),
    "a field that does not exist": ({"engine": {"kind": "sim", "imagge": "x"}}, 'unknown field "spec.engine.imagge"'),
}  # fmt: skip
"""Each is refused with a sentence that says what to do."""

MALFORMED = {
    "no node pool": ({"nodePools": []}, "should have at least 1 items"),
    "a workflow without stages": (stages(), "should have at least 1 items"),
    "a policy parameter that is no string": (parameters({"value": 0.5}), "must be of type string"),
    "a policy parameter without a value": (parameters({}), "value: Required"),
    "a cost that is negative": (node_pool(costWeight="-1"), "should match"),
    "a weight in words": ({"tenants": [{"name": "x", "weight": "heavy"}]}, "should match"),
    "a weight that is a float": ({"classes": [{"name": "x", "weight": 0.5}]}, "must be of type integer"),
    "a mount without a path": ({"engine": {"kind": "sim", "volumeMounts": [{"name": "m"}]}}, "mountPath: Required"),
    "a kind of engine that does not exist": ({"engine": {"kind": "triton"}}, 'supported values: "vllm", "sim"'),
    "a rollback in words": ({"policy": {"rollback": {"rho": "much"}}}, "should match"),
    "a model without a name": ({"model": {}}, "spec.model.name: Required"),
}
"""Each is refused by the structure of the schema, in the API server's own words."""

NOISE = ("some validation rules were not checked", "rule evaluation error", "should match", '"object"', "no such key")


def refusal(plane, fields):
    body = json.dumps(operator_doubles.pool(**fields))
    return plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=body, check=False)


@pytest.mark.parametrize("what", BAD_EDITS)
def test_a_bad_edit_is_refused_with_a_sentence_that_says_what_to_do(plane, what):
    fields, message = BAD_EDITS[what]
    said = refusal(plane, fields)
    assert message in said
    assert [noise for noise in NOISE if noise in said] == []
    assert len(said.strip().splitlines()) == 1, said


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_edit_is_refused(plane, what):
    fields, message = MALFORMED[what]
    assert message in refusal(plane, fields)


def test_the_schema_names_the_policies_of_this_version():
    properties = schema_of_spec()["properties"]["policy"]["properties"]
    (rule,) = properties["name"]["x-kubernetes-validations"]
    assert rule["message"] == f"there is no such policy; this version has {', '.join(sorted(policies.POLICIES))}"
    assert rule["rule"] == f"self in {sorted(policies.POLICIES)}"


def test_numbers_are_integers_quantities_or_decimal_strings(kubectl):
    body = operator_doubles.pool(
        engine={"kind": "sim", "simSpeed": "0.5", "sharedMemory": "512Mi"},
        classes=[{"name": "x", "weight": "0.5"}],
        policy={"rollback": {"rho": "1.5"}},
        gateway={"dispatch": {"alpha": 1, "beta": "0.5"}},
        nodePools=[{"name": "a", "costWeight": "0.4"}],
    )
    kubectl("create", "-f", "-", body=body)
    pool = spec.parse(json.loads(kubectl("get", "spool/chat", "-o", "json")), conftest.RULES.known)
    assert (pool.engine.sim_speed, pool.engine.shared_memory) == (0.5, "512Mi")
    assert (pool.classes[0]["weight"], pool.node_pools[0].cost_weight) == (0.5, 0.4)
    assert (pool.steering.rollback_rho, pool.gateway.alpha, pool.gateway.beta) == (1.5, 1.0, 0.5)


STORAGE = {"size": "1Gi", "className": "fast"}


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        pytest.param(None, "cannot be added or removed", id="no volume any more"),
        pytest.param(
            {**STORAGE, "size": "2Gi"}, "enlarge the volume by editing the store's PersistentVolumeClaim", id="size"
        ),
        pytest.param({**STORAGE, "className": "slow"}, "a volume keeps its StorageClass", id="class"),
    ],
)
def test_a_change_of_the_stores_volume_is_refused_at_once(kubectl, storage, message):
    def pool(storage):
        return operator_doubles.pool(state={"valkey": {"embedded": True, **({"storage": storage} if storage else {})}})

    kubectl("create", "-f", "-", body=pool(STORAGE))
    said = kubectl("replace", "-f", "-", body=pool(storage), check=False)
    assert message in said
    assert [noise for noise in NOISE if noise in said] == []
    assert "replaced" in kubectl("replace", "-f", "-", body=pool({**STORAGE, "size": "1024Mi"}))


def test_the_api_server_rejects_a_name_that_is_too_long_for_services(kubectl):
    said = kubectl("create", "--dry-run=server", "-f", "-", body=operator_doubles.pool("a" * 31), check=False)
    assert "at most 30 characters" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model": {"name": "other"}}, "spec.model.name cannot change", id="the model's name"),
        pytest.param({"engine": {"kind": "vllm"}}, "spec.engine.kind cannot change", id="the kind of engine"),
        pytest.param(
            {"state": {"valkey": {"url": "redis://x"}}}, "cannot change between embedded and url", id="the store"
        ),
    ],
)
def test_immutable_fields_cannot_change(kubectl, change, message):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert message in kubectl("replace", "-f", "-", body=operator_doubles.pool(**change), check=False)
