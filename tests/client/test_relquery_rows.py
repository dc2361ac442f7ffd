"""The client helper yields one result for each row, and asks no row twice under the same id."""

import secrets
from typing import Any

import openai

import tidegate_client

TEMPLATE = "Name the capital of {{country}}."
ROWS = [{"country": name} for name in ("Peru", "Chad", "Laos")]


def test_each_row_has_one_result_and_a_second_run_asks_none_again(running_up: Any) -> None:
    name = f"capitals-{secrets.token_hex(4)}"
    with openai.OpenAI(base_url=f"{running_up.url}/v1", api_key="none") as client:
        asked = {"model": "sim", "template": TEMPLATE, "rows": ROWS, "id": name, "deadline_s": 60, "max_tokens": 4}
        first = list(tidegate_client.relquery(client, **asked))  # type: ignore[arg-type]
        again = list(tidegate_client.relquery(client, **asked))  # type: ignore[arg-type]
        record = client.get(f"/relqueries/{name}", cast_to=tidegate_client.RelQueryRecord)
    assert sorted(result.row for result in first) == [0, 1, 2]
    assert all(result.text and result.error is None for result in first)
    assert again == first
    assert record.status == "completed"


async def test_an_async_relquery_gives_the_same(running_up: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running_up.url}/v1", api_key="none") as client:
        results = tidegate_client.async_relquery(client, model="sim", template=TEMPLATE, rows=ROWS, max_tokens=4)
        assert {result.row async for result in results} == {0, 1, 2}
