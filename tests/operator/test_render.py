import dataclasses
import json
import pathlib

import pytest
import yaml

import tidegate_profiles
from tidegate_gateway import gateway_settings
from tidegate_operator import render, replica_allocation, spec, spec_problems
from tidegate_operator.render import gateway_deployment
from tidegate_policy import cost
from tidegate_policy.admit import entitlements

KNOWN = spec_problems.Known(
    policies=frozenset({"fcfs", "edf", "sjf", "two-lane", "urgency"}),
    rules=frozenset({"least-delay", "score"}),
    profiles=frozenset({"a100-70b-tp8"}),
    selectors=frozenset({"rules", "classifier"}),
)
IMAGES = render.Images(tidegate="tidegate:1", engine="tidegate-engine:1")


def body(**changes):
    text = (pathlib.Path(__file__).parent / "golden" / "chat.stored.yaml").read_text()
    metadata = {"name": "chat", "namespace": "prod", "uid": "0123", "generation": 3}
    return {"metadata": metadata, "spec": {**yaml.safe_load(text)["spec"], **changes}}


def manifests(*, images=IMAGES, ipv6=False, **changes):
    pool = spec.parse(body(**changes), KNOWN)
    counts = replica_allocation.desired(pool)
    return list(render.manifests(pool, counts, images=images, operator_namespace="tidegate-system", ipv6=ipv6))


def pick(found, kind, name):
    (one,) = [item for item in found if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return one


def engine_container(found, node_pool="a100"):
    deployment = pick(found, "Deployment", f"chat-engine-{node_pool}")
    return deployment["spec"]["template"]["spec"]["containers"][0]


def test_the_documented_example_becomes_these_manifests(golden):
    golden("chat.manifests.yaml", manifests())


@pytest.mark.parametrize(
    ("stored", "argument"), [({"offload": "1536Mi"}, "1.5"), ({"offloadGiB": 20}, "20"), ({"offloadGiB": 0}, None)]
)
def test_offloaded_kv_has_a_size_also_in_pools_of_an_earlier_version(stored, argument):
    given = {key: value for key, value in body()["spec"]["engine"].items() if key != "offload"}
    sizes = [arg for arg in engine_container(manifests(engine=given | stored))["args"] if "kv-offloading" in arg]
    assert sizes == ([] if argument is None else [f"--kv-offloading-size={argument}"])


def test_the_same_pool_gives_the_same_manifests():
    assert manifests() == manifests()


def test_no_two_children_share_a_kind_and_a_name():
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests()]
    assert len(names) == len(set(names))


def test_every_child_is_owned_and_labelled():
    for item in manifests():
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("0123", True, True)
        assert item["metadata"]["labels"]["tidegate.dev/pool"] == "chat"


def test_the_longest_names_still_fit():
    node_pool = {**body()["spec"]["nodePools"][0], "name": "n" * 24}
    longest = body(nodePools=[node_pool])
    longest["metadata"]["name"] = "p" * 30
    pool = spec.parse(longest, KNOWN)
    for item in render.manifests(pool, replica_allocation.desired(pool), images=IMAGES, operator_namespace="x"):
        assert len(item["metadata"]["name"]) <= 63


def test_a_pool_with_an_external_store_gets_no_embedded_one():
    valkey = {"url": "redis://valkey.stores:6379/0", "secretRef": {"name": "store", "key": "password"}}
    found = manifests(state={"valkey": valkey})
    assert not [item for item in found if "valkey" in item["metadata"]["name"]]
    settings = yaml.safe_load(pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    assert settings["store"] == {
        "url": "redis://valkey.stores:6379/0",
        "pool": "prod.chat",
        "journal": "/tmp/ends.jsonl",
    }
    env = pick(found, "Deployment", "chat-gateway")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {
        "name": "TIDEGATE_STORE_PASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "store", "key": "password"}},
    } in env


def test_secrets_of_api_keys_and_of_a_certificate_are_mounted():
    gateway = {
        **body()["spec"]["gateway"],
        "auth": {"keysSecretRef": {"name": "clients", "key": "file"}},
        "tls": {"secretName": "chat-tls"},
    }
    found = manifests(gateway=gateway)
    settings = yaml.safe_load(pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    assert settings["auth"] == {"keysFile": "/etc/tidegate-keys/keys.yaml"}
    assert settings["tls"] == {"certFile": "/etc/tidegate-tls/tls.crt", "keyFile": "/etc/tidegate-tls/tls.key"}
    pod = pick(found, "Deployment", "chat-gateway")["spec"]["template"]["spec"]
    mounts = {item["name"]: item["mountPath"] for item in pod["containers"][0]["volumeMounts"]}
    assert (mounts["keys"], mounts["tls"]) == ("/etc/tidegate-keys", "/etc/tidegate-tls")
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["keys"]["secret"] == {"secretName": "clients", "items": [{"key": "file", "path": "keys.yaml"}]}
    assert volumes["tls"]["secret"] == {"secretName": "chat-tls"}


def test_tokens_of_an_identity_provider_need_no_unauthenticated_gateway():
    jwt = {"issuer": "https://login.example", "audience": "chat", "jwksUrl": "https://login.example/keys"}
    found = manifests(gateway={**body()["spec"]["gateway"], "auth": {"jwt": {**jwt, "tenantClaim": "tenant"}}})
    settings = yaml.safe_load(pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    assert settings["auth"] == {"jwt": {**jwt, "tenantClaim": "tenant"}}
    assert gateway_settings.from_mapping(settings).auth.required


def test_a_gateway_restarts_when_its_settings_change_and_only_then():
    def digest(**changes):
        return pick(manifests(**changes), "Deployment", "chat-gateway")["spec"]["template"]["metadata"]["annotations"]

    assert digest() != digest(model={"name": "other"})
    assert digest() == digest(replicas=3)
    assert digest() == digest(tenants=[], classes=[], workflows=[])  # a running gateway takes these from the file
    policy = body()["spec"]["policy"]
    assert digest() == digest(policy={**policy, "parameters": []})


def test_gateways_have_the_parameters_of_policies():
    parameters = [{"policy": "two-lane", "name": "threshold_s", "value": "6.5"}]
    found = manifests(policy={**body()["spec"]["policy"], "parameters": parameters})
    settings = yaml.safe_load(pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    assert gateway_settings.from_mapping(settings).policy.parameters_of("two-lane") == {"threshold_s": 6.5}
    assert gateway_settings.from_mapping(settings).policy.parameters_of("edf") == {}


def test_a_simulated_engine_runs_tidegates_image_at_its_profile():
    engine = {**body()["spec"]["engine"], "kind": "sim", "simSpeed": 10, "args": []}
    del engine["image"]
    container = engine_container(manifests(engine=engine))
    assert container["image"] == "tidegate:1"
    assert container["command"] == ["tidegate", "sim-engine"]
    assert container["args"] == [
        "--model=Qwen/Qwen3-8B", "--host=0.0.0.0", "--port=8000", "--control=0.0.0.0:9001",
        "--speed=10", "--shutdown-timeout=600", "--profile=a100-70b-tp8",
    ]  # fmt: skip
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


@pytest.mark.parametrize("speed", [0.5, 1, 20])
def test_the_gateway_predicts_a_simulated_engine_at_its_speed(speed):
    engine = {**body()["spec"]["engine"], "kind": "sim", "simSpeed": speed}
    text = pick(manifests(engine=engine), "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    profiled, unprofiled = gateway_settings.from_mapping(yaml.safe_load(text)).services
    shipped = tidegate_profiles.load("a100-70b-tp8")["cost"]
    stated = shipped if profiled.cost is None else profiled.cost
    predicted = cost.from_mapping(stated).step_seconds(uncached=1000, attended=500_000, decodes=3, context=3000)
    alone = cost.from_mapping(shipped).step_seconds(uncached=1000, attended=500_000, decodes=3, context=3000)
    assert predicted == pytest.approx(alone / speed)
    assert unprofiled.cost is None


def test_devices_may_come_from_a_resource_claim():
    node_pool = {**body()["spec"]["nodePools"][0], "resourceClaimTemplateName": "eight-gpus"}
    found = manifests(nodePools=[node_pool])
    pod = pick(found, "Deployment", "chat-engine-a100")["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "eight-gpus"}]
    assert engine_container(found)["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in engine_container(found)["resources"].get("limits", {})


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("file:///models/qwen", "/models/qwen"), (None, "demo")],
)
def test_the_location_of_the_weights_reaches_vllm(uri, expected):
    model = {"name": "demo", **({"uri": uri} if uri else {})}
    assert f"--model={expected}" in engine_container(manifests(model=model))["args"]


@pytest.mark.parametrize("endpoint", [None, "http://otel.observability:4317"])
def test_spans_go_to_the_collector_of_the_spec(endpoint):
    gateway = {**body()["spec"]["gateway"], "tracing": {"endpoint": endpoint} if endpoint else {}}
    text = pick(manifests(gateway=gateway), "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    assert gateway_settings.from_mapping(yaml.safe_load(text)).tracing.endpoint == endpoint


def test_the_bounds_of_the_spec_are_settings_that_the_gateway_can_read():
    stored = body()["spec"]["gateway"]
    gateway = {
        **stored,
        "dispatch": {**stored["dispatch"], "learnCosts": True, "isolateTenants": True},
        "timeouts": {"firstToken": "90s", "nextToken": "30s", "answer": "20m"},
        "limits": {"body": "2Mi", "connections": 500, "connectionsPerAddress": 50},
        "allow": ["remote_images"],
        "relQueries": {"rows": 10, "perTenant": 2, "inFlight": 8, "lasts": "1h", "rowsUrls": ["https://data.example/"]},
    }
    text = pick(manifests(gateway=gateway), "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    read = gateway_settings.from_mapping(yaml.safe_load(text))
    assert (read.timeouts.first_token_s, read.timeouts.next_token_s, read.timeouts.answer_s) == (90, 30, 1200)
    assert read.timeouts.drain_s == 600
    assert (read.limits.body_bytes, read.limits.connections, read.limits.connections_per_address) == (2097152, 500, 50)
    assert (read.dispatch.learn_costs, read.dispatch.isolate_tenants) == (True, True)
    assert [str(feature) for feature in read.allow] == ["remote_images"]
    assert (read.relqueries.rows, read.relqueries.per_tenant, read.relqueries.in_flight) == (10, 2, 8)
    assert (read.relqueries.lasts_s, read.relqueries.rows_urls) == (3600, ("https://data.example/",))


def test_a_pool_without_bounds_of_its_own_states_none():
    text = pick(manifests(), "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    assert not {"limits", "relqueries", "allow"} & yaml.safe_load(text).keys()


def test_the_gateway_can_read_the_rendered_settings():
    text = pick(manifests(), "ConfigMap", "chat-gateway")["data"]["gateway.yaml"]
    read = gateway_settings.from_mapping(yaml.safe_load(text))
    assert [service.name for service in read.services] == ["chat-engine-a100.prod.svc", "chat-engine-a6000.prod.svc"]
    assert read.classes[0] == entitlements.SloClass(name="interactive", ttft_s=1.0, tpot_s=0.06, weight=4.0)
    assert read.workflows[0].stages[1].after == ("link",)
    assert read.store.pool == "prod.chat"


def test_pull_secrets_reach_every_pod_and_a_pools_secrets_replace_them_for_its_engines():
    images = dataclasses.replace(IMAGES, pull_secrets=("registry",))

    def secrets(**changes):
        pool = spec.parse(body(**changes), KNOWN)
        found = render.manifests(
            pool, replica_allocation.desired(pool), images=images, operator_namespace="tidegate-system"
        )
        pods = {
            item["metadata"]["name"]: item["spec"]["template"]["spec"]
            for item in found
            if item["kind"] in ("Deployment", "StatefulSet")
        }
        return {name: [secret["name"] for secret in pod.get("imagePullSecrets", [])] for name, pod in pods.items()}

    assert set(map(tuple, secrets().values())) == {("registry",)}
    own = secrets(engine={**body()["spec"]["engine"], "imagePullSecrets": [{"name": "own"}]})
    assert (own["chat-engine-a100"], own["chat-gateway"]) == (["own"], ["registry"])


@pytest.mark.parametrize("kind", ["vllm", "sim"])
def test_with_ipv6_no_port_of_a_pool_is_left_to_ipv4_alone(kind):
    engine = {**body()["spec"]["engine"], "kind": kind}
    assert "0.0.0.0" in json.dumps(manifests(engine=engine))
    found = manifests(engine=engine, ipv6=True)
    assert "0.0.0.0" not in json.dumps(found)
    assert {"--host=::", "--control=[::]:9001"} <= set(engine_container(found)["args"])


def test_the_texts_of_settings_that_are_kept_are_bounded_by_their_size_and_the_last_used_stay(monkeypatch):
    dumped = []

    def dump(value, **options):
        dumped.append(value["name"])
        return "x" * 1000

    monkeypatch.setattr(gateway_deployment.yaml, "dump", dump)
    texts = gateway_deployment.Texts(most=3500)
    for name in ("a", "b", "c", "a", "d", "a", "b"):
        assert len(texts.of(json.dumps({"name": name}))) == 1000
    assert dumped == ["a", "b", "c", "d", "b"]
    assert texts.kept_characters == 3000
