"""Parsing and rewriting of requests, over generated input: a wrong one is a `BadRequest`, never another exception."""

import contextlib
import itertools
import sys
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import stage_declaration
from tidegate_gateway.openai import (
    chat_completions,
    completions,
    endpoint,
    endpoint_registry,
    engine_body,
    error_table,
    http_headers,
    parsed_request,
    responses,
)
from tidegate_gateway.workflows import workflow_declaration
from tidegate_policy import labels
from tidegate_policy.model import Call, CallId

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "vllm_xargs", "priority", "x"]
)
NAMES = st.sampled_from([name for names in http_headers.ALIASES.values() for name in names])
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT, COMPLETION, RESPONSES = chat_completions.ENDPOINT, completions.ENDPOINT, responses.ENDPOINT


def call(**fields: Any) -> Call:
    return Call(**({"id": CallId("c"), "arrived_at_s": 100.0, "prompt_tokens": 5, "output_predicted": 9} | fields))


def parse(
    kind: endpoint.Endpoint, headers: dict[str, str], body: object, most_choices: int = 16
) -> parsed_request.ParsedRequest:
    return parsed_request.from_body(kind, body, http_headers.read(headers), most_choices=most_choices)


def written(now: float, wall_s: float, request: parsed_request.ParsedRequest, one: Call, service_s: float) -> Any:
    return orjson.loads(engine_body.write(now, wall_s, request.body, one, service_s, ask_for_usage=request.stream))


@given(raw=st.binary(max_size=200), kind=st.sampled_from(endpoint_registry.ENDPOINTS))
def test_any_bytes_are_a_request_or_a_bad_request(raw: bytes, kind: endpoint.Endpoint) -> None:
    with contextlib.suppress(error_table.BadRequest):
        parsed_request.from_body(kind, parsed_request.decoded(raw), http_headers.read({}))


@given(body=st.dictionaries(KEYS, JSON), headers=st.dictionaries(NAMES, st.text(max_size=30)))
def test_any_json_and_headers_are_a_request_or_a_bad_request(body: dict[str, Any], headers: dict[str, str]) -> None:
    for kind in endpoint_registry.ENDPOINTS:
        with contextlib.suppress(error_table.BadRequest):
            ask = parse(kind, headers, body)
            assert ask.size.choices >= 1
            written(100.0, 1.8e9, ask, call(), 1.0)


@given(
    body=st.dictionaries(st.sampled_from(["id", "template", "deadline_ms", "tenant", "stages", "x"]), JSON)
    | st.fixed_dictionaries(
        {
            "deadline_ms": st.just(1000),
            "stages": st.lists(
                st.fixed_dictionaries(
                    {"name": st.sampled_from("abc")},
                    optional={"after": st.lists(st.sampled_from("abcd")), "parallel": st.integers(-1, 3) | JSON},
                ),
                max_size=5,
            ),
        }
    )
)
def test_any_declaration_is_a_workflow_or_a_bad_request(body: dict[str, Any]) -> None:
    with contextlib.suppress(error_table.BadRequest):
        new = workflow_declaration.declared(workflow_declaration.from_json(body), None, {})
        assert new.deadline_ms >= 1
        assert len({stage.name for stage in new.stages}) == len(new.stages)


@given(extra=st.dictionaries(st.text(max_size=12), JSON, max_size=5))
def test_fields_that_are_not_ours_pass_unchanged(extra: dict[str, Any]) -> None:
    extra = {
        key: value for key, value in extra.items() if key not in {*HELLO, *engine_body.ENGINE_KNOBS, "vllm_xargs", "n"}
    }
    extra = {key: value for key, value in extra.items() if key not in {"stream", "stream_options"} and "max" not in key}
    sent = written(100.0, 1.8e9, parse(CHAT, {}, {**HELLO, **extra}), call(), 1.0)
    assert {key: sent[key] for key in (*HELLO, *extra)} == orjson.loads(orjson.dumps({**HELLO, **extra}))


@given(arguments=st.dictionaries(st.text(max_size=8) | st.sampled_from(["tg.urgency", "tg.x"]), JSON, max_size=5))
def test_no_client_sets_our_labels(arguments: dict[str, Any]) -> None:
    ask = parse(CHAT, {}, {**HELLO, "vllm_xargs": arguments})
    sent = written(100.0, 1.8e9, ask, call(urgency=3), 1.0)["vllm_xargs"]
    ours = {key: value for key, value in sent.items() if key.startswith(labels.PREFIX)}
    assert ours == labels.write(100.0, call(urgency=3))


@pytest.mark.parametrize("what", sorted(set(http_headers.ALIASES) - {"traceparent"}))
def test_every_name_of_a_field_is_read(what: str) -> None:
    field = {"slo_ttft": "ttft_s", "slo_tpot": "tpot_s", "deadline": "deadline_s"}
    for name in http_headers.ALIASES[what]:
        headers = http_headers.headers_of({"x-tidegate-workflow": "1", name: "1"}.items())
        found = getattr(parse(CHAT, headers, HELLO).fields, field.get(what, what))
        assert str(found) in {"1", "0.001"}


@pytest.mark.parametrize("what", sorted(set(http_headers.ALIASES) - {"traceparent", "session"}))
def test_names_of_a_field_that_disagree_are_refused_in_any_order(what: str) -> None:
    for one, other in itertools.permutations(http_headers.ALIASES[what], 2):
        http_headers.headers_of([(one, "1"), (other, "1")])
        with pytest.raises(error_table.BadRequest, match=f"{one} and {other} are names of one field"):
            http_headers.headers_of([(one, "1"), (other, "2")])


def test_bounds_count_the_tenant_for_whom_the_request_counts() -> None:
    pairs = [("x-gateway-inference-fairness-id", "victim"), ("x-tidegate-tenant", "mine")]
    assert http_headers.named_tenant(pairs) == "mine"
    assert http_headers.named_tenant(pairs[:1]) == "victim"
    assert http_headers.named_tenant([("x", "y")]) == ""


def test_our_name_of_a_session_counts_first() -> None:
    names = http_headers.ALIASES["session"]
    headers = http_headers.headers_of([(name, str(index)) for index, name in reversed(list(enumerate(names)))])
    assert parse(CHAT, headers, HELLO).fields.session == "0"


def test_the_sooner_a_call_must_start_the_lower_its_priority() -> None:
    ask = parse(CHAT, {}, HELLO)
    calls = [call(due_at_s=105.0), call(due_at_s=110.0), call(due_at_s=None)]
    sent = [written(100.0, 1.8e9, ask, item, 1.0)["priority"] for item in calls]
    assert sent == sorted(sent)
    assert sent[1] - sent[0] == 5000
    later = written(101.0, 1.8e9 + 1, ask, calls[0], 1.0)["priority"]
    assert later == sent[0], "the latest start does not depend on when it is written"
    longer = written(100.0, 1.8e9, ask, calls[0], 3.0)["priority"]
    assert longer == sent[0] - 2000


def test_sizes_are_counted_over_all_shapes_of_prompt() -> None:
    def size(kind: endpoint.Endpoint, **body: Any) -> endpoint.RequestSize:
        return parse(kind, {}, {"model": "m", **body}).size

    def ask(kind: endpoint.Endpoint, **body: Any) -> tuple[int, int]:
        found = size(kind, **body)
        return found.characters, found.choices

    assert ask(COMPLETION, prompt="abcd") == (4, 1)
    assert ask(COMPLETION, prompt=["ab", "cde"], n=2) == (5, 4)
    assert ask(COMPLETION, prompt=[1, 2, 3]) == (12, 1)
    assert ask(COMPLETION, prompt=[[1], [2, 3]]) == (12, 2)
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": {"url": "x"}}]
    found = size(CHAT, messages=[{"role": "user", "content": parts}])
    assert (found.characters, found.media) == (3, 1)
    assert ask(CHAT, messages=[{"role": "assistant", "content": None, "tool_calls": []}]) == (0, 1)


@pytest.mark.parametrize(
    "part", [{}, {"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"image_url": "x"}]
)
def test_parts_without_text_do_not_make_a_short_request_look_long(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part] * 10_000}] * 2
    most = chat_completions.MOST_MEDIA if part.get("image_url") else 0
    found = parse(CHAT, {}, {"model": "m", "messages": messages}).size
    assert (found.characters, found.media) == (0, most)
    given = [{"type": "message", "role": "user", "content": [part] * 10_000}] * 2
    found = parse(RESPONSES, {}, {"model": "m", "input": given}).size
    assert (found.characters, found.media) == (0, most)


def test_token_ids_are_bounded_over_all_prompts() -> None:
    half = [1] * (completions.MOST_IDS // 2)
    assert parse(COMPLETION, {}, {"model": "m", "prompt": [half, half]}).size.prompts == 2
    for prompt in ([half, half, [1]], [1] * (completions.MOST_IDS + 1)):
        with pytest.raises(error_table.BadRequest, match="must have at most 500000"):
            parse(COMPLETION, {}, {"model": "m", "prompt": prompt})


def test_a_stage_without_a_name_is_main() -> None:
    assert parse(CHAT, {"x-tidegate-workflow": "w"}, HELLO).fields.stage == "main"
    with pytest.raises(error_table.BadRequest, match="x-tidegate-workflow"):
        parse(CHAT, {"x-tidegate-stage": "s"}, HELLO)


def test_a_call_is_bounded_in_sequences_not_in_choices_alone() -> None:
    def sequences(prompts: int, n: int) -> int:
        body = {"model": "m", "prompt": ["x"] * prompts, "n": n}
        return parse(COMPLETION, {}, body, most_choices=16).size.choices

    assert (sequences(16, 1), sequences(8, 2), sequences(1, 16)) == (16, 16, 16)
    for prompts, n in ((17, 1), (9, 2), (2000, 16)):
        with pytest.raises(error_table.BadRequest, match="n times the number of prompts must be at most 16") as caught:
            sequences(prompts, n)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("stages", "param"),
    [
        ([{"name": "a"}, {"name": "b", "after": ["a"] * 2_200_000}], "stages[1].after"),
        ([{"name": "a"}, {"name": "b", "after": ["a", "a"]}], "stages[1].after"),
        ([{"name": f"s{i}"} for i in range(stage_declaration.MOST_STAGES + 1)], "stages"),
        ([{"name": f"s{i}", "after": [f"s{j}" for j in range(i)]} for i in range(100)], "stages"),
        ([{"name": "x" * 120 + str(i), "after": ["x" * 120 + str(i - 1)] if i else []} for i in range(200)], "stages"),
    ],
    ids=["one name 2.2 million times", "one name twice", "too many stages", "too many edges", "long names"],
)
def test_a_declaration_is_bounded_in_stages_and_in_names(stages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(error_table.BadRequest) as caught:
        workflow_declaration.from_json({"deadline_ms": 60_000, "stages": stages})
    assert caught.value.param == param


def test_a_long_prompt_waits_as_json_and_reaches_the_engine_unchanged() -> None:
    """Parsed token ids take fifteen times the memory of their JSON, for as long as the call waits."""
    body = {
        "model": "m",
        "prompt": list(range(1_000, 21_000)),
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "stream": True,
        "stream_options": {"include_usage": False},
        "vllm_xargs": {"mine": 1},
    }
    request = parse(COMPLETION, {}, body)
    before = written(100.0, 0.0, request, call(), 1.0)
    held = sum(map(sys.getsizeof, request.body["prompt"]))
    engine_body.pack(request.body)
    assert written(100.0, 0.0, request, call(), 1.0) == before
    assert held > 3 * len(orjson.dumps(request.body["prompt"]))
    with pytest.raises(error_table.BadRequest, match="nested too deeply"):
        engine_body.pack({"tools": nested(300)})


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found
