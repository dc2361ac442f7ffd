"""What goes on while something else ends: relQueries of a gateway that drains, and the other rows of one that fails."""

from typing import Any

import pytest
import relquery_requests

import fake_engine
from tidegate_gateway.relqueries import relquery_runner, row_results

PATH = "/v1/relqueries"


async def _is_completed(client: Any, name: str) -> bool:
    _, shown, _ = await client.send("GET", f"{PATH}/{name}")
    return bool(shown["status"] == "completed")


async def test_a_relquery_without_rows_under_way_goes_on_elsewhere_while_another_one_has_a_row(
    up: Any, until: Any
) -> None:
    pool, one_row = "drains-idle", {"relqueries": {"floor": 1}, "dispatch": {"cap": 1}}
    async with (
        fake_engine.engine(hang=True) as stuck,
        fake_engine.engine() as quick,
        up(stuck, pool=pool, **one_row) as first,
    ):
        _, busy, _ = await first.send("POST", PATH, json=relquery_requests.body(10, stream=False))
        await until(lambda: stuck.running == 1)
        _, idle, _ = await first.send("POST", PATH, json=relquery_requests.body(10, stream=False))
        async with up(quick, pool=pool) as other:
            first.gateway.draining = True
            await until(lambda: _is_completed(other, idle["id"]))
            assert quick.served == 10
            assert list(first.gateway.relquery_runner._running) == [busy["id"]]
            assert len(stuck.bodies) == 1, "its row goes on"


async def test_rows_that_wait_to_be_sent_again_do_not_wait_at_a_gateway_that_drains(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relquery_runner, "LEAST_RETRY_S", 3600.0)
    monkeypatch.setattr(relquery_runner, "MOST_RETRY_S", 3600.0)
    async with (
        fake_engine.engine(status=500) as broken,
        fake_engine.engine() as quick,
        up(broken, pool="drains-retries", relqueries={"attempts": 50}) as first,
    ):
        _, made, _ = await first.send("POST", PATH, json=relquery_requests.body(10, stream=False))
        await until(lambda: len(broken.bodies) > 0 and first.gateway.placements.in_progress == 0)
        assert first.gateway.relquery_runner.in_flight > 0
        async with up(quick, pool="drains-retries") as other:
            first.gateway.draining = True
            await until(lambda: _is_completed(other, made["id"]))
            assert not first.gateway.relquery_runner.in_flight
            assert quick.served == 10


async def test_a_row_that_fails_unexpectedly_ends_no_other_row(
    up: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relquery_runner, "LEAST_RETRY_S", 0.01)
    read = row_results.read

    def fail_on_one(row: int, reply: Any) -> Any:
        if row == 3:
            raise RuntimeError("a defect")
        return read(row, reply)

    monkeypatch.setattr(row_results, "read", fail_on_one)
    async with fake_engine.engine() as engine, up(engine, relqueries={"attempts": 3}) as client:
        async with client.http.post(client.url + PATH, json=relquery_requests.body(10)) as response:
            found = await relquery_requests.events(response)
        assert found[-2][1]["status"] == "completed"
        rows = {item["row"]: item.get("error") for item in relquery_requests.of_rows(found)}
        assert sorted(rows) == list(range(10))
        assert [row for row, error in rows.items() if error] == [3]
        assert rows[3]["code"] == "internal_error"
        assert engine.served == 9 + 3, "the other rows ran once"
    assert "row 3 failed unexpectedly" in caplog.text
