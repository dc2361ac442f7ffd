"""The small pure parts: event streams, perception, calibration, outliers, metrics pages, settings."""

import dataclasses
import itertools
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import calibrate, gateway_settings, outliers, perceive, settings_decoder
from tidegate_gateway.engines import metrics_scrape
from tidegate_gateway.openai import error_table, event_stream
from tidegate_policy.cost import CostModel
from tidegate_policy.model import DropReason

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b": ping\n\n"
    b'data: {"choices":[{"text":"b\\n"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
KIND = ("acme", "chat", "m")


@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=8), wants=st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], wants: bool) -> None:
    tap, out = event_stream.Tap(wants_usage=wants), b""
    bounds = [0, *sorted(cuts), len(EVENTS)]
    for start, end in itertools.pairwise(bounds):
        block = tap.feed(EVENTS[start:end])
        assert block == b"" or block.endswith(b"\n\n"), "only whole events leave"
        out += block
    assert out == (EVENTS if wants else EVENTS.replace(USAGE, b""))
    assert (tap.meter.tokens, tap.meter.prompt_tokens, tap.meter.generated, tap.meter.done) == (2, 3, 2, True)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_events_or_not_events(data: bytes) -> None:
    tap = event_stream.Tap(wants_usage=False)
    try:
        block = tap.feed(data)
    except event_stream.NotEvents:
        return
    assert data.startswith(block)


def test_an_event_without_end_is_given_up() -> None:
    tap = event_stream.Tap(wants_usage=False)
    tap.feed(b"x" * event_stream.MAX_EVENT_BYTES)
    with pytest.raises(event_stream.NotEvents):
        tap.feed(b"x")


def test_output_length_follows_the_kind_then_the_model_then_the_default() -> None:
    perception = perceive.Perception()
    assert perception.output_tokens(KIND, None) == (128, 0)
    for _ in range(20):
        perception.on_usage(KIND, characters=400, messages=1, choices=1, prompt_tokens=105, output_tokens=40)
    assert perception.output_tokens(KIND, None)[0] == 40
    assert perception.output_tokens(KIND, 10) == (10, 10), "the client's bound binds"
    assert perception.output_tokens(("new", "chat", "m"), None)[0] == 40
    assert perception.output_tokens(("new", "chat", "other"), 5000)[0] == 128
    perception.on_usage(KIND, characters=400, messages=1, choices=3, prompt_tokens=105, output_tokens=120)
    assert perception.output_tokens(KIND, None)[0] == 40, "of each choice"


def test_characters_per_token_are_learned() -> None:
    perception = perceive.Perception()
    assert perception.prompt_tokens("m", 4000, 0) == 1000
    for _ in range(200):
        perception.on_usage(KIND, characters=4000, messages=0, choices=1, prompt_tokens=2000, output_tokens=1)
    assert perception.prompt_tokens("m", 4000, 0) == pytest.approx(2000, rel=0.02)


def test_kinds_are_bounded() -> None:
    perception = perceive.Perception()
    for i in range(perceive.KINDS + 50):
        perception.on_usage((str(i), "", "m"), characters=40, messages=0, choices=1, prompt_tokens=10, output_tokens=7)
    assert len(perception._kinds) <= perceive.KINDS
    assert perception.output_tokens(("0", "", "m"), None)[0] == 7


def test_calibration_finds_the_engines_own_speed() -> None:
    truth = CostModel(step_s=0.008, prefill_s=2e-5, decode_s=0.0003)
    found = calibrate.Calibration()
    for i in range(400):
        beside = (i * 7) % 20
        tpot_s = truth.step_s + truth.decode_s * (beside + 1)
        ttft_s = truth.prefill_seconds(1000) + (0.5 if beside else 0.0)
        found = found.after(
            calibrate.Observation(
                prompt_tokens=1000,
                tokens=51,
                ttft_s=ttft_s,
                whole_s=ttft_s + 50 * tpot_s,
                beside=beside,
                alone=beside == 0,
            )
        )
    assert found.cost.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert found.cost.decode_s == pytest.approx(truth.decode_s, rel=0.1)
    assert found.cost.prefill_s == pytest.approx(truth.prefill_s, rel=0.2)


@given(
    seen=st.lists(
        st.tuples(
            st.integers(0, 10**6), st.integers(0, 10**5), st.floats(0, 1e4), st.floats(0, 1e5), st.integers(0, 500)
        ),
        max_size=30,
    )
)
def test_calibration_never_turns_negative(seen: list[Any]) -> None:
    found = calibrate.Calibration()
    for prompt, tokens, ttft_s, whole_s, beside in seen:
        found = found.after(
            calibrate.Observation(
                prompt_tokens=prompt, tokens=tokens, ttft_s=ttft_s, whole_s=whole_s, beside=beside, alone=beside < 3
            )
        )
    assert found.cost.step_s > 0
    assert found.cost.prefill_s > 0
    assert found.cost.decode_s >= 0


def test_ejections_double_in_a_row_and_a_success_ends_the_row() -> None:
    limits = gateway_settings.Health(consecutive_failures=3, base_ejection_s=1.0, max_ejection_s=5.0)
    record, now, lengths = outliers.Record(), 100.0, []
    for _ in range(5):
        while not record.ejected(now):
            record = record.after(now, ok=False, limits=limits)
        lengths.append(record.until_s - now)
        now = record.until_s
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]
    record = record.after(now, ok=True, limits=limits)
    assert record.ejections == 0
    for expected in (False, False, True):
        record = record.after(now, ok=False, limits=limits)
        assert record.ejected(now) is expected


@given(page=st.binary(max_size=500))
def test_any_metrics_page_can_be_read(page: bytes) -> None:
    load = metrics_scrape.read(page)
    assert load.running is None or load.running >= 0


def test_every_drop_reason_has_its_row_and_its_sentence() -> None:
    for reason in DropReason:
        error = error_table.Refused(reason)
        assert error.row.status == (503 if reason in ("draining", "no-engines", "store-unavailable") else 429)
        assert error.headers()["x-tidegate-reason"] == reason.value
        assert error.message


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"surprise": 1}, "surprise is not a setting"),
        ({"listen": {"port": "a"}}, "listen.port must be a whole number"),
        ({"listen": {"port": True}}, "listen.port must be a whole number"),
        ({"queue": {"ttl": "ten"}}, "queue.ttl must be a duration"),
        ({"queue": []}, "queue must be a mapping"),
        ({"engines": [{}]}, "engines[0].url is required"),
        ({"engines": [{"url": "host:80"}]}, "must start with http"),
        ({"dispatch": {"cap": 0}}, "dispatch.cap must be at least 1"),
        ({"queue": {"maxRequests": -1}}, "queue.maxRequests must be 0"),
        ({"dispatch": {"alpha": 2.0}}, "dispatch.alpha must be from 0 to 1"),
        ({"dispatch": {"rule": "magic"}}, "dispatch.rule must be one of"),
        ({"policy": {"name": "magic"}}, "policy.name must be one of"),
        ({"defaultClass": "x"}, "defaultClass 'x' is not among classes"),
        ({"tenants": [{"name": "a", "maxUrgency": 9}]}, "maxUrgency must be from 0 to 4"),
        ({"store": {"url": "http://x"}}, "store.url must start with"),
        (
            {"workflows": [{"name": "w", "stages": [{"name": "a", "after": ["b"]}, {"name": "b", "after": ["a"]}]}]},
            "workflows[w].stages: stage",
        ),
        ([], "the settings must be a mapping"),
    ],
)
def test_a_wrong_setting_is_named(document: Any, says: str) -> None:
    with pytest.raises(settings_decoder.BadSettings) as caught:
        gateway_settings.from_mapping(document)
    assert says in str(caught.value)


def test_settings_come_from_yaml_and_the_environment(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("queue: {ttl: 1m30s}\ndispatch: {cap: null, alpha: 1}\nclasses: [{name: chat, ttft: 60ms}]\n")
    told = gateway_settings.load(path, {"TIDEGATE_STORE_PASSWORD": "secret", "TIDEGATE_STORE_URL": "redis://x"})
    assert (told.queue.ttl_s, told.dispatch.cap, told.dispatch.alpha) == (90.0, None, 1.0)
    assert told.classes[0].ttft_s == 0.06
    assert (told.store.url, told.store.password) == ("redis://x", "secret")
    with pytest.raises(settings_decoder.BadSettings, match="cannot read"):
        gateway_settings.load(tmp_path / "nowhere.yaml", {})


def test_every_setting_has_a_default_but_names_and_addresses() -> None:
    assert gateway_settings.from_mapping({}) == gateway_settings.Settings()
    assert gateway_settings.Settings().listen.host == gateway_settings.Settings().listen.admin_host == "127.0.0.1"
    assert gateway_settings.Settings().dispatch.beta == 300.0, "what docs/benchmarks.md measures"
    assert dataclasses.is_dataclass(gateway_settings.Settings)
