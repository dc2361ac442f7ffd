"""A gateway that drains hands over its relQueries while its last calls still run."""

from typing import Any

import pytest
import relquery_requests

import fake_engine
from tidegate_gateway.relqueries import relquery_runner

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
