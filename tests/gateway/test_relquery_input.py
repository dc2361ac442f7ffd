"""What a client may send as a relQuery: JSON, a form with a file, an address; and what is an error."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import interim_flood
import pytest
import relquery_requests
from aiohttp import web

import fake_engine
from tidegate_gateway import gateway_settings
from tidegate_gateway.edge import rows_url
from tidegate_gateway.openai.error_table import BadRequest

PLAIN = "application/octet-stream"
PATH = "/v1/relqueries"
TABLE = b"city,country\n" + b"".join(b"city %d,x\n" % i for i in range(12))
LINES = b"".join(b'{"city": "city %d"}\n' % i for i in range(12))


def form(content: bytes, name: str, kind: str, **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData({"model": "fake", "template": relquery_requests.TEMPLATE, "max_tokens": "2", **fields})
    data.add_field("rows", io.BytesIO(content), filename=name, content_type=kind)
    return data


@contextlib.asynccontextmanager
async def tables() -> AsyncIterator[str]:
    """A server of tables, and of an address that redirects to one."""

    async def table(request: web.Request) -> web.StreamResponse:
        return web.Response(body=TABLE, content_type="text/csv")

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/tables/cities.csv")

    application = web.Application()
    application.router.add_get("/tables/cities.csv", table)
    application.router.add_get("/tables/away.csv", away)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def done(client: Any, **options: Any) -> list[Any]:
    async with client.http.post(client.url + PATH, **options) as response:
        assert response.status == 200, await response.text()
        found = await relquery_requests.events(response)
    assert found[-2][1]["status"] == "completed"
    return relquery_requests.of_rows(found)


async def test_a_server_of_rows_that_sends_interim_answers_without_end_is_left(up: Any) -> None:
    async with (
        interim_flood.server() as url,
        fake_engine.engine() as engine,
        up(engine, relqueries={"rowsUrls": [f"{url}/tables/"]}) as client,
        asyncio.timeout(20),
    ):
        asked = {"model": "fake", "template": relquery_requests.TEMPLATE, "max_tokens": 2}
        status, error, _ = await client.send("POST", PATH, json={**asked, "rows_url": f"{url}/tables/a.csv"})
        assert (status, error["error"]["param"]) == (400, "rows_url")
        assert "without a byte of its body" in error["error"]["message"]


@pytest.mark.parametrize(
    ("content", "name", "kind"),
    [
        (TABLE, "cities.csv", "application/octet-stream"),
        (TABLE, "cities", "text/csv"),
        (LINES, "cities.jsonl", "application/octet-stream"),
        (LINES, "cities", "application/x-ndjson"),
    ],
)
async def test_a_form_brings_rows_in_a_file(up: Any, content: bytes, name: str, kind: str) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        assert len(await done(client, data=form(content, name, kind))) == 12
        assert {body["max_tokens"] for body in engine.bodies} == {2}
        prompts = {body["messages"][-1]["content"] for body in engine.bodies}
        assert prompts == {f"Say what city {i} is known for." for i in range(12)}


async def test_a_form_may_have_a_template_of_messages(up: Any) -> None:
    messages = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{city}}"}]'
    async with fake_engine.engine() as engine, up(engine) as client:
        await done(client, data=form(TABLE, "t.csv", "text/csv", template=messages))
        assert engine.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert engine.bodies[0]["messages"][1]["content"].startswith("city ")


async def test_texts_of_a_form_stay_texts_if_they_look_like_json(up: Any) -> None:
    texts = {"user": "42", "cache_salt": "true", "stop": "5"}
    async with fake_engine.engine() as engine, up(engine) as client:
        await done(client, data=form(TABLE, "t.csv", "text/csv", **texts, temperature="0"))
        sent = engine.bodies[-1]
        assert {name: sent[name] for name in texts} == texts
        assert sent["temperature"] == 0
        for given, stop in (('["5", "6"]', ["5", "6"]), ("null", "null"), ("[END", "[END")):
            await done(client, data=form(TABLE, "t.csv", "text/csv", stop=given))
            assert engine.bodies[-1]["stop"] == stop


async def test_a_file_may_be_larger_than_a_body_of_a_call(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, limits={"bodyBytes": 1000}) as client:
        padded = b"".join(b'{"city": "city %d", "more": "%s"}\n' % (i, b"x" * 500) for i in range(12))
        assert len(await done(client, data=form(padded, "t.jsonl", PLAIN))) == 12
        status, error, _ = await client.send("POST", PATH, json=relquery_requests.body(200))
        assert (status, error["error"]["code"]) == (413, "body_too_large")
    async with fake_engine.engine() as engine, up(engine, relqueries={"bodyBytes": 9_000_000}) as client:
        status, error, _ = await client.send("POST", PATH, data=form(b"x" * 10_000_000, "t.jsonl", PLAIN))
        assert (status, error["error"]["code"]) == (413, "body_too_large")


async def test_rows_come_from_an_address_only_if_the_settings_allow_it(up: Any) -> None:
    async with tables() as url, fake_engine.engine() as engine:
        asked = {"model": "fake", "template": "{{city}}", "max_tokens": 1}
        async with up(engine) as client:
            status, error, _ = await client.send("POST", PATH, json={**asked, "rows_url": f"{url}/tables/cities.csv"})
            assert (status, error["error"]["param"]) == (400, "rows_url")
        async with up(engine, relqueries={"rowsUrls": [f"{url}/tables/"]}) as client:
            assert len(await done(client, json={**asked, "rows_url": f"{url}/tables/cities.csv"})) == 12
            for wrong in (
                f"{url}/other/cities.csv",
                f"{url}/tables/../admin.csv",
                f"{url}/tables/%2e%2e/admin.csv",
                f"{url}/tables/..%2fadmin.csv",
                f"{url}/tables/..%5cadmin.csv",
                f"{url}/tables/..;/admin.csv",
                f"{url}/tables/..%3bx/admin.csv",
                f"{url}/tables/away.csv",
                f"{url}/tables/cities.csv?x=1",
                f"{url}/tables/absent.csv",
                f"{url.replace('http://', 'http://a@')}/tables/cities.csv",
                f"{url}.example/tables/cities.csv",
                "file:///etc/passwd",
                5,
            ):
                status, error, _ = await client.send("POST", PATH, json={**asked, "rows_url": wrong})
                assert (status, error["error"]["param"]) == (400, "rows_url"), wrong


@pytest.mark.parametrize("path", ["%2E%2e/a.csv", "%252e%25252e/a.csv", "x%255C..%3b1/a.csv", ".%25252E%252fa.csv"])
def test_escaped_segments_leave_no_allowed_folder_however_often_they_are_decoded(path: str) -> None:
    bounds = gateway_settings.RelQueries(rows_urls=("https://host/tables/",))
    assert rows_url.allowed("https://host/tables/100%25.csv", bounds) == "https://host/tables/100%25.csv"
    with pytest.raises(BadRequest, match="not among the addresses"):
        rows_url.allowed(f"https://host/tables/{path}", bounds)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": "nope"}, "model", "not served"),
        ({"model": None}, "model", "name of a model"),
        ({"template": "{{place}}"}, "template", "row 0 has no column 'place'"),
        ({"template": None}, "template", "template must be text"),
        ({"rows": []}, "rows", "at least one row"),
        ({"rows": "x"}, "rows", "list of objects"),
        ({"rows": [*relquery_requests.rows(3), {"city": ["a"]}]}, "rows", "row 3: column 'city'"),
        ({"rows": [*relquery_requests.rows(3), "x"]}, "rows", "row 3 must be an object"),
        ({"rows": [{"city": "x" * 70_000}]}, "rows", "row 0 is larger than 65536 bytes"),
        ({"rows_url": "https://x/y.csv"}, "rows", "rows_url"),
        ({"endpoint": "/v1/embeddings"}, "endpoint", "must be one of"),
        (
            {"endpoint": "/v1/completions", "template": [{"role": "user", "content": "{{city}}"}]},
            "template",
            "goes with",
        ),
        ({"messages": []}, "messages", "no field of a relQuery"),
        ({"n": 2}, "n", "no field of a relQuery"),
        ({"max_tokens": -1}, "max_tokens", "whole number"),
        ({"deadline_ms": 0}, "deadline_ms", "whole number"),
        ({"id": "a b"}, "id", "id must be"),
        ({"deadline_s": 5}, "deadline_s", "send deadline_ms, in milliseconds"),
        ({"deadline": 5}, "deadline", "send deadline_ms, in milliseconds"),
        ({"deadlines_ms": 5}, "deadlines_ms", "did you mean deadline_ms?"),
        ({"stream": 1}, "stream", "true or false"),
        ({"tenant": "a"}, "tenant", "x-tidegate-tenant"),
        ({"class": "chat"}, "class", "x-tidegate-class"),
        ({"deadline": 5}, "deadline", "deadline_ms"),
        ({"rows_url": "https://x/"}, "rows", "not both"),
    ],
)
async def test_a_wrong_field_is_named_before_anything_is_stored(
    up: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", PATH, json=relquery_requests.body(**fields))
        assert status in (400, 404, 413)
        assert error["error"]["param"] == param
        assert words in error["error"]["message"]
        assert not engine.bodies


async def test_a_million_rows_are_one_clear_error(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        for data in (
            form(b"city\n" + b"x\n" * 1_000_000, "t.csv", PLAIN),
            b'{"model":"fake","template":"{{a}}","rows":[' + b'{"a":1},' * 999_999 + b'{"a":1}]}',
        ):
            status, error, _ = await client.send(
                "POST", PATH, data=io.BytesIO(data) if isinstance(data, bytes) else data
            )
            assert (status, error["error"]["param"]) == (400, "rows")
            assert "row 100000 is one too many" in error["error"]["message"]
        assert (await client.send("GET", "/health"))[0] == 200


async def test_a_stream_of_rows_does_not_keep_the_room_of_its_body(up: Any) -> None:
    settings = {"limits": {"bodyBytes": 20_000, "bodiesBytes": 90_000}}
    padded = b"".join(b'{"city": "city %d", "more": "%s"}\n' % (i, b"x" * 500) for i in range(80))
    async with fake_engine.engine(hang=True) as engine, up(engine, **settings) as client:
        ids: list[str] = []
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(3):
                post = client.http.post(client.url + PATH, data=form(padded, "t.jsonl", PLAIN))
                response = await streams.enter_async_context(post)
                assert response.status == 200
                ids.append(response.headers["x-tidegate-relquery"])
            for name in ids:
                await client.send("DELETE", f"{PATH}/{name}")


@pytest.mark.parametrize(
    "headers",
    [{"x-tidegate-workflow": "w"}, {"x-tidegate-class": "none"}, {"x-tidegate-relquery": "mine"}],
)
async def test_a_wrong_header_is_an_error(up: Any, headers: dict[str, str]) -> None:
    async with fake_engine.engine() as engine, up(engine, classes=[{"name": "chat"}]) as client:
        status, error, _ = await client.send("POST", PATH, json=relquery_requests.body(), headers=headers)
        assert (status, error["error"]["param"]) == (400, next(iter(headers)))


@pytest.mark.parametrize(("query", "headers"), [("?trace=1", {}), ("", {"Last-Event-ID": "x"}), ("?after=-1", {})])
async def test_a_wrong_place_in_the_stream_is_named_before_the_relquery_exists(
    up: Any, query: str, headers: dict[str, str]
) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, answered = await client.send(
            "POST", PATH + query, json=relquery_requests.body(), headers=headers
        )
        assert (status, error["error"]["param"]) == (400, "trace" if "trace" in query else "after")
        assert "x-tidegate-relquery" not in answered
        assert not client.gateway.relquery_runner.in_flight
        assert not engine.bodies


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}], ids=["no key", "a key"])
@pytest.mark.parametrize(("query", "headers"), [("?after=5", {}), ("", {"Last-Event-ID": "5"})])
async def test_a_new_relquery_has_no_results_to_go_on_after(
    up: Any, query: str, headers: dict[str, str], key: dict[str, str]
) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        for body in (relquery_requests.body(), relquery_requests.body(stream=False)):
            status, error, answered = await client.send("POST", PATH + query, json=body, headers={**headers, **key})
            assert (status, error["error"]["param"]) == (400, "after")
            assert "a new relQuery has no results yet" in error["error"]["message"]
            assert "x-tidegate-relquery" not in answered
        assert not client.gateway.relquery_runner.in_flight
        assert not engine.bodies


@pytest.mark.parametrize("fields", [{}, {"id": "mine"}], ids=["", "named"])
async def test_a_request_that_is_repeated_goes_on_after_the_results_of_its_client(
    up: Any, fields: dict[str, str]
) -> None:
    asked = {"json": relquery_requests.body(**fields), "headers": {"Idempotency-Key": "k"}}
    async with fake_engine.engine() as engine, up(engine) as client:
        assert len(await done(client, **asked)) == 12
        async with client.http.post(f"{client.url}{PATH}?after=5", **asked) as response:
            assert response.status == 200, await response.text()
            found = await relquery_requests.events(response)
        assert [number for number, _ in found if number is not None] == list(range(6, 13))
        assert len(engine.bodies) == 12


async def test_a_query_that_would_be_ignored_is_an_error(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        for query, param in (("stream=false", "stream"), ("limit=1", "limit")):
            status, error, _ = await client.send("POST", f"{PATH}?{query}", json=relquery_requests.body())
            assert (status, error["error"]["param"]) == (400, param)
            assert "takes after, at most once each; the other fields are in the body" in error["error"]["message"]
        assert not engine.bodies
        _, made, _ = await client.send("POST", PATH, json=relquery_requests.body(3, stream=False))
        for query in ("limit=1", "limit=1&stream=true"):
            status, error, _ = await client.send("GET", f"{PATH}/{made['id']}/rows?{query}")
            assert (status, error["error"]["param"]) == (400, "limit")
            assert "stream=false" in error["error"]["message"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "multipart/form-data"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n--x\r\n' * 2, "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="rows"\r\n\r\na\r\n--x--', "multipart/form-data; boundary=x"),
        (b"--x" + b"\r\n" * 3000, "multipart/form-data; boundary=x"),
        (b"[1]", "application/json"),
        (b"{", "application/json"),
    ],
)
async def test_a_body_that_is_no_request_is_an_error(up: Any, data: bytes, kind: str) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", PATH, data=data, headers={"content-type": kind})
        assert status == 400, error


async def test_two_deadlines_that_differ_are_an_error(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        headers, body = {"x-tidegate-deadline-ms": "6000"}, relquery_requests.body(deadline_ms=5000)
        status, error, _ = await client.send("POST", PATH, json=body, headers=headers)
        assert (status, error["error"]["param"]) == (400, "deadline_ms")
