"""Output lengths, remaining work, and outlier ejection: what is learned from observations."""

import pytest

from tidegate_policy.admit.outliers import FailureRecord, OutlierSettings
from tidegate_policy.predict import output_length, tenant_bounds, text_density
from tidegate_policy.predict.output_length import LengthObservation, LengthPrediction, OutputLengths
from tidegate_policy.predict.remaining_work import RemainingWork

KIND = ("acme", "", "chat", "m")


def seen(
    output: int, *, characters: int = 400, media: int = 0, sequences: int = 1, prompt: int = 105, tenant: str = "acme"
) -> LengthObservation:
    return LengthObservation(
        tenant=tenant,
        characters=characters,
        media=media,
        messages=0,
        sequences=sequences,
        prompt_tokens=prompt,
        output_tokens=output,
    )


def test_output_length_follows_the_kind_then_the_tenant_then_the_default() -> None:
    lengths = OutputLengths()
    assert lengths.predict(KIND, None) == LengthPrediction(expected=128, upper=0)
    for _ in range(20):
        lengths.observe(KIND, seen(40))
    assert lengths.predict(KIND, None).expected == 40
    assert lengths.predict(KIND, 10) == LengthPrediction(expected=10, upper=10), "the client's bound binds"
    assert lengths.predict(("acme", "", "new", "m"), None).expected == 40
    assert lengths.predict(("new", "", "chat", "m"), None).expected == 128, "one other tenant is no rule"
    assert lengths.predict(("new", "", "chat", "other"), 5000).expected == 128
    lengths.observe(KIND, seen(120, sequences=3))
    assert lengths.predict(KIND, None).expected == 40, "the length is that of each sequence"


def test_characters_per_token_are_learned() -> None:
    lengths = OutputLengths()
    assert lengths.prompt_tokens("acme", "m", 4000, 0) == 1000
    for _ in range(200):
        lengths.observe(KIND, seen(1, characters=4000, prompt=2000))
    assert lengths.prompt_tokens("acme", "m", 4000, 0) == pytest.approx(2000, rel=0.02)
    assert lengths.prompt_tokens("acme", "other", 4000, 0) == 1000


def test_images_count_once_an_engine_has_answered_some() -> None:
    lengths = OutputLengths()
    assert lengths.prompt_tokens("acme", "m", 400, 0, media=256) == 100, "a model without images rejects the call"
    lengths.observe(("other", "", "chat", "m"), seen(1, media=1, prompt=600, tenant="other"))
    assert lengths.prompt_tokens("acme", "m", 400, 0, media=2) == pytest.approx(1100, rel=0.1)
    assert lengths.prompt_tokens("acme", "text", 400, 0, media=2) == 100


def test_odd_texts_of_one_tenant_do_not_lengthen_the_prompts_of_others() -> None:
    lengths = OutputLengths()
    lengths.observe(KIND, seen(1, characters=4000, prompt=1000))
    for _ in range(500):
        lengths.observe(("odd", "", "chat", "m"), seen(1, characters=100, prompt=4000, tenant="odd"))
    assert lengths.prompt_tokens("odd", "m", 4000, 0) == 8000
    assert lengths.prompt_tokens("acme", "m", 4000, 0) == 1000
    assert lengths.prompt_tokens("new", "m", 4000, 0) <= 1500, "the odd tenant is one of several"


def test_a_new_tenant_gets_the_mean_of_the_tenants_of_its_model() -> None:
    density = text_density.TextDensity()
    for number in range(20):
        for _ in range(100):
            density.observe(f"t{number}", "m", 2.0)
    assert density.characters_per_token("new", "m") == pytest.approx(2.0, abs=0.15)
    assert density.characters_per_token("new", "other") == text_density.USUAL


def test_characters_per_token_take_bounded_memory() -> None:
    density = text_density.TextDensity()
    for number in range(text_density.MAX_PAIRS + 50):
        density.observe(f"t{number}", f"m{number % 7}", 2.0)
    assert len(density._tenants) == text_density.MAX_PAIRS
    for number in range(text_density.MAX_PAIRS):
        density.observe(f"u{number}", "other", 2.0)
    assert list(density._models) == ["other"], "a model without tenants is forgotten"


def test_a_forgotten_kind_gets_the_mean_of_its_tenant() -> None:
    lengths = OutputLengths()
    lengths.observe(("acme", "", "first", "m"), seen(500))
    for index in range(output_length.MAX_KINDS + 50):
        lengths.observe(("acme", "", str(index), "m"), seen(7))
    assert lengths.predict(("acme", "", "first", "m"), None).expected < 20


def test_lengths_take_bounded_memory() -> None:
    lengths = OutputLengths()
    for index in range(output_length.MAX_KINDS + 50):
        lengths.observe((f"t{index}", "", str(index), f"m{index % 7}"), seen(7))
    known = (lengths._kinds, lengths._sized, lengths._tenants)
    assert [len(each) for each in known] == [output_length.MAX_KINDS] * 3
    for index in range(output_length.MAX_KINDS):
        lengths.observe((f"u{index}", "", "", "other"), seen(7))
    assert list(lengths._models) == ["other"], "a model without tenants is forgotten"


def test_errors_take_bounded_memory() -> None:
    bounds = tenant_bounds.TenantBounds()
    for tenant in range(tenant_bounds.MAX_BUCKETS + 50):
        for _ in range(tenant_bounds.LEAST_ERRORS):
            bounds.observe(f"t{tenant}", "m", 40, 50)
    assert len(bounds._errors) == tenant_bounds.MAX_BUCKETS
    assert [len(margins) for margins in bounds._shared.values()] == [tenant_bounds.MAX_BUCKETS]
    for tenant in range(tenant_bounds.MAX_BUCKETS):
        bounds.observe(f"u{tenant}", "other", 40, 50)
    assert not bounds._shared, "a bucket without tenants is forgotten"


def test_remaining_work_is_the_mean_of_finished_workflows_and_unknown_stages_are_unknown() -> None:
    work = RemainingWork()
    assert work.predict(("t", "", "plan")) is None
    for rest_s in (10.0, 20.0, 60.0):
        work.observe(("t", "", "plan"), rest_s)
    assert work.predict(("t", "", "plan")) == pytest.approx(30.0)
    assert work.predict(("other", "", "plan")) is None


def test_ejections_double_in_a_row_and_successes_end_the_row() -> None:
    settings = OutlierSettings(consecutive_failures=3, base_ejection_s=1.0, max_ejection_s=5.0)
    record, now, lengths = FailureRecord(), 100.0, []
    for _ in range(5):
        while not record.failed(now, "t", settings):
            assert not record.ejected(now)
        lengths.append(record.eject(now, settings))
        assert not record.failed(now, "t", settings), "it is ejected"
        now = record.ejected_until_at_s
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]
    for _ in range(3):
        record.succeeded(now, "t")
    assert [record.failed(now, "t", settings) for _ in range(3)] == [False, False, True]
    assert record.eject(now, settings) == 1.0


@pytest.mark.parametrize(("failing", "calls", "ejected"), [(2, 3, True), (3, 4, True), (1, 2, False), (1, 10, False)])
def test_an_engine_that_fails_most_of_its_calls_is_ejected_for_ever_longer(
    failing: int, calls: int, ejected: bool
) -> None:
    settings, record, now, lengths = OutlierSettings(), FailureRecord(), 100.0, list[float]()
    for number in range(400):
        if lengths and number % 7 == 0:
            record.succeeded(now - 0.5, "a")  # a call that began before the ejection
        if number % calls < failing:
            if record.failed(now, "ab"[number % 2], settings):
                lengths.append(record.eject(now, settings))
                now = record.ejected_until_at_s
        else:
            record.succeeded(now, "ab"[number % 2])
    assert lengths[:4] == ([1.0, 2.0, 4.0, 8.0] if ejected else [])
