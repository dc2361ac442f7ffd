"""gRPC has the same meaning as HTTP: the same validation, errors, workflows, cancellation."""

import asyncio
import contextlib
import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import fake_engine
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}


def chat(**fields: Any) -> inference_pb2.GenerateRequest:
    messages = inference_pb2.Messages(messages=[inference_pb2.Message(role="user", content="hello")])
    return inference_pb2.GenerateRequest(**({"model": "fake", "messages": messages} | fields))


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The rich error that came with a failed call."""
    (raw,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    found: dict[str, Any] = {}
    for detail in status_pb2.Status.FromString(raw).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(detail.value)
    return found


async def test_generate_streams_text_between_accepted_and_finished(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = chat(tenant="acme", deadline_ms=60_000, max_tokens=3, request_id="mine", urgency=4)
            events = [event async for event in stub.Generate(request)]
        assert events[0].accepted.request_id == "mine"
        assert events[0].accepted.engine == engine.url.removeprefix("http://")
        assert 0 < events[0].accepted.slack_ms <= 60_000
        assert "".join(event.text for event in events[1:-1]) == "w0 w1 w2 "
        finished = events[-1].finished
        assert (finished.finish_reason, finished.prompt_tokens, finished.completion_tokens) == ("length", 7, 3)
        arguments = engine.bodies[0]["vllm_xargs"]
        assert (arguments["tg.tenant"], arguments["tg.urgency"]) == ("acme", 4)


async def test_a_prompt_is_a_completion(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model="fake", prompt="once", stop=["."], seed=3, temperature=0.0)
            text = "".join([event.text async for event in stub.Generate(request)])
        assert text == "w0 w1 w2 w3 "
        assert (engine.bodies[0]["prompt"], engine.bodies[0]["stop"], engine.bodies[0]["seed"]) == ("once", ["."], 3)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"model": "nope"}, grpc.StatusCode.NOT_FOUND, "model_not_found"),
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"messages": None}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"urgency": 9}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"deadline_ms": 0}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"tenant": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"workflow": "unknown"}, grpc.StatusCode.NOT_FOUND, "workflow_not_found"),
        ({"temperature": math.nan}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ({"top_p": math.inf}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
    ],
)
async def test_wrong_requests_have_their_code_and_reason(
    up: Any, fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(chat(**fields)):
                    pass
        assert caught.value.code() is code
        assert details(caught.value)["ErrorInfo"].reason == reason
        assert engine.bodies == []


async def test_a_mistake_of_the_gateway_has_its_code_and_reason(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: Any) -> None:
        raise RuntimeError("a mistake")

    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        monkeypatch.setattr(client.gateway.calls, "answer", answer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(chat()).read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert details(caught.value)["ErrorInfo"].reason == "internal_error"


async def test_misspelled_metadata_and_messages_without_a_role_are_errors(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            nobody = inference_pb2.GenerateRequest(
                model="fake", messages=inference_pb2.Messages(messages=[inference_pb2.Message(content="x")])
            )
            for request, metadata, words in (
                (chat(), (("x-tidegate-tennant", "a"),), "the nearest is x-tidegate-tenant"),
                (nobody, (), "messages[0] must have a role"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(request, metadata=metadata).read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert words in str(caught.value.details())
        assert not engine.bodies


async def test_errors_name_fields_not_headers(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        for fields, param in (
            ({"stage": "a"}, "stage"),
            ({"workflow": "unknown"}, "workflow"),
            ({"slo_ttft_ms": 0}, "slo_ttft_ms"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceStub(channel).Generate(chat(**fields)).read()
            assert details(caught.value)["ErrorInfo"].metadata["param"] == param
            assert "x-tidegate" not in caught.value.details()


@pytest.mark.parametrize(
    ("stages", "param"),
    [
        ([{"name": "a"}, {"name": "b", "after": ["a"] * 5_000}], "stages[1].after"),
        ([{"name": "a"}, {"name": "b", "after": ["a", "a"]}], "stages[1].after"),
        ([{"name": f"s{i}"} for i in range(257)], "stages"),
        ([{"name": "a b"}], "stages[0].name"),
        ([{"name": "a", "parallel": 1001}], "stages[0].parallel"),
        ([{"name": "a", "repeat": 1001}], "stages[0].repeat"),
    ],
    ids=[
        "one name 5000 times",
        "one name twice",
        "too many stages",
        "a bad name",
        "too many calls",
        "too many repeats",
    ],
)
async def test_a_declaration_has_the_bounds_that_it_has_over_http(up: Any, stages: list[Any], param: str) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        specs = [inference_pb2.StageSpec(**stage) for stage in stages]
        request = inference_pb2.CreateWorkflowRequest(deadline_ms=60_000, stages=specs)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.WorkflowsStub(channel).Create(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(caught.value)["ErrorInfo"].metadata["param"] == param


async def test_no_error_names_a_header_except_for_metadata(up: Any) -> None:
    async with (
        up(listen=LISTEN, classes=[{"name": "chat"}]) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub, flows = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.WorkflowsStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(chat(slo_class="nope")).read()
        assert details(caught.value)["ErrorInfo"].metadata["param"] == "slo_class"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flows.Get(inference_pb2.GetWorkflowRequest(id="nope"))
        assert "deadline_ms" in caught.value.details()
        assert "x-tidegate" not in caught.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(chat(), metadata=(("x-tidegate-urgency", "9"),)).read()
        assert details(caught.value)["ErrorInfo"].metadata["param"] == "x-tidegate-urgency"


@pytest.mark.parametrize("method", ["Inference/Generate", "Workflows/Get"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(up: Any, method: str) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="are not the message") as caught:
            await channel.unary_unary(f"/tidegate.v1.{method}")(b"\xff\xff\xffgarbage")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_empty_name_is_an_invalid_argument(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        flows = inference_pb2_grpc.WorkflowsStub(channel)
        for call, param in (
            (flows.Get(inference_pb2.GetWorkflowRequest()), "id"),
            (flows.Cancel(inference_pb2.CancelWorkflowRequest()), "id"),
            (flows.Complete(inference_pb2.CompleteWorkflowRequest()), "id"),
            (flows.CompleteStage(inference_pb2.CompleteStageRequest(id="w")), "stage"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details(caught.value)["ErrorInfo"].metadata["param"] == param


async def test_a_shed_call_carries_the_delay_after_which_to_retry(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(chat()):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        found = details(caught.value)
        assert found["ErrorInfo"].reason == "no-engines"
        assert found["RetryInfo"].retry_delay.seconds >= 1


async def test_an_engines_rejection_reaches_the_client_in_its_words(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="as set by the test") as caught:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(chat()):
                    pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_cancelling_the_stream_stops_the_engine(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.01) as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(chat())
        await stream.read()
        await until(lambda: engine.running == 1)
        stream.cancel()
        await until(lambda: engine.running == 0, within_s=5)
        await until(lambda: client.gateway.placements.in_progress == 0)


async def test_clients_that_do_not_read_give_their_places_back(
    up: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 4000 + b'"}}]}\n\n'
    settings = {"dispatch": {"cap": 2}, "limits": {"write": "500ms"}}
    async with (
        fake_engine.engine(garbage=event * 8000 + b"data: [DONE]\n\n") as engine,
        up(engine, listen=LISTEN, **settings) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        slow = [inference_pb2_grpc.InferenceStub(channel).Generate(chat()) for _ in range(2)]
        for stream in slow:
            assert (await stream.read()).accepted.engine
        assert client.gateway.core.dispatcher.inflight == 2
        engine.garbage = None
        status, _, _ = await client.ask()
        assert status == 200, "it waited for a place of the two"
        await until(lambda: client.gateway.core.dispatcher.inflight == 0)
        slow[0].cancel()
        with pytest.raises(grpc.aio.AioRpcError, match=r"was not read within 0\.5 s") as caught:
            await to_its_end(slow[1])
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_the_tenant_of_the_metadata_is_not_overridden_by_the_message(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        flows = inference_pb2_grpc.WorkflowsStub(channel)
        one, two = ((("x-tidegate-tenant", name),) for name in ("one", "two"))
        created = await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000), metadata=one)
        assert created.tenant == "one"
        request = inference_pb2.GetWorkflowRequest(id=created.id)
        assert (await flows.Get(request, metadata=one)).id == created.id
        for call in (
            flows.Get(request, metadata=two),
            flows.Cancel(inference_pb2.CancelWorkflowRequest(id=created.id), metadata=two),
            flows.Complete(inference_pb2.CompleteWorkflowRequest(id=created.id), metadata=two),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        found = [await flows.List(inference_pb2.ListWorkflowsRequest(), metadata=each) for each in (one, two)]
        assert [len(each.workflows) for each in found] == [1, 0]
        forged = inference_pb2_grpc.InferenceStub(channel).Generate(chat(tenant="two"), metadata=one)
        with pytest.raises(grpc.aio.AioRpcError, match="tenant must be the one") as caught:
            await forged.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_workflow_lives_over_grpc_and_http_alike(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        flows = inference_pb2_grpc.WorkflowsStub(channel)
        stages = [inference_pb2.StageSpec(name="a"), inference_pb2.StageSpec(name="b", after=["a"])]
        request = inference_pb2.CreateWorkflowRequest(deadline_ms=60_000, stages=stages, idempotency_key="k")
        flow = await flows.Create(request)
        assert (await flows.Create(request)).id == flow.id
        assert (flow.state, flow.deadline_ms, [stage.name for stage in flow.stages]) == (
            "running",
            60_000,
            ["a", "b"],
        )
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(chat(workflow=flow.id, stage="a")):
            pass
        done = await flows.CompleteStage(inference_pb2.CompleteStageRequest(id=flow.id, stage="b"))
        assert done.state == "done"
        status, shown, _ = await client.send("GET", f"/v1/workflows/{flow.id}")
        assert (status, shown["state"], shown["stages"][0]["calls_done"]) == (200, "done", 1)
        listed = await flows.List(inference_pb2.ListWorkflowsRequest(state="done"))
        assert ([item.id for item in listed.workflows], listed.has_more) == ([flow.id], False)
        await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000))
        listed = await flows.List(inference_pb2.ListWorkflowsRequest(limit=1))
        assert (len(listed.workflows), listed.has_more) == (1, True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(chat(workflow=flow.id, stage="a")).read()
        assert details(caught.value)["ErrorInfo"].reason == "workflow_ended"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flows.Cancel(inference_pb2.CancelWorkflowRequest(id=flow.id))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flows.Get(inference_pb2.GetWorkflowRequest(id="nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_readiness(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest())).status

        async def serving() -> bool:
            return await status() == health_pb2.HealthCheckResponse.SERVING

        async def down() -> bool:
            return await status() == health_pb2.HealthCheckResponse.NOT_SERVING

        await until(serving)
        engine.healthy = False
        await until(down)


async def test_reflection_lists_the_services(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"tidegate.v1.Inference", "tidegate.v1.Workflows", "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_an_oserror(up: Any) -> None:
    async with up(listen=LISTEN) as client:
        port = int(client.grpc.rpartition(":")[2])
        with pytest.raises(OSError, match=str(port)):
            async with asyncio.timeout(10), up(listen={"grpcPort": port}):
                pass


FALSE_USAGE = (
    b'{"choices":[{"index":0,"text":"w","finish_reason":"length"}],"usage":{"prompt_tokens":%s,"completion_tokens":%s}}'
)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": [null]}',
        b'{"choices": 5}',
        b"[1,2]",
        b"\x00\xff",
        FALSE_USAGE % (b"1099511627776", b"1099511627776"),
        FALSE_USAGE % (b"1.5e17", b"-1"),
        FALSE_USAGE % (b"NaN", b"null"),
    ],
)
async def test_false_answers_of_an_engine_end_a_call_with_a_code_of_its_own(
    up: Any, caplog: pytest.LogCaptureFixture, answer: bytes, streamed: bool
) -> None:
    garbage = b"data: " + answer + b"\n\ndata: [DONE]\n\n" if streamed else answer
    events, code = list[Any](), grpc.StatusCode.UNAVAILABLE
    async with (
        fake_engine.engine(garbage=garbage) as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(chat(max_tokens=4))
        with contextlib.suppress(grpc.aio.AioRpcError):
            events += [event async for event in call]
            code = grpc.StatusCode.OK
        assert await call.code() is code
    if events:
        assert events[-1].finished.prompt_tokens <= 1000
        assert events[-1].finished.completion_tokens <= 4
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
