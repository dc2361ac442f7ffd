"""Answers of engines that can be read and not written, because they are nested deeply, are bad answers of the engine."""

from typing import Any

import orjson
import pytest
import relquery_requests

import fake_engine
from tidegate_gateway.openai import bounded_json, error_table


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": [{"message": {"content": "x"}}], "usage": %s}',
        b'{"choices": [{"message": {"content": "x"}, "logprobs": %s}]}',
        b'{"choices": [{"message": {"content": "x", "tool_calls": %s}}]}',
    ],
)
async def test_a_row_with_a_nested_answer_has_an_error_and_the_relquery_ends(up: Any, answer: bytes) -> None:
    async with fake_engine.engine(garbage=answer % nested(300)) as engine, up(engine) as client:
        url = client.url + "/v1/relqueries"
        async with client.http.post(url, json=relquery_requests.body(10, deadline_ms=20_000)) as response:
            found = await relquery_requests.events(response)
        assert found[-2][1]["status"] == "completed"
        results = relquery_requests.of_rows(found)
        assert {item["error"]["code"] for item in results} == {"engine_failed"}
        assert all("nested too deeply" in item["error"]["message"] for item in results)
        assert len(engine.bodies) == 10


@pytest.mark.parametrize(
    "answer",
    [
        b'{"message": [%s1]}' % (b"1.2345678901234567e-300," * 2000),
        b'{"error": {"message": {"a": 1}, "param": "x"}}',
        b'{"error": {"param": "x"}}',
        b'{"error": "x"}',
        b'{"message": "x", "more": "%s"}' % (b"x" * bounded_json.UNCOUNTED_BYTES),
    ],
    ids=["list", "object", "none", "text", "large"],
)
def test_an_error_of_an_engine_whose_message_is_no_text_or_that_is_large_is_told_by_its_first_bytes(
    answer: bytes,
) -> None:
    assert error_table.engine_message(answer) == (answer[:500].decode(), None)


def test_an_error_of_an_engine_has_its_message_and_parameter() -> None:
    assert error_table.engine_message(b'{"error": {"message": "no", "param": "x"}}') == ("no", "x")
    assert error_table.engine_message(b'{"message": "%s", "param": 5}' % (b"n" * 600)) == ("n" * 500, None)


def test_a_nested_error_of_an_engine_is_told_by_its_first_bytes() -> None:
    answer = b'{"error": {"message": %s}}' % nested(1000)
    assert orjson.loads(answer), "orjson reads it"
    assert error_table.engine_message(answer) == (answer[:500].decode(), None)
