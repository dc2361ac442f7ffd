"""Parsing and rewriting of requests, over generated input: a wrong one is a `BadRequest`, never another exception."""

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway.openai import error_table, parsed_request
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
NAMES = st.sampled_from([name for names in parsed_request.ALIASES.values() for name in names])
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def call(**fields: Any) -> Call:
    return Call(**({"id": CallId("c"), "arrival_s": 100.0, "prompt_tokens": 5, "output_predicted": 9} | fields))


@given(raw=st.binary(max_size=200), kind=st.sampled_from(["chat", "completion"]))
def test_any_bytes_are_a_request_or_a_bad_request(raw: bytes, kind: parsed_request.Kind) -> None:
    with contextlib.suppress(error_table.BadRequest):
        parsed_request.read(kind, {}, raw)


@given(body=st.dictionaries(KEYS, JSON), headers=st.dictionaries(NAMES, st.text(max_size=30)))
def test_any_json_and_headers_are_a_request_or_a_bad_request(body: dict[str, Any], headers: dict[str, str]) -> None:
    for kind in ("chat", "completion"):
        with contextlib.suppress(error_table.BadRequest):
            ask = parsed_request.read_body(kind, headers, body)
            assert ask.choices >= 1
            orjson.loads(parsed_request.write(100.0, 1.8e9, ask, call(), 1.0))


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
        new = workflow_declaration.declared(body, None, {})
        assert new.deadline_ms >= 1
        assert len({stage.name for stage in new.stages}) == len(new.stages)


@given(extra=st.dictionaries(st.text(max_size=12), JSON, max_size=5))
def test_fields_that_are_not_ours_pass_unchanged(extra: dict[str, Any]) -> None:
    extra = {
        key: value
        for key, value in extra.items()
        if key not in {*HELLO, *parsed_request.ENGINE_KNOBS, "vllm_xargs", "n"}
    }
    extra = {key: value for key, value in extra.items() if key not in {"stream", "stream_options"} and "max" not in key}
    sent = orjson.loads(
        parsed_request.write(100.0, 1.8e9, parsed_request.read_body("chat", {}, {**HELLO, **extra}), call(), 1.0)
    )
    assert {key: sent[key] for key in (*HELLO, *extra)} == orjson.loads(orjson.dumps({**HELLO, **extra}))


@given(arguments=st.dictionaries(st.text(max_size=8) | st.sampled_from(["tg.urgency", "tg.x"]), JSON, max_size=5))
def test_no_client_sets_our_labels(arguments: dict[str, Any]) -> None:
    ask = parsed_request.read_body("chat", {}, {**HELLO, "vllm_xargs": arguments})
    sent = orjson.loads(parsed_request.write(100.0, 1.8e9, ask, call(urgency=3), 1.0))["vllm_xargs"]
    ours = {key: value for key, value in sent.items() if key.startswith(labels.PREFIX)}
    assert ours == labels.write(100.0, call(urgency=3))


@pytest.mark.parametrize("what", sorted(parsed_request.ALIASES))
def test_our_header_wins_over_its_aliases(what: str) -> None:
    names = parsed_request.ALIASES[what]
    values = {name: str(i + 1) for i, name in enumerate(names)}
    field = {
        "class": "slo_class",
        "ttft": "ttft_s",
        "tpot": "tpot_s",
        "deadline": "deadline_s",
        "request": "request_id",
    }
    headers = {"x-tidegate-workflow": "w", **values}
    found = getattr(parsed_request.read_body("chat", headers, HELLO), field.get(what, what))
    assert str(found) in {"1", "0.001"}


def test_the_sooner_a_call_must_start_the_lower_its_priority() -> None:
    ask = parsed_request.read_body("chat", {}, HELLO)
    calls = [call(due_s=105.0), call(due_s=110.0), call(due_s=None)]
    sent = [orjson.loads(parsed_request.write(100.0, 1.8e9, ask, item, 1.0))["priority"] for item in calls]
    assert sent == sorted(sent)
    assert sent[1] - sent[0] == 5000
    later = orjson.loads(parsed_request.write(101.0, 1.8e9 + 1, ask, calls[0], 1.0))["priority"]
    assert later == sent[0], "the latest start does not depend on when it is written"
    longer = orjson.loads(parsed_request.write(100.0, 1.8e9, ask, calls[0], 3.0))["priority"]
    assert longer == sent[0] - 2000


def test_sizes_are_counted_over_all_shapes_of_prompt() -> None:
    def ask(kind: parsed_request.Kind, **body: Any) -> tuple[int, int]:
        found = parsed_request.read_body(kind, {}, {"model": "m", **body})
        return found.characters, found.choices

    assert ask("completion", prompt="abcd") == (4, 1)
    assert ask("completion", prompt=["ab", "cde"], n=2) == (5, 4)
    assert ask("completion", prompt=[1, 2, 3]) == (12, 1)
    assert ask("completion", prompt=[[1], [2, 3]]) == (12, 2)
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert ask("chat", messages=[{"role": "user", "content": parts}])[0] > 1000
    assert ask("chat", messages=[{"role": "assistant", "content": None, "tool_calls": []}]) == (0, 1)


def test_a_stage_without_a_name_is_main() -> None:
    assert parsed_request.read_body("chat", {"x-tidegate-workflow": "w"}, HELLO).stage == "main"
    with pytest.raises(error_table.BadRequest, match="x-tidegate-workflow"):
        parsed_request.read_body("chat", {"x-tidegate-stage": "s"}, HELLO)


def test_a_call_is_bounded_in_sequences_not_in_choices_alone() -> None:
    def sequences(prompts: int, n: int) -> int:
        body = {"model": "m", "prompt": ["x"] * prompts, "n": n}
        return parsed_request.read_body("completion", {}, body, most_choices=16).choices

    assert (sequences(16, 1), sequences(8, 2), sequences(1, 16)) == (16, 16, 16)
    for prompts, n in ((17, 1), (9, 2), (2000, 16)):
        with pytest.raises(error_table.BadRequest, match="n times the number of prompts must be at most 16") as caught:
            sequences(prompts, n)
        assert caught.value.param == "prompt"
