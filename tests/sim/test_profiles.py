"""Each shipped profile against what its card can do, and against the published single-call times it was fitted to."""

import json

import pytest

import tidegate_profiles
from tidegate_policy import cost
from tidegate_policy.model import Call, CallId

NAMES = tidegate_profiles.names()


@pytest.fixture(params=NAMES)
def profile(request):
    return tidegate_profiles.load(request.param)


def test_the_profiles_that_other_parts_name_are_there():
    assert {"a100-70b-tp8", "a6000-70b-tp8", "l40-70b-tp8"} <= set(NAMES)


def test_every_profile_says_where_it_comes_from_and_is_a_cost_model(profile):
    assert profile["source"]
    assert profile["derivation"]
    cost.from_mapping(profile["cost"])


@pytest.mark.parametrize("tokens", [128, 2048, 16384])
def test_no_prefill_or_decode_is_faster_than_the_card(profile, tokens):
    facts, model = profile["facts"], cost.from_mapping(profile["cost"])
    flops = facts["cards"] * facts["flops_a_card"]
    bandwidth = facts["cards"] * facts["bytes_a_second_a_card"]
    operations = 2 * facts["parameters"] * tokens + 4 * facts["hidden"] * facts["layers"] * tokens**2 / 2
    bytes_read = 2 * facts["parameters"] + facts["kv_bytes_a_token"] * tokens  # two bytes a weight
    assert model.prefill_seconds(tokens) >= operations / flops
    assert model.step_seconds(uncached=0, decodes=1, context=tokens) >= bytes_read / bandwidth


def test_no_coefficient_is_absurdly_slow(profile):
    facts, model = profile["facts"], cost.from_mapping(profile["cost"])
    flops = facts["cards"] * facts["flops_a_card"]
    bandwidth = facts["cards"] * facts["bytes_a_second_a_card"]
    assert model.prefill_s <= 10 * 2 * facts["parameters"] / flops
    assert model.attention_s <= 10 * 4 * facts["hidden"] * facts["layers"] / flops
    assert model.step_s <= 4 * 2 * facts["parameters"] / bandwidth
    assert model.context_s <= 6 * facts["kv_bytes_a_token"] / bandwidth


def test_a_batch_grows_as_the_roofline_does(profile):
    if "fit" in profile:
        pytest.skip("measurements say how a batch grows")
    model = cost.from_mapping(profile["cost"])
    ridge = (model.step_s + model.decode_s) / model.prefill_s  # sequences that make a step compute-bound
    roofline_s = max(model.step_s, 2 * ridge * model.prefill_s)
    assert model.step_seconds(uncached=0, decodes=round(2 * ridge), context=0) == pytest.approx(roofline_s, rel=0.02)


def test_kv_and_weights_fit_the_memory(profile):
    facts, kv_tokens = profile["facts"], profile["cost"]["kv_tokens"]
    needed = 2 * facts["parameters"] + kv_tokens * facts["kv_bytes_a_token"]
    assert needed < 0.9 * facts["cards"] * facts["memory_gib_a_card"] * 2**30


@pytest.mark.parametrize(("name", "column"), [("a100", "A100"), ("a6000", "A6000"), ("l40", "L40")])
def test_single_calls_take_the_published_time_within_an_eighth(name, column, published):
    table = json.loads(published("text2sql_workflows/stage_profiles.json").read_text())
    model = cost.from_mapping(tidegate_profiles.load(f"{name}-70b-tp8")["cost"])
    for stage, seconds in table["stage_seconds"][column].items():
        prompt, output = table["io_len"][stage]
        call = Call(id=CallId(stage), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=output)
        assert model.call_seconds(call) == pytest.approx(seconds, rel=0.125), stage


def test_a_profile_says_whether_anybody_measured_it(profile):
    found = tidegate_profiles.accuracy(profile)
    assert ("measured, with a mean error" in found) == ("fit" in profile)
    assert ("nobody measured" in found) == ("fit" not in profile)


@pytest.mark.parametrize("fit", [None, [], {}, {"mean_error": "?"}, {"mean_error": 0.1, "p95_error": None}])
def test_a_fit_that_cannot_be_read_counts_as_none(fit):
    assert "nobody measured" in tidegate_profiles.accuracy({"cost": {}, "fit": fit})


def test_an_unknown_profile_is_answered_with_those_that_exist():
    with pytest.raises(tidegate_profiles.UnknownProfile, match="unknown profile 'h100'; shipped are a100-40-"):
        tidegate_profiles.load("h100")


@pytest.mark.parametrize("content", ["- 1\n", "a: {", "cost: 3\n"])
def test_a_file_that_is_no_profile_is_a_sentence(content, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(tidegate_profiles.UnknownProfile, match=r"mine\.yaml"):
        tidegate_profiles.read(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("cost: {step_s: 1.0}\n#" + "x" * 20_000, "longer than 16384 characters", id="long"),
        pytest.param("a: &a [1]\ncost: {b: *a}\n", "refers to a value", id="alias"),
        pytest.param("cost: " + "[" * 5_000, "more than 8 levels", id="deep"),
        pytest.param("cost: {1: 2}\n", "a name that is no text", id="number as a name"),
        pytest.param("cost: {step_s: 2024-99-99}\n", "is not YAML", id="no date"),
        pytest.param("cost: {? [a] : 2}\n", "is not YAML", id="list as a name"),
        pytest.param("cost: !!python/object:os.system {}\n", "has the tag tag:yaml.org,2002:python", id="object"),
        pytest.param("cost: {step_s: !!bool x}\n", "has the tag tag:yaml.org,2002:bool", id="tag"),
        pytest.param("cost: {step_s: 1" + ":59" * 500 + ".5}\n", "is not YAML", id="time of a thousand digits"),
        pytest.param("cost: {}\n---\ncost: {}\n", "is not YAML", id="two documents"),
    ],
)
def test_a_text_of_anybody_is_refused_before_it_costs_much(text, why):
    with pytest.raises(tidegate_profiles.UnknownProfile, match=f"^profile mine .*{why}"):
        tidegate_profiles.parse(text, "mine")


def test_a_profile_is_found_by_its_name_or_its_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("cost: {step_s: 0.01, prefill_s: 0.0001}\n")
    assert tidegate_profiles.find(str(path))["cost"] == {"step_s": 0.01, "prefill_s": 0.0001}
    assert tidegate_profiles.find("a100-40-qwen2.5-32b-tp2")["tensor_parallel"] == 2


def test_a_profile_has_no_other_fields_than_the_known_ones(profile):
    assert set(profile) <= set(tidegate_profiles.FIELDS)
