"""What the API server itself makes of a ServingPool: schema, defaults, rules, columns. No operator runs here."""

import json
import pathlib

import pytest
import yaml

from tidegate_operator import operator_doubles
from tidegate_policy.steer import selectors
from tidegate_sim import engine_double

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
    crd = yaml.safe_load((pathlib.Path(__file__).parents[2] / "crds/servingpools.tidegate.dev.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    speed = spec["properties"]["engine"]["properties"]["simSpeed"]
    assert (speed["minimum"], speed["maximum"]) == (engine_double.SLOWEST, engine_double.FASTEST)


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
    assert head.split() == ["NAME", "READY", "AVAILABLE", "POLICY", "ENGINES", "SLO", "ALPHA", "AGE"]
    assert row.startswith("listed")


def node_pool(**fields):
    return {"nodePools": [{"name": "a", **fields}]}


def stages(*items):
    return {"workflows": [{"name": "w", "stages": list(items)}]}


def parameters(*items):
    return {"policy": {"parameters": [{"policy": "two-lane", "name": "threshold_s", **item} for item in items]}}


REJECTED = {
    "min above max": (node_pool(replicas=3, minReplicas=3, maxReplicas=2), "minReplicas is more than maxReplicas"),
    "replicas above max": (node_pool(replicas=3, maxReplicas=2), "replicas is more than maxReplicas"),
    "replicas below min": (node_pool(minReplicas=2), "replicas is less than minReplicas"),
    "total above all maxima": ({"replicas": 5, **node_pool(maxReplicas=4)}, "more than all spec.nodePools[].maxReplicas"),
    "total below all minima": ({"replicas": 1, **node_pool(replicas=2, minReplicas=2)}, "less than all spec.nodePools[]"),
    "no node pool": ({"nodePools": []}, "should have at least 1 items"),
    "two node pools of one name": ({"nodePools": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    "a name that no Service could have": ({"nodePools": [{"name": "A_1"}]}, "should match"),
    "two classes of one name": ({"classes": [{"name": "x"}, {"name": "x"}]}, "Duplicate value"),
    "a duration without a unit": ({"classes": [{"name": "x", "ttft": "60"}]}, "should match"),
    "a duration of zero": ({"classes": [{"name": "x", "ttft": "0s"}]}, "must be more than 0"),
    "a duration of years": ({"classes": [{"name": "x", "deadline": "9000h"}]}, "at most 168h"),
    "an unknown default class": ({"gateway": {"defaultClass": "y"}, "classes": [{"name": "x"}]}, "not one of spec.classes"),
    "an urgency that does not exist": ({"tenants": [{"name": "t", "maxUrgency": 5}]}, "less than or equal to 4"),
    "after a stage that is not there": (stages({"name": "a", "after": ["b"]}), "must name other stages"),
    "after itself": (stages({"name": "a", "after": ["a"]}), "must name other stages"),
    "a workflow without stages": (stages(), "should have at least 1 items"),
    "fixed without a name": ({"policy": {"mode": "fixed"}}, "policy.name is required with mode: fixed"),
    "a name without fixed": ({"policy": {"name": "edf"}}, "policy.name is required with mode: fixed"),
    "embedded and url": ({"state": {"valkey": {"embedded": True, "url": "redis://x"}}}, "exactly one of embedded"),
    "neither embedded nor url": ({"state": {"valkey": {"embedded": False}}}, "exactly one of embedded"),
    "an interval shorter than engines can report in": ({"policy": {"interval": "200ms"}}, "must be from 1s to 10m"),
    "an interval longer than engines can report in": ({"policy": {"interval": "11m"}}, "must be from 1s to 10m"),
    "a dwell of nothing": ({"policy": {"dwell": "10ms"}}, "must be from 1s to 24h"),
    "a rollback window of a day": ({"policy": {"rollback": {"window": "24h"}}}, "must be from 2s to 1h"),
    "a url with a password in it": ({"state": {"valkey": {"url": "redis://:secret@x"}}}, "should match"),
    "a password without a url": (
        {"state": {"valkey": {"embedded": True, "secretRef": {"name": "s"}}}}, "secretRef requires url",
    ),
    "alpha above one": ({"gateway": {"dispatch": {"alpha": "1.5"}}}, "should match"),
    "a dispatch rule that cannot be a name": ({"gateway": {"dispatch": {"rule": "Magic!"}}}, "should match"),
    "a policy parameter that is no string": (parameters({"value": 0.5}), "must be of type string"),
    "a policy parameter that is no decimal": (parameters({"value": "half"}), "should match"),
    "a policy parameter without a value": (parameters({}), "value: Required"),
    "two values of one policy parameter": (parameters({"value": "1"}, {"value": "2"}), "Duplicate value"),
    "spans to no address": ({"gateway": {"tracing": {"endpoint": "otel:4317"}}}, "should match"),
    "simSpeed of a real engine": ({"engine": {"kind": "vllm", "simSpeed": 2}}, "applies to kind: sim only"),
    "a simSpeed that no engine takes": ({"engine": {"kind": "sim", "simSpeed": 1001}}, "less than or equal to 1000"),
    "a field that does not exist": ({"engine": {"kind": "sim", "imagge": "x"}}, 'unknown field "spec.engine.imagge"'),
    "fewer GPUs than tensor-parallel parts": (node_pool(gpus=2, tensorParallel=4), "gpus is less than tensorParallel"),
    "a quantity that is none": ({"engine": {"kind": "sim", "resources": {"requests": {"cpu": "four"}}}}, "should match"),
    "a first token later than the last": (
        {"classes": [{"name": "x", "ttft": "9s", "deadline": "8s"}]}, "ttft is longer than deadline",
    ),
    "a mount of no volume": (
        {"engine": {"kind": "sim", "volumeMounts": [{"name": "models", "mountPath": "/m"}]}},
        "every volumeMount must name one of spec.engine.volumes",
    ),
    "a model without a name": ({"model": {}}, "spec.model.name: Required"),
}  # fmt: skip


@pytest.mark.parametrize("what", REJECTED)
def test_the_api_server_rejects_an_invalid_spec(plane, what):
    fields, message = REJECTED[what]
    body = json.dumps(operator_doubles.pool(**fields))
    assert message in plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=body, check=False)


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
