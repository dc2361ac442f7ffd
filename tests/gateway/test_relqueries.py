"""RelQueries over HTTP: rows stream back as they finish, and a client goes on after a lost connection."""

import asyncio
import secrets
from typing import Any

import orjson
import pytest
import relquery_requests
from redis import asyncio as redis

import fake_engine
from tidegate_gateway.openai import parsed_request
from tidegate_gateway.relqueries import relquery_runner, result_followers, row_results
from tidegate_gateway.store import relquery_store, store_contract

PATH = "/v1/relqueries"


async def submit(client: Any, **options: Any) -> Any:
    async with client.http.post(client.url + PATH, **options) as response:
        assert response.status == 200, await response.text()
        return await relquery_requests.events(response)


async def test_every_row_comes_back_once_between_the_relquery_and_its_end(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        found = await submit(client, json=relquery_requests.body(40))
        first, last = found[0][1], found[-2][1]
        assert found[-1] == (None, None)
        assert (first["object"], first["status"]) == ("relquery", "in_progress")
        assert last["status"] == "completed"
        assert last["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        results = relquery_requests.of_rows(found)
        assert sorted(item["row"] for item in results) == list(range(40))
        assert {(item["text"], item["finish_reason"]) for item in results} == {("w0 w1 ", "length")}
        assert [number for number, _ in found if number is not None] == list(range(1, 41))
        progress = [item for _, item in found if item and item["object"] == "relquery.progress"]
        assert progress[-1]["request_counts"]["completed"] == 40
        prompts = sorted(body["messages"][0]["content"] for body in engine.bodies)
        assert prompts == sorted(f"Say what city {i} is known for." for i in range(40))


@pytest.mark.parametrize("ends", ["by itself", "cancelled"])
async def test_a_stream_of_rows_looks_again_as_soon_as_there_is_a_result(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A stream that nothing wakes would wait for hours here."""
    change = result_followers.ResultFollowers.change
    monkeypatch.setattr(
        result_followers.ResultFollowers, "change", lambda self, seen, within_s: change(self, seen, 3600.0)
    )
    held_s = 0.3 if ends == "by itself" else 3600.0
    async with fake_engine.engine(first_s=held_s) as engine, up(engine) as client, asyncio.timeout(30):
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(3, stream=False))
        place = f"{client.url}{PATH}/{created['id']}"
        async with client.http.get(f"{place}/rows") as response:
            await until(lambda: engine.running == 3)
            if ends == "cancelled":
                await client.http.delete(place)
            found = await relquery_requests.events(response)
        assert len(relquery_requests.of_rows(found)) == (3 if ends == "by itself" else 0)
        assert found[-1] == (None, None)


async def test_one_result_wakes_a_few_streams_those_that_wait_longest_first() -> None:
    followers, woken = result_followers.ResultFollowers(), list[int]()

    async def follow(number: int) -> None:
        await followers.change(0, 3600.0)
        woken.append(number)

    waiting = [asyncio.create_task(follow(number)) for number in range(2 * result_followers.WOKEN)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    followers.on_change()
    await asyncio.gather(*waiting[1 : result_followers.WOKEN + 1])
    assert woken == list(range(1, result_followers.WOKEN + 1))
    await followers.change(0, 3600.0)
    assert followers.changes == 1, "it returns at once: there was a change since"
    await followers.change(1, 0.0)
    followers.on_change()
    await asyncio.gather(*waiting[1:])


async def test_rows_reach_the_engine_as_one_group(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        headers = {"x-tidegate-tenant": "acme", "x-tidegate-urgency": "4", "x-tidegate-deadline-ms": "60000"}
        body = relquery_requests.body(10, endpoint="/v1/completions", temperature=0, priority=-9)
        found = await submit(client, json=body, headers=headers)
        arguments = [body["vllm_xargs"] for body in engine.bodies]
        assert {item["tg.relquery"] for item in arguments} == {found[0][1]["id"]}
        assert {(item["tg.relquery_size"], item["tg.tenant"], item["tg.urgency"]) for item in arguments} == {
            (10, "acme", 4)
        }
        assert all(0 < item["tg.deadline_ms"] <= 60_000 for item in arguments)
        assert engine.bodies[0]["prompt"].startswith("Say what")
        assert (engine.bodies[0]["temperature"], engine.bodies[0]["max_tokens"]) == (0, 2)
        assert all(body["priority"] > 0 for body in engine.bodies)


async def test_a_client_goes_on_after_the_rows_that_it_has(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, created, _ = await client.send("POST", PATH, json=relquery_requests.body(30, stream=False))
        assert (status, created["object"]) == (201, "relquery")
        url = f"{client.url}{PATH}/{created['id']}/rows"
        async with client.http.get(url) as response:
            whole = await relquery_requests.events(response)
        async with client.http.get(url, headers={"Last-Event-ID": "11"}) as response:
            rest = await relquery_requests.events(response)
        assert relquery_requests.of_rows(rest) == relquery_requests.of_rows(whole)[11:]
        async with client.http.get(url + "?after=29", headers={"Accept": "application/x-ndjson"}) as response:
            lines = [orjson.loads(line) for line in (await response.read()).splitlines()]
        assert [item["object"] for item in lines] == ["relquery", "relquery.row", "relquery.progress", "relquery"]
        assert lines[2]["last"] == 30, "JSON lines have no ids, so the progress tells where to go on"
        _, page, _ = await client.send("GET", f"{PATH}/{created['id']}/rows?stream=false&limit=7&after=20")
        assert (len(page["data"]), page["last"], page["has_more"]) == (7, 27, True)
        assert len(engine.bodies) == 30
        status, error, _ = await client.send("GET", f"{PATH}/{created['id']}/rows?after=31")
        assert (status, error["error"]["param"]) == (400, "after")
        assert "after is too large: 31" in error["error"]["message"]


async def test_a_relquery_goes_on_when_its_client_hangs_up(up: Any, until: Any) -> None:
    async with fake_engine.engine(token_s=0.01) as engine, up(engine) as client:
        async with client.http.post(client.url + PATH, json=relquery_requests.body(60)) as response:
            name = response.headers["x-tidegate-relquery"]
            await response.content.readline()

        async def ended() -> bool:
            _, shown, _ = await client.send("GET", f"{PATH}/{name}")
            return bool(shown["status"] == "completed")

        await until(ended)
        assert engine.served == 60


async def test_an_upload_that_breaks_off_leaves_no_rows(
    up: Any, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, pool = relquery_store.RelQueryStore.push, secrets.token_hex(4)

    async def pushed_and_slow(self: Any, upload: str, rows: Any, *, by: str) -> None:
        await push(self, upload, rows, by=by)
        raise store_contract.Slow("the store does not answer")

    monkeypatch.setattr(relquery_store.RelQueryStore, "push", pushed_and_slow)
    server = redis.Redis.from_url(valkey_url)
    async with fake_engine.engine() as engine, up(engine, pool=pool) as client:
        status, _, _ = await client.send("POST", PATH, json=relquery_requests.body(10, stream=False))
        assert status == 503
        assert await server.keys(f"tidegate:v1:{{{pool}}}:relquery:rows:*") == []
    await server.aclose()


async def test_a_cancelled_relquery_leaves_nothing_at_the_engine(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=30) as engine, up(engine) as client:
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(50, stream=False))
        await until(lambda: engine.running > 0)
        status, cancelled, _ = await client.send("DELETE", f"{PATH}/{created['id']}")
        assert (status, cancelled["status"]) == (200, "cancelled")
        await until(lambda: engine.running == 0 and not client.own_backlog())
        _, again, _ = await client.send("DELETE", f"{PATH}/{created['id']}")
        assert again["status"] == "cancelled"
        async with client.http.get(f"{client.url}{PATH}/{created['id']}/rows") as response:
            found = await relquery_requests.events(response)
        assert [item and item["object"] for _, item in found] == ["relquery", "relquery", None]


async def test_a_relquery_that_is_cancelled_half_way_keeps_its_rows_and_sends_no_more(up: Any, until: Any) -> None:
    async with fake_engine.engine(token_s=0.05) as engine, up(engine, relqueries={"window": 8}) as client:
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(400, stream=False))
        place = f"{PATH}/{created['id']}"

        async def recorded() -> bool:
            _, seen, _ = await client.send("GET", place)
            return bool(seen["request_counts"]["completed"] >= 20)

        await until(recorded)
        status, cancelled, _ = await client.send("DELETE", place)
        assert (status, cancelled["status"]) == (200, "cancelled")
        await until(lambda: engine.running == 0 and not client.own_backlog())
        sent = len(engine.bodies)
        _, page, _ = await client.send("GET", f"{place}/rows?stream=false")
        rows = [item["row"] for item in page["data"]]
        assert len(rows) == len(set(rows)) >= 20, "what had ended by then can be read"
        await asyncio.sleep(0.3)
        assert len(engine.bodies) == sent
        assert (await client.send("GET", place))[1]["status"] == "cancelled"


async def test_a_row_that_the_engine_rejects_has_an_error_and_the_others_go_on(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine) as client:
        found = await submit(client, json=relquery_requests.body(10))
        results = relquery_requests.of_rows(found)
        assert len(results) == 10
        assert all(item["text"] is None for item in results)
        assert "as set by the test" in results[0]["error"]["message"]
        assert results[0]["error"]["code"] == "invalid_request"
        assert found[-2][1]["request_counts"] == {"total": 10, "completed": 0, "failed": 10}


async def test_a_row_whose_engine_fails_is_sent_again(up: Any, until: Any) -> None:
    async with fake_engine.engine(status=500) as engine, up(engine, relqueries={"attempts": 50}) as client:
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(10, stream=False))
        await until(lambda: len(engine.bodies) > 3)
        engine.status = 200
        async with client.http.get(f"{client.url}{PATH}/{created['id']}/rows") as response:
            found = await relquery_requests.events(response)
        assert found[-2][1]["request_counts"]["completed"] == 10


async def test_a_relquery_ends_at_its_deadline(up: Any) -> None:
    async with fake_engine.engine(hang=True) as engine, up(engine) as client:
        found = await submit(client, json=relquery_requests.body(10, deadline_ms=400))
        assert found[-2][1]["status"] == "expired"
        assert not relquery_requests.of_rows(found)


async def test_the_same_idempotency_key_gives_the_same_relquery(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        key = {"Idempotency-Key": "k"}
        one = await submit(client, json=relquery_requests.body(10), headers=key)
        two = await submit(client, json=relquery_requests.body(10), headers=key)
        assert one[0][1]["id"] == two[0][1]["id"]
        assert relquery_requests.of_rows(one) == relquery_requests.of_rows(two)
        assert len(engine.bodies) == 10
        status, error, _ = await client.send("POST", PATH, json=relquery_requests.body(11), headers=key)
        assert (status, error["error"]["code"]) == (422, "idempotency_key_reused")
        named = relquery_requests.body(10, id="mine", stream=False)
        status, error, _ = await client.send("POST", PATH, json=named, headers=key)
        assert (status, error["error"]["code"]) == (422, "idempotency_key_reused"), "it names another relQuery"
        assert (await client.send("POST", PATH, json=named))[0] == 201
        status, error, _ = await client.send("POST", PATH, json=named)
        assert (status, error["error"]["code"], error["error"]["param"]) == (409, "relquery_exists", "id")


async def test_tenants_do_not_see_the_relqueries_of_others(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        acme, other = {"x-tidegate-tenant": "acme"}, {"x-tidegate-tenant": "other"}
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(10, stream=False), headers=acme)
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/rows")):
            status, error, _ = await client.send(method, f"{PATH}/{created['id']}{path}", headers=other)
            assert (status, error["error"]["code"]) == (404, "relquery_not_found")
        assert (await client.send("GET", f"{PATH}/{created['id']}", headers=acme))[0] == 200


async def test_a_relquery_never_takes_the_place_of_other_calls(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(token_s=0.005) as engine,
        up(engine, dispatch={"cap": 4}, relqueries={"window": 64}) as client,
    ):
        flood = {"x-tidegate-tenant": "flood"}
        _, created, _ = await client.send("POST", PATH, json=relquery_requests.body(400, stream=False), headers=flood)
        await until(lambda: engine.served > 10)
        before = len(engine.bodies)
        status, _, _ = await client.ask(headers={"x-tidegate-tenant": "other", "x-tidegate-urgency": "2"})
        at = next(i for i, body in enumerate(engine.bodies) if "tg.relquery" not in body["vllm_xargs"])
        assert status == 200
        assert at - before <= 12, "few rows that waited before the call passed it"
        assert client.gateway.core.dispatcher.waiting <= 5
        assert engine.running <= 4
        await client.send("DELETE", f"{PATH}/{created['id']}")


async def test_many_relqueries_of_a_tenant_leave_places_at_the_engine_to_others(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=60) as engine, up(engine, dispatch={"cap": 16}) as client:
        flood = {"x-tidegate-tenant": "flood"}
        ids: list[str] = []
        for _ in range(8):
            _, created, _ = await client.send(
                "POST", PATH, json=relquery_requests.body(50, stream=False), headers=flood
            )
            ids.append(created["id"])
        await until(lambda: engine.running == 4)
        async with asyncio.TaskGroup() as calls:
            other = calls.create_task(client.ask(headers={"x-tidegate-tenant": "other"}))
            await until(lambda: any("tg.relquery" not in body["vllm_xargs"] for body in engine.bodies))
            assert engine.running == 5, "the tenant's relQueries share four rows while none has been answered"
            other.cancel()
        for name in ids:
            await client.send("DELETE", f"{PATH}/{name}", headers=flood)
        await until(lambda: client.gateway.relquery_runner.in_flight == 0)


async def test_a_relquery_whose_row_fails_unexpectedly_keeps_no_row_of_the_others(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = row_results.read

    def broken(number: int, *arguments: Any) -> Any:
        if number == 5:
            raise RuntimeError("a test")
        return read(number, *arguments)

    monkeypatch.setattr(row_results, "read", broken)
    async with fake_engine.engine() as engine, up(engine, relqueries={"inFlight": 2, "floor": 1}) as client:
        _, failing, _ = await client.send("POST", PATH, json=relquery_requests.body(50, stream=False))
        await until(lambda: "a test" in caplog.text)
        await client.send("DELETE", f"{PATH}/{failing['id']}")
        await until(lambda: client.gateway.relquery_runner.in_flight == 0)
        found = await submit(client, json=relquery_requests.body(5))
        assert found[-2][1]["request_counts"]["completed"] == 5


@pytest.mark.parametrize(
    ("city", "size"), [("x" * 1000, 500_500), ("\x01" * 100, 300_500)], ids=["long", "control characters"]
)
async def test_a_row_whose_prompt_is_too_large_has_an_error_and_the_others_go_on(up: Any, city: str, size: int) -> None:
    body = relquery_requests.body(10, template="{{city}} " * 500)
    body["rows"][7]["city"] = city
    async with fake_engine.engine() as engine, up(engine, limits={"bodyBytes": 100_000}) as client:
        found = await submit(client, json=body)
        results = {item["row"]: item for item in relquery_requests.of_rows(found)}
        assert found[-2][1]["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        assert results[7]["error"]["code"] == "body_too_large"
        assert f"has {size} bytes as JSON, and at most 100000" in results[7]["error"]["message"]
        assert len(engine.bodies) == 9


async def test_rows_with_large_prompts_of_a_tenant_are_sent_one_after_the_other(up: Any, until: Any) -> None:
    large = relquery_requests.body(6, template="{{city}} " * 100, stream=False)
    for row in large["rows"]:
        row["city"] = "x" * (relquery_runner.LARGE_PROMPT_BYTES // 90)
    async with fake_engine.engine(first_s=0.1) as engine, up(engine, relqueries={"floor": 8}) as client:
        for tenant in ("a", "b"):
            status, _, _ = await client.send("POST", PATH, json=large, headers={"x-tidegate-tenant": tenant})
            assert status == 201
        most = 0

        def are_answered() -> bool:
            nonlocal most
            most = max(most, engine.running)
            return engine.served == 12

        await until(are_answered, within_s=60)
        assert 1 <= most <= 2, "one of each tenant"


async def test_a_tenant_with_many_relqueries_leaves_places_for_another(up: Any, until: Any) -> None:
    async with fake_engine.engine(hang=True) as engine, up(engine, relqueries={"running": 8}) as client:
        for tenant in ("a",) * 8 + ("b",):
            body = relquery_requests.body(2, stream=False)
            status, _, _ = await client.send("POST", PATH, json=body, headers={"x-tidegate-tenant": tenant})
            assert status == 201
        await until(lambda: "b" in {body["vllm_xargs"]["tg.tenant"] for body in engine.bodies})


async def test_tenants_share_the_rows_in_flight_however_many_relqueries_they_have(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(first_s=0.05) as engine,
        up(engine, dispatch={"cap": None}, relqueries={"inFlight": 40, "floor": 1}) as client,
    ):
        ids: list[tuple[str, str]] = []
        for tenant in ("a", "a", "a", "b"):
            body = relquery_requests.body(1000, stream=False)
            _, created, _ = await client.send("POST", PATH, json=body, headers={"x-tidegate-tenant": tenant})
            ids.append((tenant, created["id"]))
        await until(lambda: {body["vllm_xargs"]["tg.tenant"] for body in engine.bodies} == {"a", "b"})
        first = len(engine.bodies) + 80
        await until(lambda: len(engine.bodies) > first + 200)
        tenants = [body["vllm_xargs"]["tg.tenant"] for body in engine.bodies[first : first + 200]]
        assert 70 <= tenants.count("b") <= 130
        for tenant, name in ids:
            await client.send("DELETE", f"{PATH}/{name}", headers={"x-tidegate-tenant": tenant})


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"perTenant": 1}, "tenant-limit"), ({"tenantBytes": 300}, "tenant-limit"), ({"storeBytes": 300}, "saturated")],
)
async def test_a_tenant_has_bounds_for_all_its_relqueries(up: Any, settings: dict[str, int], code: str) -> None:
    async with fake_engine.engine(hang=True) as engine, up(engine, relqueries=settings) as client:
        body = relquery_requests.body(15, stream=False)
        status, created, _ = await client.send("POST", PATH, json=body)
        assert status == 201
        status, error, headers = await client.send("POST", PATH, json=body)
        assert (status, error["error"]["code"], headers["retry-after"]) == (429, code, "60")
        await client.send("DELETE", f"{PATH}/{created['id']}")
        assert (await client.send("POST", PATH, json=body))[0] == 201


async def test_results_beyond_their_bound_fail_the_relquery(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, relqueries={"resultBytes": 2000}) as client:
        found = await submit(client, json=relquery_requests.body(100))
        assert found[-2][1]["status"] == "failed"
        assert 5 < len(relquery_requests.of_rows(found)) < 100


async def test_a_gateway_that_drains_keeps_the_relqueries_whose_rows_are_under_way(up: Any, until: Any) -> None:
    options = {"store_options": {"lease": "500ms"}, "timeouts": {"drain": "20s"}}
    async with fake_engine.engine(first_s=2.0) as engine, up(engine, pool="drains", **options) as first:
        assert (await first.send("POST", PATH, json=relquery_requests.body(3, stream=False)))[0] == 201
        await until(lambda: engine.running == 3)
        async with up(engine, pool="drains", **options) as other:
            first.gateway.draining = True
            await asyncio.sleep(1.5)
            assert not other.gateway.relquery_runner.in_flight
            assert len(engine.bodies) == 3, "no row runs twice"
            await until(lambda: not first.gateway.relquery_runner.in_flight)


async def test_rows_of_a_model_whose_engines_are_gone_for_a_while_wait_for_it(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relquery_runner, "MOST_RETRY_S", 0.1)
    async with fake_engine.engine() as engine, up(engine) as client:
        answer, gone = client.gateway.relquery_runner._calls.answer, [True] * 3

        def answered(now: float, request: Any) -> Any:
            if gone:
                gone.pop()
                raise parsed_request.unknown_model(request.model, ["other"])
            return answer(now, request)

        monkeypatch.setattr(client.gateway.relquery_runner._calls, "answer", answered)
        found = await submit(client, json=relquery_requests.body(2))
        assert found[-2][1]["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert not gone


async def test_without_a_store_relqueries_are_shed(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, error, _ = await client.send("POST", PATH, json=relquery_requests.body())
        assert (status, error["error"]["code"]) == (503, "store-unavailable")


async def test_large_rows_of_a_tenant_go_one_by_one_and_those_that_wait_hold_no_places(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relquery_runner, "LARGE_PROMPT_BYTES", 1000)
    large = relquery_requests.body(5, stream=False)
    large["rows"] = [dict.fromkeys(row, "x" * 2000) for row in large["rows"]]
    async with (
        fake_engine.engine(first_s=60) as engine,
        up(engine, relqueries={"inFlight": 4}, dispatch={"cap": 100}) as client,
    ):
        assert (await client.send("POST", PATH, json=large))[0] == 201
        await until(lambda: engine.running == 1)
        assert (await client.send("POST", PATH, json=relquery_requests.body(3, stream=False)))[0] == 201
        await until(lambda: engine.running == 4)
        await asyncio.sleep(0.1)
        lengths = sorted(len(body["messages"][0]["content"]) > 1000 for body in engine.bodies)
        assert lengths == [False, False, False, True]


async def test_large_rows_that_try_again_get_the_place_before_the_next_row(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row starts beyond the floor, because all rows of the floor are under way and wait for the place."""
    monkeypatch.setattr(relquery_runner, "LARGE_PROMPT_BYTES", 1000)
    monkeypatch.setattr(relquery_runner, "PLACE_S", 0.1)
    large = relquery_requests.body(8, stream=False)
    large["rows"] = [dict.fromkeys(row, "x" * 2000) for row in large["rows"]]
    async with (
        fake_engine.engine(status=503) as engine,
        up(engine, relqueries={"floor": 4, "attempts": 1000}, dispatch={"cap": 100}) as client,
    ):
        assert (await client.send("POST", PATH, json=large))[0] == 201
        await until(lambda: client.gateway.placements.core.rows.rows >= 4)
        await asyncio.sleep(1)
        engine.status, before = 200, len(engine.bodies)
        await until(lambda: len(engine.bodies) - before >= 8, within_s=60)
