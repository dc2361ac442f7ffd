"""A pool behind a Gateway of the cluster: what the operator writes, on a real API server with these kinds."""

import dataclasses
import datetime
import pathlib

import pytest
import yaml

import operator_doubles
from tidegate_gateway import gateway_settings
from tidegate_operator import cluster, objects, reconcile, render, replica_allocation, spec, spec_problems
from tidegate_operator.cluster import api_server

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
KINDS = pathlib.Path(__file__).parent / "gateway_api_kinds.yaml"
GROUPS = ("gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1", "llm-d.ai/v1alpha2")
PLURALS = "httproutes,inferencepools,inferenceobjectives"
API = {"parentRef": {"name": "edge", "namespace": "gateways"}, "hostnames": ["chat.example.com"]}
CLASSES = [{"name": "interactive"}, {"name": "batch", "sheddable": True}, {"name": "No_Name"}]
STORED = [{"weight": 1, "sheddable": False, "objective": 99, **item} for item in CLASSES]
"""As the API server stores them, with their defaults."""
KNOWN = spec_problems.Known(
    policies=frozenset({"fcfs", "edf", "sjf", "two-lane", "urgency"}),
    rules=frozenset({"least-delay", "score"}),
    profiles=frozenset({"a100-70b-tp8"}),
    selectors=frozenset({"rules", "classifier"}),
    gateway_api=True,
)


def body(**changes):
    text = (pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text()
    metadata = {"name": "chat", "namespace": "prod", "uid": "0123", "generation": 3}
    return {"metadata": metadata, "spec": {**yaml.safe_load(text)["spec"], **changes}}


def pick(found, kind, name):
    (one,) = [item for item in found if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return one


def manifests(**api):
    stored = body()
    changes = {"gateway": {**stored["spec"]["gateway"], "api": {**API, "failureMode": "FailClose", **api}}}
    pool = spec.parse(body(**changes, classes=STORED), KNOWN)
    images = render.Images(tidegate="tidegate:1", engine="tidegate-engine:1")
    return list(render.manifests(pool, replica_allocation.desired(pool), images=images, operator_namespace="x"))


def test_the_gateway_is_the_endpoint_picker_of_an_inference_pool():
    found = manifests(failureMode="FailOpen")
    pool = pick(found, "InferencePool", "chat")["spec"]
    engines = pick(found, "Deployment", "chat-engine-a100")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= engines.items()
    picker = pool["endpointPickerRef"]
    assert (picker["name"], picker["failureMode"]) == ("chat-gateway", "FailOpen")
    ports = pick(found, "Service", "chat-gateway")["spec"]["ports"]
    assert picker["port"]["number"] in [port["port"] for port in ports]
    settings = pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    found = gateway_settings.from_mapping(yaml.safe_load(settings))
    assert found.listen.ext_proc_port == picker["port"]["number"]
    assert found.picker.self_signed
    assert not found.picker.conformance_tests


def test_the_route_sends_calls_to_the_pool_and_workflows_to_the_gateway():
    route = pick(manifests(), "HTTPRoute", "chat")["spec"]
    assert route["parentRefs"] == [API["parentRef"]]
    assert route["hostnames"] == API["hostnames"]
    workflows, calls = route["rules"]
    assert workflows["backendRefs"] == [{"name": "chat-gateway", "port": 8000}]
    assert [match["path"]["value"] for match in workflows["matches"]] == ["/v1/workflows", "/v1/relqueries"]
    assert [backend["kind"] for backend in calls["backendRefs"]] == ["InferencePool"]


def test_each_class_whose_name_may_be_one_has_an_objective():
    found = {item["metadata"]["name"]: item["spec"] for item in manifests() if item["kind"] == "InferenceObjective"}
    assert {name: objective["priority"] for name, objective in found.items()} == {
        "chat-interactive": 0,
        "chat-batch": -1,
    }


@pytest.mark.parametrize(
    ("proxies", "namespace", "labels"),
    [({}, "gateways", {}), ({"namespace": "envoys", "podLabels": {"app": "envoy"}}, "envoys", {"app": "envoy"})],
)
def test_the_proxies_reach_the_picker_and_the_engines(proxies, namespace, labels):
    found = manifests(proxies=proxies)
    for name, port in (("chat-gateway", "ext-proc"), ("chat-engine", "http")):
        rules = pick(found, "NetworkPolicy", name)["spec"]["ingress"]
        (peer,) = [rule["from"][0] for rule in rules if rule["ports"] == [{"port": port}]]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
        assert peer["podSelector"]["matchLabels"] == labels


def test_an_operator_without_the_rights_says_so():
    stored = body()
    changes = {"gateway": {**stored["spec"]["gateway"], "api": {**API, "failureMode": "FailClose"}}}
    with pytest.raises(spec.InvalidSpecError) as caught:
        spec.parse(body(**changes), dataclasses.replace(KNOWN, gateway_api=False))
    assert "gatewayApi.enabled=true" in str(caught.value)


@pytest.fixture
def lacking(monkeypatch):
    """The operator may write a kind that the API server does not have."""
    unknown = objects.Kind(api_version="example.com/v1", kind="Nothing", plural="nothings")
    monkeypatch.setattr(api_server, "GATEWAY_API_KINDS", (unknown,))
    monkeypatch.setattr(api_server, "child_kinds", lambda *, gateway_api: (*objects.CHILD_KINDS, unknown))
    monkeypatch.setattr(objects, "_KINDS", {("example.com/v1", "Nothing"): unknown})
    return unknown


async def test_a_cluster_without_a_kind_of_the_gateway_api_refuses_it_and_has_the_other_objects(
    lacking, gateway_cluster, kubectl, namespace, rules
):
    kubectl("create", "configmap", "mine")
    kubectl("label", "configmap", "mine", "tidegate.dev/pool=chat")
    assert [item["metadata"]["name"] for item in await gateway_cluster.children(namespace, "chat")] == ["mine"]
    wanted = {"apiVersion": "example.com/v1", "kind": "Nothing", "metadata": {"name": "x", "namespace": namespace}}
    with pytest.raises(cluster.RejectedError, match=r"has no Nothing in example\.com/v1; install"):
        await gateway_cluster.apply(wanted)


@pytest.fixture
def kinds(plane):
    """The API server has the kinds of the Gateway API."""
    for group in GROUPS:
        plane.add_kinds(KINDS, group)


def test_an_operator_writes_the_objects_and_takes_them_back(kinds, kubectl, install_chart, helm, namespace, eventually):
    (deployment,) = [item for item in helm.rendered("x", "gatewayApi.enabled=true") if item["kind"] == "Deployment"]
    assert "--gateway-api" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    operator = install_chart("gatewayApi.enabled=true")
    operator.start("first", namespace, arguments=["--gateway-api"])
    wanted = operator_doubles.pool(gateway={"api": API}, classes=CLASSES)
    kubectl("apply", "-f", "-", body=wanted)
    expected = [
        "httproute.gateway.networking.k8s.io/chat",
        "inferenceobjective.llm-d.ai/chat-batch",
        "inferenceobjective.llm-d.ai/chat-interactive",
        "inferencepool.inference.networking.k8s.io/chat",
    ]
    eventually(lambda: sorted(kubectl("get", PLURALS, "-o", "name").split()) == expected)
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("delete", "httproute/chat", "--wait=true")  # the watch tells, and it comes back
    eventually(lambda: kubectl("get", "httproute/chat", "-o", "name", check=False))
    kubectl("patch", "spool/chat", "--type=json", "-p", '[{"op": "remove", "path": "/spec/gateway/api"}]')
    eventually(lambda: not kubectl("get", PLURALS, "-o", "name"))


async def test_a_second_reconcile_writes_nothing(kinds, kubectl, gateway_cluster, namespace, rules):
    rules = dataclasses.replace(rules, known=dataclasses.replace(rules.known, gateway_api=True))
    kubectl("create", "-f", "-", body=operator_doubles.pool(gateway={"api": API}, classes=CLASSES))
    result = await reconcile.reconcile(gateway_cluster, namespace, "chat", rules=rules, now=NOW)
    assert result is reconcile.Result.SETTLED
    before = kubectl("get", PLURALS, "-o", "json")
    await reconcile.reconcile(gateway_cluster, namespace, "chat", rules=rules, now=NOW)
    assert kubectl("get", PLURALS, "-o", "json") == before
