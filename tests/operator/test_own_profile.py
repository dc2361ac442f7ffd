"""Which profile has a node pool, and what becomes of it: the pure part, without an API server."""

import importlib.resources
import json

import pytest
import yaml

from tidegate_gateway import gateway_settings
from tidegate_operator import (
    cluster,
    node_pool_cost,
    objects,
    own_profile,
    pool_profiles,
    render,
    replica_allocation,
    rollout,
    spec,
)
from tidegate_operator.cluster import object_parts
from tidegate_operator.render import engine_profile
from tidegate_policy import cost

from . import simulated_deployments, test_render

TEXT = """\
model: meta-llama/Llama-3.1-8B
source: estimated
derivation: a roofline
facts: {layers: 32}
cost: {step_s: 8.0e-03, prefill_s: 3.2e-05, decode_s: 1.6e-05, kv_tokens: 452000, max_batch: 1024, max_step_tokens: 8192}
"""
FASTER = TEXT.replace("8.0e-03", "4.0e-03")
SHIPPED = frozenset({"a100-70b-tp8"})
REF = {"name": "profiles"}


def body(profile="h100-8b", **changes):
    node_pools = [{**test_render.body()["spec"]["nodePools"][0], "profile": profile}]
    return test_render.body(nodePools=node_pools, profilesConfigMapRef=REF, **changes)


def resolved(data=None, *, children=(), trouble=None, **changes):
    given = pool_profiles.Given(name="profiles", data=data or {}, trouble=trouble)
    return pool_profiles.resolve(body(**changes), given, children, SHIPPED)


def manifests(data, **changes):
    pool = spec.parse(body(**changes), test_render.KNOWN, resolved(data, **changes).profiles)
    counts = replica_allocation.desired(pool)
    return list(render.manifests(pool, counts, images=test_render.IMAGES, operator_namespace="tidegate-system"))


def test_a_profile_keeps_what_engines_read_and_is_the_same_when_it_is_read_again():
    found = own_profile.parse(TEXT, "h100-8b")
    assert found.cost.step_s == 0.008
    assert set(yaml.safe_load(found.text)) == {"source", "cost"}
    assert own_profile.parse(found.text, "h100-8b") == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "no mapping 'cost'", id="empty"),
        pytest.param(
            "costs: {step_s: 1}\ncost: {}\n", "unknown field 'costs'; known are model, accelerator", id="field"
        ),
        pytest.param(TEXT.replace("8.0e-03", "-1"), "step_s must be a finite number", id="negative"),
        pytest.param(TEXT.replace("8.0e-03", ".nan"), "step_s must be a finite number", id="nan"),
        pytest.param(TEXT.replace("8.0e-03", ".inf"), "step_s must be a finite number", id="infinite"),
        pytest.param(TEXT.replace("8.0e-03", "8e-3"), "step_s must be a finite number .*, not '8e-3'", id="text"),
        pytest.param(TEXT.replace("step_s", "step"), "unknown field 'step'; known are", id="coefficient"),
        pytest.param("cost: {prefill_s: 1.0}\n", "step_s is required", id="missing"),
        pytest.param(TEXT + "#" * 20_000, "longer than 16384 characters", id="long"),
    ],
)
def test_a_text_that_is_no_profile_is_refused_with_the_reason(text, why):
    with pytest.raises(own_profile.Unusable, match=f"^profile h100-8b.*{why}"):
        own_profile.parse(text, "h100-8b")


def test_what_engines_do_not_read_is_left_out_and_cannot_spoil_the_rest():
    text = TEXT + "fit: {mean_error: 0.1, of: a figure, a: [1], 2: b, huge: 0x" + "f" * 9_000 + ", none: .nan}\n"
    found = own_profile.parse(text, "h100-8b")
    assert yaml.safe_load(found.text)["fit"] == {"mean_error": 0.1, "of": "a figure"}
    assert own_profile.parse(found.text, "h100-8b") == found


def test_every_shipped_profile_could_be_given_in_a_config_map():
    files = [each for each in importlib.resources.files("tidegate_profiles").iterdir() if each.name.endswith(".yaml")]
    assert len(files) >= 14
    for file in files:
        own_profile.parse(file.read_text(), file.name)


def test_the_config_map_goes_before_the_shipped_profiles():
    mine = resolved({"a100-70b-tp8.yaml": TEXT}, profile="a100-70b-tp8")
    assert mine.profiles.usable["a100"].cost.step_s == 0.008
    shipped = resolved({"other.yaml": TEXT}, profile="a100-70b-tp8")
    assert shipped.profiles == spec.NO_PROFILES
    assert [*mine.kept, *shipped.kept] == []


def test_a_pool_that_names_no_config_map_has_shipped_profiles_only():
    plain = test_render.body()
    assert pool_profiles.resolve(plain, None, manifests({"h100-8b.yaml": TEXT}), SHIPPED) == pool_profiles.NONE
    assert pool_profiles.in_force(plain, manifests({"h100-8b.yaml": TEXT})) == spec.NO_PROFILES


def test_engines_and_gateways_and_the_autoscaler_get_the_cost():
    found = manifests({"h100-8b.yaml": TEXT})
    container = test_render.engine_container(found)
    assert "--profile=/etc/tidegate-profile/h100-8b.yaml" in container["args"]
    assert {"name": "tidegate-profile", "mountPath": "/etc/tidegate-profile", "readOnly": True} in container[
        "volumeMounts"
    ]
    template = test_render.pick(found, "Deployment", "chat-engine-a100")["spec"]["template"]
    assert {
        "name": "tidegate-profile",
        "configMap": {"name": "chat-engine-a100", "items": [{"key": "profile.yaml", "path": "h100-8b.yaml"}]},
    } in template["spec"]["volumes"]
    mounted = test_render.pick(found, "ConfigMap", "chat-engine-a100")["data"]["profile.yaml"]
    model = own_profile.parse(TEXT, "h100-8b").cost
    assert cost.from_mapping(yaml.safe_load(mounted)["cost"]) == model
    settings = yaml.safe_load(test_render.pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    (service,) = gateway_settings.from_mapping(settings).services
    assert service.profile == "h100-8b"
    assert cost.from_mapping(service.cost) == model
    pool = spec.parse(body(), test_render.KNOWN, resolved({"h100-8b.yaml": TEXT}).profiles)
    assert node_pool_cost.model(pool.engine, pool.node_pools[0]) == model


def test_a_simulated_engine_at_another_speed_has_the_cost_at_that_speed():
    engine = {**test_render.body()["spec"]["engine"], "kind": "sim", "simSpeed": 2}
    found = manifests({"h100-8b.yaml": TEXT}, engine=engine)
    settings = yaml.safe_load(test_render.pick(found, "ConfigMap", "chat-gateway")["data"]["gateway.yaml"])
    assert settings["services"][0]["cost"]["step_s"] == 0.004


@pytest.mark.parametrize(("kind", "replaced"), [("vllm", False), ("sim", True)])
def test_a_changed_profile_replaces_gateways_and_simulated_engines_only(kind, replaced):
    engine = {**test_render.body()["spec"]["engine"], "kind": kind}
    before, after = (manifests({"h100-8b.yaml": text}, engine=engine) for text in (TEXT, FASTER))

    def template(found, name):
        return test_render.pick(found, "Deployment", name)["spec"]["template"]

    assert (template(before, "chat-engine-a100") != template(after, "chat-engine-a100")) == replaced
    assert template(before, "chat-gateway") != template(after, "chat-gateway")
    remark = {"h100-8b.yaml": TEXT.replace("estimated", "estimated from the datasheet")}
    for name in ("chat-engine-a100", "chat-gateway"):
        assert template(manifests(remark, engine=engine), name) == template(before, name)


def running(found):
    """The objects as they are when everything serves."""
    for item in found:
        count = item["spec"].get("replicas", 0) if item["kind"] in ("Deployment", "StatefulSet") else 0
        seen = {"observedGeneration": 1, **dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), count)}
        yield {**item, "metadata": {**item["metadata"], "generation": 1}, "status": seen}


@pytest.mark.parametrize(
    ("kind", "replaced"), [("vllm", {"chat-gateway"}), ("sim", {"chat-gateway", "chat-engine-a100"})]
)
def test_a_roll_out_follows_the_profile_while_the_spec_stays_as_it_is(kind, replaced):
    changes = {"engine": {**test_render.body()["spec"]["engine"], "kind": kind}}

    def staged(data, before):
        return rollout.staged(
            body(**changes), manifests(data, **changes), before, [], now=simulated_deployments.NOW
        ).desired

    def templates(found):
        return {item["metadata"]["name"]: item["spec"]["template"] for item in found if item["kind"] == "Deployment"}

    def differing(before, after):
        return {name for name, template in templates(before).items() if templates(after)[name] != template}

    first = [*running(staged({"h100-8b.yaml": TEXT}, []))]
    first = [*running(staged({"h100-8b.yaml": TEXT}, first))]  # notes that the engines served
    assert differing(first, staged({"h100-8b.yaml": TEXT}, first)) == set()
    assert differing(first, staged({"h100-8b.yaml": FASTER}, first)) == replaced


def test_a_shipped_profile_that_takes_the_place_of_one_of_the_same_name_reaches_the_pods():
    changes = {"profile": "a100-70b-tp8"}

    def staged(data, before):
        return rollout.staged(
            body(**changes), manifests(data, **changes), before, [], now=simulated_deployments.NOW
        ).desired

    first = [*running(staged({"a100-70b-tp8.yaml": TEXT}, []))]
    first = [*running(staged({"a100-70b-tp8.yaml": TEXT}, first))]
    assert "--profile=/etc/tidegate-profile/a100-70b-tp8.yaml" in test_render.engine_container(first)["args"]
    assert "--profile=a100-70b-tp8" in test_render.engine_container(staged({}, first))["args"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        pytest.param(
            {"trouble": "there is no ConfigMap profiles"}, "there is no ConfigMap profiles", id="no ConfigMap"
        ),
        pytest.param({"data": {}}, "the ConfigMap profiles has no h100-8b.yaml; add it", id="no key"),
        pytest.param(
            {"data": {"h100-8b.yaml": "x"}}, "correct h100-8b.yaml in the ConfigMap profiles: profile", id="wrong"
        ),
    ],
)
def test_a_pool_that_runs_keeps_the_last_usable_profile(broken, why):
    before = manifests({"h100-8b.yaml": TEXT})
    found = resolved(broken.get("data"), trouble=broken.get("trouble"), children=before)
    assert found.profiles == resolved({"h100-8b.yaml": TEXT}).profiles
    (sentence,) = found.kept
    assert sentence.startswith(f"spec.nodePools[a100].profile: {why}")
    assert sentence.endswith("until then the last usable one counts")
    again = spec.parse(body(), test_render.KNOWN, found.profiles)
    counts = replica_allocation.desired(again)
    assert [*render.manifests(again, counts, images=test_render.IMAGES, operator_namespace="tidegate-system")] == before


def test_a_profile_that_never_was_usable_cannot_be_built_and_the_sentence_says_what_to_do():
    with pytest.raises(spec.InvalidSpecError) as caught:
        spec.parse(body(), test_render.KNOWN, resolved({}).profiles)
    (problem,) = map(str, caught.value.problems)
    assert problem == (
        "spec.nodePools[a100].profile: the ConfigMap profiles has no h100-8b.yaml; add it, or name another profile; "
        "shipped are a100-70b-tp8"
    )


def test_the_profile_of_another_name_is_no_substitute():
    before = manifests({"h100-8b.yaml": TEXT})
    found = resolved({"h100-8b.yaml": TEXT}, children=before, profile="h200-8b")
    assert "a100" in found.profiles.unusable
    running = pool_profiles.in_force(body(profile="h200-8b"), before)  # what steers the pool goes on with what runs
    assert running.usable["a100"].name == "h100-8b"
    assert spec.parse(body(profile="h200-8b"), test_render.KNOWN, running).node_pools[0].own_profile is not None


def test_a_shipped_name_in_a_config_map_that_is_missing_has_the_shipped_profile_meanwhile():
    found = resolved(trouble="there is no ConfigMap profiles", profile="a100-70b-tp8")
    assert found.profiles == spec.NO_PROFILES
    assert found.kept[0].endswith("until then the shipped profile of this name counts")


@pytest.mark.parametrize("data", [{}, {"name": "h100-8b"}, {"name": "h100-8b", "profile.yaml": "x"}])
def test_a_config_map_of_the_pool_that_somebody_changed_is_no_profile(data):
    child = next(item for item in manifests({"h100-8b.yaml": TEXT}) if item["metadata"]["name"] == "chat-engine-a100"
                 and item["kind"] == "ConfigMap")  # fmt: skip
    assert engine_profile.of_config_map(child) is not None
    assert engine_profile.of_config_map({**child, "data": data}) is None
    assert pool_profiles.in_force(body(), [{**child, "data": data}]) == spec.NO_PROFILES


async def test_a_missing_right_to_the_config_map_is_told():
    class Forbidden:
        async def get(self, reference):
            assert reference.path == "/api/v1/namespaces/prod/configmaps/profiles"
            raise cluster.RejectedError("configmaps is forbidden")

    given = await pool_profiles.read(Forbidden(), body())
    assert given.trouble == "the ConfigMap profiles cannot be read: configmaps is forbidden"
    assert await pool_profiles.read(Forbidden(), test_render.body()) is None


def test_the_name_of_an_object_leads_to_no_other_object():
    path = objects.CONFIG_MAPS.path("prod", "../../other/secrets/token")
    assert path == "/api/v1/namespaces/prod/configmaps/..%2F..%2Fother%2Fsecrets%2Ftoken"


@pytest.mark.parametrize(("commas", "is_read"), [(100, True), (object_parts.MOST_PARTS, False)])
async def test_a_config_map_that_is_too_large_to_be_read_is_told(commas, is_read):
    metadata = {"name": "profiles", "creationTimestamp": "2026-11-29T00:00:00Z"}
    stored = {"metadata": metadata, "data": {"h100-8b.yaml": "," * commas}}

    class ApiServer:
        async def get(self, reference):
            return object_parts.parsed(json.dumps(stored).encode())

    given = await pool_profiles.read(ApiServer(), body())
    assert (given.trouble is None, given.data != {}) == (is_read, is_read)
    if not is_read:
        assert given.trouble.endswith("braces, brackets and commas, so it is not read; shorten its profiles")
