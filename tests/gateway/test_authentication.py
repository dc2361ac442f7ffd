"""API keys: a key binds its tenant on both wires, files are read again, and an open port must be asked for."""

import gc
import hashlib
import pathlib
import socket
import tracemalloc
from typing import Any

import grpc
import pytest
import relquery_requests
import yaml

import fake_engine
from tidegate_gateway import access_settings, gateway_settings, settings_decoder
from tidegate_gateway.callers import api_keys, authentication
from tidegate_gateway.openai.error_table import GatewayError
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

ACME, OTHER, PROXY = "acme-0123456789abcdef", "other-0123456789abcdef", "proxy-0123456789abcdef"


def entry(key: str, tenant: str, **fields: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **fields}


def write(path: pathlib.Path, *keys: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump({"keys": list(keys)}))


@pytest.fixture
def keys_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "keys.yaml"
    write(path, entry(ACME, "acme", classes=["batch"]), entry(OTHER, "other"), entry(PROXY, "*"))
    return path


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


async def test_a_key_binds_the_tenant_of_http_requests(up: Any, keys_file: pathlib.Path) -> None:
    settings: dict[str, Any] = {"auth": {"keysFile": str(keys_file)}, "classes": [{"name": "batch"}, {"name": "chat"}]}
    async with fake_engine.engine() as engine, up(engine, **settings) as client:
        for wrong in ({}, bearer("unknown"), {"authorization": f"Basic {ACME}"}, bearer("")):
            status, answer, headers = await client.ask(headers=wrong)
            assert (status, answer["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert engine.bodies == []
        tenants = []
        for headers in (bearer(ACME), bearer(ACME, x_tidegate_tenant="acme"), bearer(PROXY, x_tidegate_tenant="any")):
            assert (await client.ask(headers=headers))[0] == 200
            tenants.append(engine.bodies[-1]["vllm_xargs"]["tg.tenant"])
        assert tenants == ["acme", "acme", "any"]
        for headers in (
            bearer(ACME, x_tidegate_tenant="other"),
            bearer(ACME, x_llm_d_inference_fairness_id="other"),
            bearer(ACME, x_tidegate_class="chat"),
        ):
            status, answer, _ = await client.ask(headers=headers)
            assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert (await client.ask(headers=bearer(ACME, x_tidegate_class="batch")))[0] == 200

        made = {"id": "w-1", "deadline_ms": 60_000}
        assert (await client.send("POST", "/v1/workflows", json=made, headers=bearer(ACME)))[0] == 201
        assert (await client.send("GET", "/v1/workflows/w-1", headers=bearer(ACME)))[0] == 200
        assert (await client.send("GET", "/v1/workflows/w-1", headers=bearer(OTHER)))[0] == 404
        for path, status in (("/v1/workflows", 401), ("/v1/models", 401), ("/health", 200), ("/ready", 200)):
            assert (await client.send("GET", path))[0] == status
        assert (await client.send("GET", "/metrics", headers=bearer(ACME)))[0] == 404
        assert (await client.send("GET", "/v1/state"))[0] == 401


async def test_a_key_binds_the_tenant_of_grpc_calls(up: Any, keys_file: pathlib.Path) -> None:
    settings: dict[str, Any] = {"auth": {"keysFile": str(keys_file)}, "classes": [{"name": "batch"}, {"name": "chat"}]}
    async with (
        fake_engine.engine() as engine,
        up(engine, listen={"grpcPort": 0}, **settings) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        calls, flows = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.WorkflowsStub(channel)

        async def code(key: str | None, **fields: Any) -> grpc.StatusCode:
            metadata = None if key is None else (("authorization", f"Bearer {key}"),)
            request = inference_pb2.GenerateRequest(model="fake", prompt="x", **fields)
            try:
                async for _ in calls.Generate(request, metadata=metadata):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert await code(None) == await code("unknown") == grpc.StatusCode.UNAUTHENTICATED
        assert engine.bodies == []
        assert await code(ACME) == await code(ACME, tenant="acme", slo_class="batch") == grpc.StatusCode.OK
        assert engine.bodies[0]["vllm_xargs"]["tg.tenant"] == "acme"
        assert await code(ACME, tenant="other") == grpc.StatusCode.INVALID_ARGUMENT
        assert await code(ACME, slo_class="chat") == grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as none:
            await flows.List(inference_pb2.ListWorkflowsRequest())
        assert none.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_of_a_bound_key_that_names_no_class_is_of_its_first_one(up: Any, keys_file: pathlib.Path) -> None:
    settings: dict[str, Any] = {"auth": {"keysFile": str(keys_file)}, "classes": [{"name": "batch"}, {"name": "chat"}]}
    async with (
        fake_engine.engine() as engine,
        up(engine, listen={"grpcPort": 0}, defaultClass="chat", **settings) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        for headers in (bearer(ACME), bearer(ACME, x_tidegate_class=""), bearer(OTHER)):
            assert (await client.ask(headers=headers))[0] == 200
        request = inference_pb2.GenerateRequest(model="fake", prompt="x")
        calls = inference_pb2_grpc.InferenceStub(channel)
        async for _ in calls.Generate(request, metadata=(("authorization", f"Bearer {ACME}"),)):
            pass
        classes = [body["vllm_xargs"]["tg.class"] for body in engine.bodies]
        assert classes == ["batch", "batch", "chat", "batch"]


async def test_equal_ids_of_two_tenants_never_meet(up: Any, keys_file: pathlib.Path) -> None:
    auth = {"keysFile": str(keys_file)}
    async with fake_engine.engine() as engine, up(engine, auth=auth, listen={"grpcPort": 0}) as client:
        for key in (ACME, OTHER):
            for made in ({"id": "w-1", "deadline_ms": 60_000}, {"id": "w-2", "deadline_ms": 60_000}):
                status, record, _ = await client.send("POST", "/v1/workflows", json=made, headers=bearer(key))
                assert (status, record["id"]) == (201, made["id"])
            asked = bearer(key, x_tidegate_workflow="w-3", x_tidegate_stage="plan", x_tidegate_deadline_ms="60000")
            assert (await client.ask(headers=asked))[0] == 200
        labels = {body["vllm_xargs"]["tg.workflow"] for body in engine.bodies}
        assert len(labels) == 2  # engines tell the workflows apart
        assert (await client.send("DELETE", "/v1/workflows/w-1", headers=bearer(ACME)))[0] == 200
        assert (await client.send("POST", "/v1/workflows/w-2/complete", headers=bearer(ACME)))[0] == 200
        states = {}
        for key in (ACME, OTHER):
            _, listed, _ = await client.send("GET", "/v1/workflows", headers=bearer(key))
            states[key] = {item["id"]: item["state"] for item in listed["data"]}
        assert states == {
            ACME: {"w-1": "cancelled", "w-2": "done", "w-3": "running"},
            OTHER: {"w-1": "running", "w-2": "running", "w-3": "running"},
        }
        status, answer, _ = await client.send("DELETE", "/v1/workflows/w-4", headers=bearer(OTHER))
        assert (status, answer["error"]["code"]) == (404, "workflow_not_found")
        assert answer["error"]["message"].startswith("this tenant has no workflow 'w-4'")

        for key in (ACME, OTHER):
            body = relquery_requests.body(2, id="rq-1", stream=False)
            status, record, _ = await client.send("POST", "/v1/relqueries", json=body, headers=bearer(key))
            assert (status, record["id"]) == (201, "rq-1")
            async with client.http.get(
                f"{client.url}/v1/relqueries/rq-1/rows?stream=true", headers=bearer(key)
            ) as response:
                assert response.status == 200
        status, answer, _ = await client.send("POST", "/v1/relqueries", json=body, headers=bearer(OTHER))
        assert (status, answer["error"]["message"].split(";")[0]) == (409, "relQuery 'rq-1' exists already")
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            flows = inference_pb2_grpc.WorkflowsStub(channel)
            record = await flows.Get(
                inference_pb2.GetWorkflowRequest(id="w-1"), metadata=(("authorization", f"Bearer {OTHER}"),)
            )
            asked = inference_pb2.SubmitRelQueryRequest(
                model="fake", text="{{a}}", tenant="other", list={"rows": [{"values": {"a": "x"}}]}, max_tokens=2
            )
            submitted = inference_pb2_grpc.RelQueriesStub(channel).Submit(
                asked, metadata=(("authorization", f"Bearer {PROXY}"),)
            )
            events = [event async for event in submitted]
        assert (record.id, record.tenant) == ("w-1", "other")
        assert events[-1].relquery.completed == 1, "a message may name the tenant of a key for all tenants"


@pytest.mark.parametrize("key", [ACME, "unknown"])
async def test_a_message_is_forgotten_with_its_call(up: Any, until: Any, keys_file: pathlib.Path, key: str) -> None:
    settings: dict[str, Any] = {"auth": {"keysFile": str(keys_file)}, "listen": {"grpcPort": 0}}
    request = inference_pb2.GenerateRequest(model="unknown", prompt="x" * 1_000_000)
    async with up(**settings) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        gc.disable()  # it would free the messages late
        try:
            calls = inference_pb2_grpc.InferenceStub(channel)
            tracemalloc.start()
            for _ in range(8):
                with pytest.raises(grpc.aio.AioRpcError):
                    await calls.Generate(request, metadata=(("authorization", f"Bearer {key}"),)).read()
            await until(lambda: tracemalloc.get_traced_memory()[0] < 3_000_000)
        finally:
            tracemalloc.stop()
            gc.enable()


def replace(path: pathlib.Path, text: str) -> None:
    path.write_text(text)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()[-len("has changed: 0 keys") :]) for record in caplog.records]


async def test_the_keys_follow_their_file_without_a_restart(
    up: Any, until: Any, keys_file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    auth = {"keysFile": str(keys_file), "reload": "20ms"}
    async with fake_engine.engine() as engine, up(engine, store=False, auth=auth) as client:
        new = "new-0123456789abcdef"
        write(keys_file, entry(new, "acme"))

        async def taken() -> bool:
            return bool((await client.ask(headers=bearer(new)))[0] == 200)

        await until(taken)
        assert (await client.ask(headers=bearer(ACME)))[0] == 401
        write(keys_file, entry("x", ""))
        await until(lambda: "what was in force stays" in caplog.text)
        assert "Traceback" not in caplog.text
        assert await taken()
        replace(keys_file, "")
        await until(lambda: "the file of auth.keysFile is empty" in caplog.text)
        assert await taken()
        replace(keys_file, "keys: []")
        await until(lambda: ("WARNING", "has changed: 0 keys") in logged(caplog))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: [", "not YAML"),
        ("keys: [{sha256: secret, tenant: a}]", "64 hexadecimal digits"),
        (f"keys: [{{sha256: {'a' * 64}, tenant: ''}}]", "tenant must be"),
        (f"keys: [{{sha256: {'a' * 64}}}]", "tenant is required"),
        (f"keys: [{{sha256: {'a' * 64}, tenant: a}}, {{sha256: {'a' * 64}, tenant: b}}]", "comes twice"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_says_why(text: str, says: str) -> None:
    with pytest.raises(settings_decoder.BadSettings, match=says):
        api_keys.parsed(text.encode())


def test_a_key_that_is_too_long_is_refused_before_it_is_hashed(
    keys_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = api_keys.ApiKeys(str(keys_file))
    monkeypatch.setattr(api_keys.hashlib, "sha256", lambda key: pytest.fail("it is hashed"))
    with pytest.raises(GatewayError, match="not known"):
        keys.caller_of("k" * (api_keys.LONGEST_KEY + 1))


def test_two_keys_in_one_request_are_refused(keys_file: pathlib.Path) -> None:
    keys = authentication.Authentication(access_settings.Auth(keys_file=str(keys_file)))
    assert keys.caller_of([("authorization", f"bearer {ACME}")]).tenant == "acme"
    with pytest.raises(GatewayError):
        keys.caller_of([("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {OTHER}")])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", ""])
def test_a_port_beyond_loopback_without_keys_must_be_asked_for(host: str, tmp_path: pathlib.Path) -> None:
    engines = {"engines": [{"url": "http://127.0.0.1:1"}]}
    with pytest.raises(settings_decoder.BadSettings, match="allowUnauthenticated"):
        gateway_settings.from_mapping({"listen": {"host": host}, **engines})
    (tmp_path / "gateway.yaml").write_text("engines: [{url: http://127.0.0.1:1}]")
    with pytest.raises(settings_decoder.BadSettings, match="allowUnauthenticated"):
        gateway_settings.load(tmp_path / "gateway.yaml", {"TIDEGATE_HOST": host or "0.0.0.0"})
    for auth in ({"allowUnauthenticated": True}, {"keysFile": "keys.yaml"}):
        gateway_settings.from_mapping({"listen": {"host": host}, "auth": auth, **engines})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    gateway_settings.from_mapping({"listen": {"host": host}})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8001"}, 200),
        ({"host": "[::1]:8001"}, 200),
        ({"host": "localhost.:8001"}, 200),
        ({"host": f"{socket.gethostname()}:8001"}, 200),
        ({"host": "tools.example"}, 200),
        ({"host": "localhost:8001", "origin": "http://localhost:8001"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8001"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "a.svc.evil.example"}, 403),
        ({"host": "evil"}, 403),
        ({"host": "evil:8001", "origin": "http://evil:8001"}, 403),
        ({"host": "rebind.svc"}, 403),
        ({"host": "rebind.localhost"}, 403),
        ({"host": "chat-gateway-internal.default.svc:8001"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_the_admin_port_refuses_foreign_hosts_and_origins(up: Any, headers: dict[str, str], status: int) -> None:
    async with up(store=False, listen={"adminNames": ["tools.example"]}) as client:
        for method, path in (("GET", "/admin/state"), ("PUT", "/admin/policy"), ("GET", "/metrics"), ("GET", "/")):
            async with client.http.request(
                method, client.admin_url + path, headers=headers, json={"policy": "fcfs"}
            ) as answer:
                assert answer.status == status


async def test_the_operator_calls_the_admin_port_by_the_name_of_its_service_and_with_the_token(up: Any) -> None:
    listen = {"adminHost": "0.0.0.0"}
    async with up(store=False, listen=listen, auth={"poolToken": ACME}) as client:
        url = client.admin_url.replace("0.0.0.0", "127.0.0.1") + "/admin/state"
        host = {"host": "chat-gateway-internal.default.svc:8001"}
        for headers, status in ((host, 401), (host | {"authorization": f"Bearer {ACME}"}, 200)):
            async with client.http.get(url, headers=headers) as answer:
                assert answer.status == status


WEB_PAGES = [
    ({}, 200),
    ({"host": "chat.example", "origin": "https://chat.example"}, 200),
    ({"origin": "https://chat.example", "sec-fetch-site": "same-origin"}, 200),  # a proxy has changed the Host
    ({"sec-fetch-site": "none"}, 200),  # a person has typed the address
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "http://evil.example", "sec-fetch-site": "same-site"}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), WEB_PAGES)
async def test_without_keys_web_pages_of_other_sites_run_no_calls(
    up: Any, headers: dict[str, str], status: int
) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "x"}]}'
        simple = {"content-type": "text/plain", **headers}  # a browser asks nobody before it sends this
        seen, answer, _ = await client.send("POST", "/v1/chat/completions", data=body, headers=simple)
        assert seen == status, answer
        assert len(engine.bodies) == (status == 200)
        assert status == 200 or "web pages of other sites" in answer["error"]["message"]
        seen, _, _ = await client.send("DELETE", "/v1/workflows/w", headers=headers)
        assert seen == (404 if status == 200 else 403)
        async with client.http.get(client.url, headers=headers) as page:
            assert page.status == 200, "a link of another site may show the page, whose files hold no data"


async def test_with_keys_web_pages_of_other_sites_may_call(up: Any, keys_file: pathlib.Path) -> None:
    async with fake_engine.engine() as engine, up(engine, auth={"keysFile": str(keys_file)}) as client:
        assert (await client.ask(headers=bearer(OTHER, origin="https://chat.example")))[0] == 200
