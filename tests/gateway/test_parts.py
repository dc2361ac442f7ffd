"""The small pure parts: event streams, metrics pages, error rows, settings."""

import dataclasses
import itertools
import pathlib
import sys
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import gateway_settings, settings_decoder
from tidegate_gateway.engines import metrics_scrape
from tidegate_gateway.openai import bounded_json, completions, endpoint, error_table, event_stream
from tidegate_policy.model import DropReason

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b": ping\n\n"
    b'data: {"choices":[{"text":"b\\n"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'


def tapped(*, wants_usage: bool = False, **bounds: Any) -> event_stream.Tap:
    kind = completions.ENDPOINT
    assert kind.stream is not None
    return event_stream.Tap(kind.stream, event_stream.Meter(endpoint=kind, **bounds), wants_usage=wants_usage)


@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=8), wants=st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], wants: bool) -> None:
    tap, out = tapped(wants_usage=wants), b""
    bounds = [0, *sorted(cuts), len(EVENTS)]
    for start, end in itertools.pairwise(bounds):
        block = tap.feed(EVENTS[start:end])
        assert block == b"" or block.endswith(b"\n\n"), "only whole events leave"
        out += block
    assert out == (EVENTS if wants else EVENTS.replace(USAGE, b""))
    assert (tap.meter.tokens, tap.meter.prompt_tokens, tap.meter.output_tokens, tap.meter.done) == (2, 3, 2, True)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_events_or_not_events(data: bytes) -> None:
    tap = tapped(wants_usage=False)
    try:
        block = tap.feed(data)
    except event_stream.NotEvents:
        return
    assert data.startswith(block)


@pytest.mark.parametrize(
    ("usage", "prompt", "output"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 150_000_000_000_000_000}, 7, 40),
        ({"prompt_tokens": 2**63 - 1, "completion_tokens": 3}, endpoint.MOST_TOKENS, 3),
        ({"prompt_tokens": 7, "completion_tokens": 1.5e17}, None, None),
        ({"prompt_tokens": 7, "completion_tokens": True}, None, None),
        ({"prompt_tokens": -7, "completion_tokens": 3}, None, None),
        ({"prompt_tokens": 7}, None, None),
        ([], None, None),
    ],
)
def test_usage_never_exceeds_what_the_request_can_have(usage: Any, prompt: int | None, output: int | None) -> None:
    tap = tapped(choices=2, max_tokens=20)
    tap.feed(b'data: {"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n")
    assert (tap.meter.prompt_tokens, tap.meter.output_tokens) == (prompt, output)


def test_an_event_without_end_is_given_up() -> None:
    tap = tapped(wants_usage=False)
    tap.feed(b"x" * event_stream.MAX_EVENT_BYTES)
    with pytest.raises(event_stream.NotEvents):
        tap.feed(b"x")


def test_a_long_event_that_comes_byte_by_byte_is_not_searched_again_and_again() -> None:
    tap = tapped()
    tap.feed(b'data: {"choices":[{"text":"' + b"x" * (event_stream.MAX_EVENT_BYTES - 10_000))
    for _ in range(5000):
        assert tap.feed(b"y") == b""
    tracemalloc.start()
    assert tap.feed(b"y") == b""
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000, "the event is not copied for each byte"
    whole = tap.feed(b'"}]}\n')
    assert whole == b""
    assert tap.feed(b"\n").endswith(b'y"}]}\n\n')
    assert tap.meter.tokens == 1


def test_a_long_event_is_not_copied_for_each_usage_event_behind_it() -> None:
    tap, calls = tapped(), list[str]()
    start = b'data:{"a":"' + b"x" * 2**20

    def profile(_frame: object, event: str, function: Any) -> None:
        text = getattr(function, "__self__", b"")
        if event == "c_call" and isinstance(text, bytes) and len(text) >= 2**20:
            calls.append(function.__name__)

    assert tap.feed(start) == b""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        block = tap.feed(b'"}\n\n' + b'data:{"choices":[]}\n\n' * 700 + b": ping\n\n")
    finally:
        sys.setprofile(before)
    assert block == start + b'"}\n\n: ping\n\n'
    assert len(calls) < 50, "steps whose time grows with the long event"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("line", [b"a", b":", b"data:", b"id: 5"])
@pytest.mark.parametrize("first", [b'data:{"choices":[{}]}', b"event: x", b":", b"id: 5"])
def test_an_event_of_very_many_lines_is_given_up(first: bytes, line: bytes, end: bytes) -> None:
    with pytest.raises(event_stream.NotEvents, match="lines"):
        tapped().feed(end.join([first, *[line] * 20_000, b":}"]) + 2 * end)
    event = end.join([first, *[line] * 500, b":}"]) + 2 * end
    assert tapped().feed(event) == event


def test_many_events_in_a_block_are_no_event_of_many_lines() -> None:
    block = b'event: x\nid: 5\ndata: {"choices":[{}]}\n\n' * 800
    assert tapped().feed(block) == block


@pytest.mark.parametrize("raw", [b"[" * 4_000_000, b"[]," * 2_000_000, b'{"usage":' + b"[]," * 2_000_000])
def test_documents_of_engines_with_very_many_parts_are_not_parsed(raw: bytes) -> None:
    with pytest.raises(bounded_json.TooManyParts):
        bounded_json.of_engine(raw)
    message, _ = error_table.engine_message(raw)
    assert len(message) <= 500
    with pytest.raises(event_stream.NotEvents):
        tapped().feed(b'data: {"choices":[],"usage":' + raw[:3_000_000] + b"}\n\n")


def test_a_large_document_of_an_engine_is_not_parsed_although_it_has_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = b'"usage":{"prompt_tokens":3}'
    text = b"a" * bounded_json.ENGINE_BYTES
    monkeypatch.setattr(bounded_json, "loads", lambda raw, most_parts: pytest.fail("it is parsed"))
    with pytest.raises(bounded_json.TooManyParts):
        bounded_json.of_engine(b'{"choices":[{"text":"' + text + b'"}],' + usage + b"}")
    assert bounded_json.usage_of(b'{"choices":[{"text":"' + text + b'"}],' + usage + b"}") == {"prompt_tokens": 3}
    assert bounded_json.usage_of(b"{" + usage + b',"choices":[{"text":"' + text + b'"}]}') is None


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":3,"details":{"cached_tokens":1}}}', 3),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}],"usage": {"prompt_tokens": 3}, "id": "x"}', 3),
        (b'{"choices":[{"text":"\\"usage\\":{}"}]}', None),
        (b'{"usage":', None),
        (b'{"usage":{' + b" " * 9000 + b"}}", None),
    ],
)
def test_the_usage_of_an_answer_that_is_not_parsed_is_found(raw: bytes, usage: int | None) -> None:
    found = bounded_json.usage_of(raw)
    assert (found["prompt_tokens"] if isinstance(found, dict) else found) == usage


@given(page=st.binary(max_size=500))
def test_any_metrics_page_can_be_read(page: bytes) -> None:
    load = metrics_scrape.read(page)
    assert load.running is None or load.running >= 0


def test_every_drop_reason_has_its_row_and_its_sentence() -> None:
    for reason in DropReason:
        error = error_table.Shed(reason)
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
        ({"queue": {"ttl": 60}}, "queue.ttl must be a duration: 60 has no unit; write 60ms or 60s"),
        ({"queue": {"ttl": "60"}}, "queue.ttl must be a duration: 60 has no unit; write 60ms or 60s"),
        (
            {"classes": [{"name": "c", "tpot": 60}]},
            "classes[0].tpot must be a duration: 60 has no unit; write 60ms or 60s",
        ),
        ({"queue": []}, "queue must be a mapping"),
        ({"engines": [{}]}, "engines[0].url is required"),
        ({"engines": [{"url": "host:80"}]}, "must start with http"),
        ({"dispatch": {"cap": 0}}, "dispatch.cap must be at least 1"),
        ({"queue": {"maxRequests": -1}}, "queue.maxRequests must be 0"),
        ({"health": {"interval": "0s"}}, "health.interval must be more than 0s"),
        ({"health": {"unhealthyAfter": 0}}, "health.unhealthyAfter must be at least 1"),
        ({"timeouts": {"nextToken": "0s"}}, "timeouts.nextToken must be more than 0s"),
        ({"dispatch": {"alpha": 2.0}}, "dispatch.alpha must be from 0 to 1"),
        ({"dispatch": {"rule": "magic"}}, "dispatch.rule 'magic' is not a dispatch rule; known are bounded-affinity"),
        ({"policy": {"name": "magic"}}, "policy.name 'magic' is not a policy; known are"),
        (
            {"policy": {"parameters": [{"policy": "magic", "name": "share", "value": 1}]}},
            "policy.parameters[0]: unknown policy 'magic'; known are",
        ),
        (
            {"policy": {"parameters": [{"policy": "two-lane", "name": "threshold_s", "value": 0}]}},
            "policy.parameters[0]: parameter 'threshold_s' of policy 'two-lane' must be between",
        ),
        (
            {"policy": {"parameters": [{"policy": "two-lane", "name": "threshold_s", "value": 2}] * 2}},
            "policy.parameters has the same parameter twice",
        ),
        ({"tenants": [{"name": "t", "tokensPerMinute": 5}]}, "tenants[t].tokensPerMinute needs a store"),
        ({"defaultClass": "x"}, "defaultClass 'x' is not among classes"),
        ({"tenants": [{"name": "a", "maxUrgency": 9}]}, "maxUrgency must be from 0 to 4"),
        ({"store": {"url": "http://x"}}, "store.url must start with"),
        (
            {"workflows": [{"name": "w", "stages": [{"name": "a", "after": ["b"]}, {"name": "b", "after": ["a"]}]}]},
            "workflows[w].stages are wrong: the stages wait for each other",
        ),
        ({"queue": {"max_request": 1}}, "queue.max_request is not a setting; did you mean maxRequests? known are"),
        ({"policy": {"name": "urgncy"}}, "did you mean urgency?"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, "tenants[a].name occurs 2 times"),
        ({"classes": [{"name": "a", "weight": 0}]}, "classes[a].weight must be greater than 0"),
        ({"listen": {"adminPort": 70000}}, "listen.adminPort must be from 0 to 65535"),
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
    loaded = gateway_settings.load(path, {"TIDEGATE_STORE_PASSWORD": "secret", "TIDEGATE_STORE_URL": "redis://x"})
    assert (loaded.queue.ttl_s, loaded.dispatch.cap, loaded.dispatch.alpha) == (90.0, None, 1.0)
    assert loaded.classes[0].ttft_s == 0.06
    assert (loaded.store.url, loaded.store.password) == ("redis://x", "secret")
    with pytest.raises(settings_decoder.BadSettings, match="cannot read"):
        gateway_settings.load(tmp_path / "nowhere.yaml", {})


def test_every_setting_has_a_default_but_names_and_addresses() -> None:
    assert gateway_settings.from_mapping({}) == gateway_settings.Settings()
    assert gateway_settings.Settings().listen.host == gateway_settings.Settings().listen.admin_host == "127.0.0.1"
    assert gateway_settings.Settings().dispatch.beta == 300.0, "what docs/benchmarks-dispatch.md measures"
    assert dataclasses.is_dataclass(gateway_settings.Settings)
