"""Rooflines: the shipped ones, the table of cards, and how far they are from the profiles whose coefficients were timed."""

import math
import pathlib

import pytest

import tidegate_profiles
from tidegate_policy import cost
from tidegate_profiles import cards, estimate_error, model_size, roofline

README = pathlib.Path(tidegate_profiles.__file__).parent / "README.md"
PROFILES = {name: tidegate_profiles.load(name) for name in tidegate_profiles.names()}
PURE = [name for name, profile in PROFILES.items() if "timed" not in profile]
"""Profiles in which no coefficient comes from timings."""


@pytest.mark.parametrize("name", PURE)
def test_a_shipped_roofline_is_what_the_formulas_give(name):
    profile = PROFILES[name]
    facts = roofline.Facts.of(profile)
    stated = {each: profile["cost"][each] for each in roofline.COEFFICIENTS}
    assert roofline.estimate(facts) == pytest.approx(stated, rel=1e-3)
    assert roofline.kv_tokens(facts) == profile["cost"]["kv_tokens"]
    assert " ".join(profile["derivation"].split()) == roofline.DERIVATION


@pytest.mark.parametrize("name", [name for name in PROFILES if name not in PURE])
def test_the_coefficients_that_no_timing_determines_are_those_of_the_roofline(name):
    profile = PROFILES[name]
    if "fit" in profile:
        pytest.skip("the fit begins at what the card can do, which is more than the shares of a roofline")
    estimated = roofline.estimate(roofline.Facts.of(profile))
    for each in {*roofline.COEFFICIENTS} - {*profile["timed"], "decode_s"}:
        assert estimated[each] == pytest.approx(profile["cost"][each], rel=1e-3), each
    assert profile["cost"]["decode_s"] == pytest.approx(profile["cost"]["prefill_s"] / 2, rel=1e-3)


def test_the_readme_has_the_errors_of_the_estimate():
    assert estimate_error.table() in README.read_text(), f"write this table into {README}:\n{estimate_error.table()}"


def test_the_short_form_has_the_smallest_and_the_largest_error():
    measured, published = estimate_error.sentences()
    assert "measured runs of 4 shipped profiles: step_s 0.85 to 1.60, prefill_s 1.58 to 1.95" in measured
    assert "published figures of 7 shipped profiles: step_s 0.54 to 1.23" in published


def test_measured_profiles_say_which_coefficients_were_timed():
    assert {name for name, profile in PROFILES.items() if "fit" in profile} == set(
        estimate_error.compared(measured=True)
    )
    assert all({*profile.get("timed", ())} <= {*roofline.COEFFICIENTS} for profile in PROFILES.values())


def test_the_cards_have_the_facts_of_the_shipped_profiles():
    by_product = {card.product: card for card in cards.CARDS.values()}
    known = [profile for profile in PROFILES.values() if profile["accelerator"] in by_product]
    assert len(known) >= 12
    for profile in known:
        card, facts = by_product[profile["accelerator"]], profile["facts"]
        assert (card.flops, card.bytes_a_second, card.memory_gib) == (
            facts["flops_a_card"],
            facts["bytes_a_second_a_card"],
            facts["memory_gib_a_card"],
        ), profile["accelerator"]


@pytest.mark.parametrize("name", cards.CARDS)
def test_every_card_gives_a_profile_that_can_be_used(name):
    card = cards.find(name)
    assert card.source.startswith(("NVIDIA's datasheet", "AMD's datasheet"))
    facts = roofline.Facts(
        parameters=8.03e9, layers=32, hidden=4096, kv_bytes_a_token=131072, cards=1,
        flops_a_card=card.flops, bytes_a_second_a_card=card.bytes_a_second, memory_gib_a_card=card.memory_gib,
    )  # fmt: skip
    max_batch, max_step_tokens = cards.vllm_limits(card)
    model = cost.from_mapping(
        {
            **roofline.estimate(facts),
            "kv_tokens": roofline.kv_tokens(facts),
            "max_batch": max_batch,
            "max_step_tokens": max_step_tokens,
        }
    )
    assert 0.001 < model.step_seconds(uncached=0, decodes=1, context=1000) < 0.1


def test_a_card_is_found_by_its_product_too_and_an_unknown_one_lists_all():
    assert cards.find("NVIDIA-H200") is cards.find("h200")
    with pytest.raises(cards.UnknownCard, match="'tpu' is at hand; known are a100-40, "):
        cards.find("tpu")


def test_vllms_limits_depend_on_the_memory():
    limits = {name: cards.vllm_limits(cards.find(name)) for name in ("l40s", "a100-80", "h100-sxm", "mi300x")}
    assert limits == {
        "l40s": (256, 2048), "a100-80": (256, 2048), "h100-sxm": (1024, 8192), "mi300x": (1024, 16384),
    }  # fmt: skip


def test_weights_that_fill_the_memory_are_refused():
    facts = roofline.Facts.of(PROFILES["a100-40-llama2-70b-tp4"])
    with pytest.raises(roofline.TooLarge, match=r"138\.0 GB of weights leave no room for KV in the 36\.7 GB"):
        roofline.kv_tokens(roofline.Facts(**{**PROFILES["a100-40-llama2-70b-tp4"]["facts"], "cards": 1}))
    half = roofline.Facts(**{**PROFILES["a100-40-llama2-70b-tp4"]["facts"], "weight_bytes": 1})
    assert roofline.kv_tokens(half) > roofline.kv_tokens(facts)
    assert roofline.estimate(half)["step_s"] < roofline.estimate(facts)["step_s"]
    assert roofline.estimate(half)["prefill_s"] == roofline.estimate(facts)["prefill_s"]


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "profile"), [(LLAMA, "rtx4090-llama3.1-8b"), (QWEN, "a100-40-qwen2.5-32b-tp2")], ids=["llama", "qwen"]
)
def test_the_size_by_a_configuration_is_that_of_the_shipped_profile(config, profile):
    facts = PROFILES[profile]["facts"]
    found = model_size.of_config(config, cards=1)
    assert found.parameters == pytest.approx(facts["parameters"], rel=0.005)
    assert (found.layers, found.hidden, found.kv_bytes_a_token) == (
        facts["layers"],
        facts["hidden"],
        facts["kv_bytes_a_token"],
    )


def test_more_cards_than_kv_heads_hold_copies_of_them():
    assert model_size.of_config(LLAMA, cards=8).kv_bytes_a_token == 131072
    assert model_size.of_config(LLAMA, cards=16).kv_bytes_a_token == 2 * 131072


def test_the_parameters_of_an_unknown_type_may_be_given():
    config = {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16}
    found = model_size.of_config(config, cards=1, parameters=6.05e9)
    assert (found.parameters, found.kv_bytes_a_token) == (6.05e9, 458752)
    assert model_size.of_config({"text_config": LLAMA}, cards=1, parameters=9e9).layers == 32


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        pytest.param(
            {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16}, "give --parameters", id="type"
        ),
        pytest.param({**LLAMA, "num_local_experts": 8}, "has experts", id="experts"),
        pytest.param({**LLAMA, "kv_lora_rank": 512}, "kv_lora_rank", id="latent attention"),
        pytest.param({"text_config": LLAMA}, "more parts than its text_config", id="several parts"),
        pytest.param({**LLAMA, "num_hidden_layers": "32"}, "no usable num_hidden_layers: it is '32'", id="text"),
        pytest.param({**LLAMA, "hidden_size": None}, "no usable hidden_size: it is None", id="missing"),
        pytest.param({**LLAMA, "num_attention_heads": 0}, "no usable num_attention_heads", id="zero"),
    ],
)
def test_a_size_that_the_configuration_does_not_tell_is_a_sentence(config, sentence):
    with pytest.raises(model_size.UnknownSize, match=sentence):
        model_size.of_config(config, cards=1)


def test_the_bytes_of_a_parameter_are_asked_for_where_they_are_not_sixteen_bits():
    assert model_size.weight_bytes(LLAMA) == 2
    for config in (
        {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
        {**LLAMA, "torch_dtype": "float8_e4m3fn"},
    ):
        with pytest.raises(model_size.UnknownSize, match="--weight-bytes"):
            model_size.weight_bytes(config)


def test_the_estimate_of_a_call_is_a_finite_time():
    for profile in PROFILES.values():
        assert all(
            math.isfinite(value) and value > 0 for value in roofline.estimate(roofline.Facts.of(profile)).values()
        )
