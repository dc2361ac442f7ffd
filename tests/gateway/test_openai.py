"""A stock OpenAI SDK works unmodified, and what passes through is what the engine said."""

import asyncio
import pathlib
from typing import Any

import openai
import orjson
import pytest

import fake_engine
from tidegate_gateway.observe import prometheus_metrics


async def test_sdk_gets_an_answer(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client, client.openai() as sdk:
        answer = await sdk.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "w0 w1 w2 w3 "
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


async def test_sdk_streams(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client, client.openai() as sdk:
        stream = await sdk.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].delta.content or "" for event in events) == "w0 w1 w2 w3 "
        assert all(event.usage is None for event in events)


async def test_usage_reaches_only_clients_that_asked_for_it(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client, client.openai() as sdk:
        stream = await sdk.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        usages = [event.usage async for event in stream if event.usage is not None]
        assert [usage.completion_tokens for usage in usages] == [4]


async def test_completions_and_models(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client, client.openai() as sdk:
        answer = await sdk.completions.create(model="fake", prompt="once", max_tokens=2)
        assert answer.choices[0].text == "w0 w1 "
        assert [model.id async for model in sdk.models.list()] == ["fake"]
        assert (await sdk.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError, match="fake"):
            await sdk.models.retrieve("other")


async def test_a_models_name_may_be_a_path(up: Any) -> None:
    async with fake_engine.engine(model="org/model") as engine, up(engine) as client:
        for path in ("org/model", "org%2Fmodel"):
            status, answer, _ = await client.send("GET", f"/v1/models/{path}")
            assert (status, answer["id"]) == (200, "org/model")


async def test_bytes_of_a_stream_pass_untouched(up: Any) -> None:
    body = {"model": "fake", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    async with fake_engine.engine() as engine, up(engine) as client:
        async with client.http.post(engine.url + "/v1/completions", json=body) as response:
            direct = await response.read()
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            assert await response.read() == direct
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"


async def test_connections_to_engines_are_used_again(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        for stream in (True, False, True, True):
            body = {"model": "fake", "prompt": "x", "stream": stream}
            async with client.http.post(client.url + "/v1/completions", json=body) as response:
                await response.read()
        assert len(engine.peers) <= 2


async def test_answers_say_where_and_how_long(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, _, headers = await client.ask(headers={"x-request-id": "mine", "x-tidegate-deadline-ms": "60000"})
        assert status == 200
        assert headers["x-request-id"] == "mine"
        assert headers["x-tidegate-engine"] == engine.url.removeprefix("http://")
        assert int(headers["x-tidegate-queue-ms"]) < 1000
        assert 0 < int(headers["x-tidegate-slack-ms"]) <= 60000


async def test_engine_knobs_of_clients_are_stripped_and_ours_are_set(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        await client.ask(
            headers={
                "x-tidegate-tenant": "acme",
                "x-tidegate-urgency": "0",
                "X-Vllm-Priority": "-5",
                "x-gateway-destination-endpoint": "10.0.0.1:80",
            },
            priority=-1000,
            request_id="forged",
            vllm_xargs={"tg.urgency": 0, "mine": 1},
        )
        (body,), (headers,) = engine.bodies, engine.headers
        assert body["vllm_xargs"]["mine"] == 1
        assert body["vllm_xargs"]["tg.tenant"] == "acme"
        assert body["vllm_xargs"]["tg.urgency"] == 2, "an unknown tenant may not claim more than the default"
        assert body["priority"] > 0
        assert "request_id" not in body
        assert "x-vllm-priority" not in headers
        assert not any(name.startswith("x-gateway") for name in headers)
        async with client.http.get(f"{client.url}/metrics") as answer:
            page = await answer.text()
        for field in ("x-vllm-priority", "x-gateway-destination-endpoint", "priority", "request_id", "vllm_xargs"):
            assert f'tidegate_ignored_fields_total{{field="{field}"}} 1.0' in page


async def test_an_entitled_tenant_may_claim_urgency_and_gets_its_weight(up: Any) -> None:
    tenants = [{"name": "acme", "maxUrgency": 1, "weight": 3.0}]
    async with fake_engine.engine() as engine, up(engine, tenants=tenants) as client:
        await client.ask(headers={"X-Gateway-Inference-Fairness-Id": "acme", "X-Tidegate-Urgency": "0"})
        arguments = engine.bodies[0]["vllm_xargs"]
        assert (arguments["tg.urgency"], arguments["tg.weight"]) == (1, 3.0)


async def test_a_class_fills_in_targets_and_headers_may_loosen_them(up: Any) -> None:
    classes = [{"name": "chat", "ttft": "1s", "tpot": "60ms", "deadline": "2m"}]
    async with fake_engine.engine() as engine, up(engine, classes=classes, defaultClass="chat") as client:
        await client.ask(headers={"x-slo-ttft-ms": "1500"})
        arguments = engine.bodies[0]["vllm_xargs"]
        assert arguments["tg.class"] == "chat"
        assert (arguments["tg.ttft_ms"], arguments["tg.tpot_ms"]) == (1500, 60)
        assert 0 < arguments["tg.budget_ms"] <= 120_000


async def test_an_engines_rejection_passes_through(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine) as client, client.openai() as sdk:
        with pytest.raises(
            openai.BadRequestError, match="the engine rejects the request: as set by the test"
        ) as caught:
            await sdk.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
        assert (caught.value.code, caught.value.type) == ("invalid_request", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="as set by the test"):
            await sdk.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], stream=True)


async def test_trace_context_reaches_the_engine(up: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with fake_engine.engine() as engine, up(engine) as client:
        await client.ask(headers={"traceparent": parent})
        assert engine.headers[0]["traceparent"].split("-")[1] == parent.split("-")[1]


async def test_choices_are_charged_each_and_predicted_each(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=30) as engine, up(engine) as client:
        call = asyncio.create_task(client.ask(n=4, max_tokens=20))
        await until(lambda: engine.running == 1)
        assert engine.bodies[-1]["vllm_xargs"]["tg.out_pred"] == 20
        backlog = client.own_backlog()
        assert (backlog.calls, backlog.output_tokens) == (4, 80)
        call.cancel()
        await until(lambda: not client.own_backlog())


async def test_output_length_is_learned_from_answers_not_from_max_tokens(up: Any) -> None:
    async with fake_engine.engine(tokens=20) as engine, up(engine) as client:
        for _ in range(3):
            await client.ask(max_tokens=5000)
        assert engine.bodies[-1]["vllm_xargs"]["tg.out_pred"] == 20


async def test_metrics_are_served_in_prometheus_format(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        await client.ask(stream=False)
        async with client.http.get(client.url + "/metrics") as response:
            page = await response.text()
        for name in (
            'tidegate_requests_total{class="none",outcome="ok"} 1.0',
            'tidegate_queue_depth{class="none"} 0.0',
            "tidegate_request_e2e_seconds_bucket",
            'tidegate_policy_info{policy="urgency"} 1.0',
            "tidegate_engine_backlog_seconds",
            "tidegate_dispatch_seconds_count 1.0",
        ):
            assert name in page, name


async def test_a_call_that_is_shed_has_no_time_to_an_engine(up: Any) -> None:
    async with up({"url": "http://127.0.0.1:1"}, seen=False) as client:
        assert (await client.ask())[0] in (429, 503)
        assert client.gateway.metrics.registry.get_sample_value("tidegate_dispatch_seconds_count") == 0


@pytest.mark.parametrize(("rule", "alpha"), [("least-delay", None), ("score", 0.2)])
async def test_alpha_is_shown_only_while_the_dispatch_rule_reads_it(up: Any, rule: str, alpha: float | None) -> None:
    async with fake_engine.engine() as engine, up(engine, dispatch={"rule": rule}) as client:
        async with client.http.get(client.url + "/metrics") as response:
            page = await response.text()
        assert ('tidegate_alpha{rule="score"} 0.2' in page) == ("\ntidegate_alpha{" in page) == (alpha is not None)
        assert client.state()["dispatch"]["alpha"] == alpha


def test_every_metric_is_documented() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for family in prometheus_metrics.Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}" in page, name


async def test_openai_error_object_for_everything(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        for method, path in (("GET", "/nowhere"), ("GET", "/v1/chat/completions"), ("POST", "/v1/chat/completions")):
            async with client.http.request(method, client.url + path, data=b"{") as response:
                assert set(orjson.loads(await response.read())["error"]) == {"message", "type", "param", "code"}


async def test_embeddings_through_the_openai_client(up: Any) -> None:
    async with fake_engine.engine(prompt_tokens=6) as engine, up(engine) as client:
        async with client.openai() as api:
            for given, count in (("a text", 1), (["one"] * 40, 40), ([1, 2, 3], 1)):
                answer = await api.embeddings.create(model="fake", input=given, encoding_format="float")
                assert [item.index for item in answer.data] == list(range(count))
                assert answer.usage.prompt_tokens == 6
        status, error, _ = await client.ask("/v1/embeddings", input=["x"] * 3000)
        assert (status, error["error"]["param"]) == (400, "input")
        status, error, _ = await client.ask("/v1/embeddings", input="x", stream=True)
        assert (status, error["error"]["param"]) == (400, "stream")
        assert engine.served == 3
        tokens = client.gateway.metrics.registry.get_sample_value
        assert tokens("tidegate_requests_total", {"outcome": "ok", "class": "none"}) == 3.0
        assert not client.own_backlog()


async def test_responses_through_the_openai_client(up: Any) -> None:
    async with fake_engine.engine(prompt_tokens=6, tokens=5) as engine, up(engine) as client:
        async with client.openai() as api:
            items = [
                {"role": "user", "content": "hello"},
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            ]
            for given in ("hello", items):
                whole = await api.responses.create(
                    model="fake", input=given, instructions="Be brief.", max_output_tokens=3
                )
                assert (whole.output_text, whole.usage.output_tokens) == ("w0 w1 w2 ", 3)
            events = [event async for event in await api.responses.create(model="fake", input="hello", stream=True)]
            assert [event.type for event in events][::6] == ["response.created", "response.completed"]
            assert (
                "".join(event.delta for event in events if event.type == "response.output_text.delta")
                == "w0 w1 w2 w3 w4 "
            )
        assert "stream_options" not in engine.bodies[-1]
        assert engine.bodies[0]["vllm_xargs"]["tg.out_pred"] == 3
        for name, value in (("previous_response_id", "r"), ("background", True), ("input", []), ("input", [5])):
            status, error, _ = await client.ask("/v1/responses", **{"input": "x", name: value})
            assert (status, error["error"]["param"]) == (400, name if value != [5] else "input[0]")
        assert engine.served == 3
        counted = client.gateway.metrics.registry.get_sample_value
        assert counted("tidegate_requests_total", {"outcome": "ok", "class": "none"}) == 3.0
        assert not client.own_backlog()


async def test_a_stream_of_responses_that_breaks_off_ends_with_an_error_event(up: Any) -> None:
    async with fake_engine.engine(tokens=5, break_after=2, token_s=0.02) as engine, up(engine) as client:
        body = {"model": "fake", "input": "hello", "stream": True}
        async with client.http.post(client.url + "/v1/responses", json=body) as response:
            text = await response.read()
        *_, last = text.strip().split(b"\n\n")
        assert last.startswith(b"event: error\ndata: ")
        error = orjson.loads(last.partition(b"data: ")[2])
        assert (error["type"], error["code"]) == ("error", "engine_failed")


async def test_a_response_whose_engine_fails_before_its_first_token_goes_to_another_engine(up: Any) -> None:
    """vLLM sends `response.created` before it has computed the prompt, so that event is no first token."""
    async with fake_engine.engine(tokens=5) as broken, fake_engine.engine(tokens=5) as whole:
        broken.break_after = 0
        async with up(broken, whole) as client, client.openai() as api:

            async def events(number: int) -> list[str]:
                stream = await api.responses.create(model="fake", input=f"hello {number}", stream=True)
                return [event.type async for event in stream]

            for found in await asyncio.gather(*[events(number) for number in range(6)]):
                assert found[::6] == ["response.created", "response.completed"]
        assert broken.served
