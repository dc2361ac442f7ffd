"""A large body that can be no call is refused while it arrives, and no body that can be one."""

import asyncio
import collections
import io
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway import tenant_budget
from tidegate_gateway.edge import arriving_body, call_requests
from tidegate_gateway.openai import bounded_json, chat_completions, engine_fields, large_body, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.openai.request_fields import RequestFields

LONG = "x" * 600_000
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
RULES = engine_fields.EngineFields([], None, ())


def seen(raw: bytes, block_bytes: int = large_body.BLOCK_BYTES) -> int:
    """The bytes that are looked at. Raises `BadRequest`."""
    body, blocks = large_body.LargeBody(), list[bytes]()
    try:
        for at in range(0, len(raw), block_bytes):
            blocks.append(raw[at : at + block_bytes])
            body.add(blocks[-1], blocks)
    except BadRequest as error:
        error.seen = body.seen  # type: ignore[attr-defined]
        raise
    return body.seen


def check(raw: bytes) -> None:
    """What is checked of a body that has come as a whole. Raises `BadRequest`."""
    request = parsed_request.from_body(chat_completions.ENDPOINT, parsed_request.decoded(raw), RequestFields())
    RULES.check(chat_completions.ENDPOINT, request.body, None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": ["x"] * 1_000_000}, "it has more than 65536 texts"),
        ({"stop": ["\\"] * 1_000_000}, "it has more than 65536 texts"),
        ({"logit_bias": {str(number): 1 for number in range(200_000)}}, "it has more than 65536 texts"),
        ({"guided_regex": LONG}, "guided_regex is larger than 65536 bytes"),
        ({"guided_regex": 'x"' * 40 + LONG}, "guided_regex is larger than 65536 bytes"),
        ({"unknown": LONG}, "unknown is larger than 65536 bytes"),
        ({"structured_outputs": {"regex": LONG}}, "structured_outputs is larger than 65536 bytes"),
        ({"response_format": {"json_schema": {"schema": {"x": LONG}}}}, "response_format is larger than 65536 bytes"),
        ({"suffix": 12 * LONG}, "suffix is larger than 1048576 bytes"),
    ],
)
def test_a_body_that_can_be_no_call_is_refused_after_a_part_of_it(fields: dict[str, Any], says: str) -> None:
    raw = orjson.dumps(HELLO | fields, option=orjson.OPT_INDENT_2 if "unknown" in fields else None)
    with pytest.raises(BadRequest, match=says) as refused:
        seen(raw)
    assert refused.value.seen < len(raw)  # type: ignore[attr-defined]
    assert refused.value.__cause__ is None, "its frames would keep the body"
    with pytest.raises(BadRequest):
        check(raw)


@pytest.mark.parametrize(
    "raw",
    [
        orjson.dumps({"model": "fake", "messages": [{"role": "user", "content": LONG}]}),
        orjson.dumps({"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
        orjson.dumps(
            {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "guided_regex": LONG}]}]}
        ),
        orjson.dumps(HELLO | {"messages": [{"role": "user", "content": 'a "quoted" word' * 60_000}]}),
        orjson.dumps(HELLO | {"suffix": LONG}),
        orjson.dumps(HELLO)[:-1] + b',"guided_regex":"x"' + b" " * 600_000 + b"}",
        orjson.dumps(HELLO)[:-1] + b',"guided_regex":"x\\\\"' + b" " * 600_000 + b"}",
        orjson.dumps(HELLO | {"kv_transfer_params": {"x": LONG}}),
        orjson.dumps(HELLO | {"session_id": LONG}),
        orjson.dumps(HELLO | {"messages": [{"role": "user", "content": 'a "word" in 999 bytes'.ljust(999) * 16_000}]}),
        orjson.dumps(HELLO)[:-1] + b',"guided_regex":"' + b"\\u0041" * 65_000 + b'"}',
        b'{"guided_regex":"x","model":"fake","messages":[{"role":"user","content":"' + LONG.encode() + b'"}]}',
    ],
)
def test_a_large_body_that_can_be_a_call_passes(raw: bytes) -> None:
    assert seen(raw) == len(raw)
    check(raw)


def test_an_array_of_token_ids_passes() -> None:
    raw = orjson.dumps({"model": "fake", "prompt": list(range(500_000))})
    assert seen(raw) == len(raw)


TEXTS = st.sampled_from([LONG, "x", '"', "\\", ":", ",", '{"guided_regex":"', '\\"' * 200_000, "", LONG + '"'])
NAMES = st.sampled_from(
    [
        "guided_regex",
        "suffix",
        "content",
        "text",
        "x",
        "messages",
        'a"b',
        "structured_outputs",
        "priority",
        "vllm_xargs",
    ]
)
VALUES = st.recursive(
    TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.integers(large_body.BLOCK_BYTES, 3 * large_body.BLOCK_BYTES),
    st.booleans(),
)
def test_what_is_refused_while_it_arrives_is_refused_as_a_whole_too(
    fields: dict[str, Any], block_bytes: int, is_indented: bool
) -> None:
    raw = orjson.dumps(HELLO | fields, option=orjson.OPT_INDENT_2 if is_indented else None)
    try:
        seen(raw, block_bytes)
    except BadRequest:
        with pytest.raises(BadRequest):
            check(raw)


def test_small_chunks_of_a_call_count_however_often_it_is_looked_at() -> None:
    body = arriving_body.ArrivingBody(tenant_budget.TenantBudget(2**30).hold())
    body.begin(most_bytes=2**23, small_pieces=1024, is_call=True)
    large = large_body.BLOCK_BYTES * b"x"
    for piece in [*1000 * [b"x"], large, *1000 * [b"x"], large, *1000 * [b"x"]]:
        body.add(piece)
    with pytest.raises(BadRequest, match="chunks that are too small"):
        collections.deque(map(body.add, 2000 * [b"x"]), maxlen=0)


async def test_the_rest_of_a_refused_body_need_not_come(up: Any) -> None:
    raw = orjson.dumps(HELLO | {"stop": ["x"] * 1_000_000})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw)
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + raw[: len(raw) // 4])
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"more than 65536 texts" in answer
        assert client.gateway.bodies.used == 0
        assert not engine.bodies


async def test_a_large_body_is_counted_once(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        counted, loads = list[int](), bounded_json.loads
        monkeypatch.setattr(
            bounded_json, "loads", lambda raw, most_parts: counted.append(len(raw)) or loads(raw, most_parts=most_parts)
        )
        long = [{"role": "user", "content": LONG}]
        status, _, _ = await client.ask(messages=long)
        assert status == 200
        assert engine.bodies[0]["messages"] == long
        assert max(counted, default=0) < len(LONG)


async def test_a_body_has_a_bounded_number_of_values_and_of_lists_on_each_wire(up: Any) -> None:
    many = {f"f{number}": [number] for number in range(parsed_request.MOST_LISTS)}
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.ask(**many)
        assert (status, answer["error"]["message"]) == (
            400,
            "the body has more than 40 fields that are lists or objects",
        )
        raw = orjson.dumps(HELLO | {"numbers": [1] * 700_000})
        async with client.http.post(client.url + "/v1/chat/completions", data=io.BytesIO(raw)) as reply:
            assert reply.status == 400
            assert "it has more than 600000 values" in (await reply.json())["error"]["message"]
        assert not engine.bodies
    requests = call_requests.CallRequests(1)
    with pytest.raises(BadRequest, match="more than 600000 values"):
        await requests.parsed(chat_completions.ENDPOINT, raw, RequestFields(), tenant="a", is_costly=True)


async def test_other_requests_are_served_between_two_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the steps of a body take, the next body waits."""
    rests, slept = list[float](), asyncio.sleep
    monkeypatch.setattr(call_requests.asyncio, "sleep", lambda seconds: (rests.append(seconds), slept(0))[1])
    requests, raw = call_requests.CallRequests(1), orjson.dumps(HELLO | {"x": [1] * 200_000})
    for _ in range(2):
        await requests.parsed(chat_completions.ENDPOINT, raw, RequestFields(), tenant="a", is_costly=True)
    assert len(rests) == 4
    assert 0 < min(rests[0], rests[2]) <= call_requests.LONGEST_REST_S
    for refused, steps in ((orjson.dumps(HELLO | {"x": [1] * 200_000, "model": 1}), 2), (raw[:-1], 1)):
        rests.clear()
        with pytest.raises(BadRequest):
            await requests.parsed(chat_completions.ENDPOINT, refused, RequestFields(), tenant="a", is_costly=True)
        assert len(rests) == steps
        assert rests[0] > 0
