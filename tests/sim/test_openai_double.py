"""The simulated engine speaks vLLM's HTTP and EngineControl, and keeps time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import aiohttp
import grpc
import openai
import pytest
from aiohttp import web

from tidegate_control import control_server
from tidegate_policy import cost, labels
from tidegate_policy.engine import engine_status
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_proto.v1 import control_pb2, control_pb2_grpc
from tidegate_sim import loop_governor, openai_double, realtime, sim_request

COST = cost.CostModel(step_s=0.002, prefill_s=1e-6, max_batch=2, max_step_tokens=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    engine: realtime.RealtimeEngine
    url: str
    control: control_pb2_grpc.EngineControlStub
    http: aiohttp.ClientSession

    async def ask(self, path: str = "/v1/chat/completions", **fields: object) -> tuple[int, dict[str, object]]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], **fields}
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = realtime.RealtimeEngine(COST, policy="fcfs", prefix_cache=True)
    app = openai_double.SimulatedEngine(
        engine, openai_double.Identity(model="m", profile="test", adapters=("adapter",))
    ).app
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    loop = asyncio.get_running_loop()
    address = f"unix:/tmp/tidegate-test-{port}.sock"
    stop_control = control_server.serve(
        loop_governor.LoopGovernor(engine, "test", loop), address=address, engine_version=openai_double.VERSION
    ).stop
    stepping = asyncio.create_task(engine.run())
    async with aiohttp.ClientSession() as http, grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.EngineControlStub(channel)
        yield Rig(engine=engine, url=f"http://127.0.0.1:{port}", control=stub, http=http)
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping
    await loop.run_in_executor(None, stop_control)
    await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def test_an_answer_has_vllms_shape_and_says_that_it_is_simulated(rig: Rig) -> None:
    status, answer = await rig.ask(max_tokens=5)
    assert status == 200
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("[simulated test engine]")


async def test_a_stream_ends_with_usage_and_done(rig: Rig) -> None:
    body = {
        "model": "m",
        "prompt": "x",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with rig.http.post(rig.url + "/v1/completions", json=body) as response:
        events = [event[6:] for event in (await response.text()).split("\n\n") if event]
    assert events[-1] == "[DONE]"
    decoded = [json.loads(event) for event in events[:-1]]
    assert decoded[-1]["usage"]["completion_tokens"] == 4
    assert [choice["finish_reason"] for event in decoded for choice in event["choices"]] == [None] * 4 + ["length"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        pytest.param({"model": "other"}, "this engine serves 'm'", id="model"),
        pytest.param({"max_tokens": 0}, "max_tokens must be at least 1, got 0", id="max_tokens"),
        pytest.param({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens must be at", id="none"),
        pytest.param({"max_tokens": "5"}, "max_tokens must be an integer", id="text"),
        pytest.param({"n": 0}, "n must be at least 1, got 0", id="n"),
        pytest.param({"n": True}, "n must be an integer", id="n is no number"),
        pytest.param({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling", id="greedy"),
        pytest.param({"n": 10**9}, "at most 16384 choices", id="too many"),
        pytest.param({"messages": None}, "messages must be a list", id="messages"),
        pytest.param({"messages": ["hi"]}, "messages must be a list", id="message"),
        pytest.param({"stream_options": 1}, "stream_options must be an object", id="options"),
    ],
)
async def test_a_bad_request_is_rejected_as_vllm_rejects_it(rig: Rig, fields: dict[str, object], sentence: str) -> None:
    status, answer = await rig.ask(**fields)
    assert status == 400
    assert sentence in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", ""], ["a", 1], [[]], {"text": "a"}])
async def test_a_prompt_must_be_text_or_token_ids(rig: Rig, prompt: object) -> None:
    status, answer = await rig.ask("/v1/completions", prompt=prompt)
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_n_gives_n_choices_and_counts_the_prompt_once(rig: Rig) -> None:
    status, answer = await rig.ask(n=3, max_tokens=5)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 15, "total_tokens": 17}


@pytest.mark.parametrize("prompts", [["aaaaaaaa", "bbbb"], [[1, 2], [3]]])
async def test_each_prompt_of_a_list_gets_its_choices(rig: Rig, prompts: object) -> None:
    status, answer = await rig.ask("/v1/completions", prompt=prompts, n=2, max_tokens=3)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_choice_is_streamed_with_its_index_to_its_own_end(rig: Rig, path: str) -> None:
    body = {"model": "m", "n": 3, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    async with rig.http.post(rig.url + path, json=body) as response:
        events = [json.loads(event[6:]) for event in (await response.text()).split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    texts = ["", "", ""]
    for choice in choices:
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert texts == ["[simulated test engine] the"] * 3
    ends = [choice["index"] for choice in choices if choice["finish_reason"] == "length"]
    assert sorted(ends) == [0, 1, 2]
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_a_client_that_closes_its_connection_frees_all_its_choices(rig: Rig) -> None:
    body = {"model": "m", "prompt": ["x", "y"], "n": 2, "max_tokens": 100_000, "stream": True}
    response = await rig.http.post(rig.url + "/v1/completions", json=body)
    await response.content.readany()
    assert (rig.engine.running, rig.engine.waiting) == (2, 2)
    response.close()
    await until(lambda: (rig.engine.running, rig.engine.waiting) == (0, 0))


async def test_a_client_that_closes_its_connection_frees_the_engine(rig: Rig) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 100_000, "stream": True}
    response = await rig.http.post(rig.url + "/v1/completions", json=body)
    await response.content.readany()
    assert rig.engine.running == 1
    response.close()
    await until(lambda: rig.engine.running == 0)


async def test_waiting_calls_are_reordered_by_set_policy_and_start_in_that_order(rig: Rig) -> None:
    async def start(output_tokens: int, urgency: int) -> None:
        await rig.ask(max_tokens=output_tokens, vllm_xargs={"tg.urgency": urgency, "tg.out_pred": output_tokens})

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(start(300, 0))
        await until(lambda: rig.engine.running == 2)
        for tokens in (30, 10, 20):
            tasks.create_task(start(tokens, 2))
        await until(lambda: rig.engine.waiting == 3)
        before = (await rig.control.GetState(control_pb2.GetStateRequest())).waiting_ids
        answer = await rig.control.SetPolicy(control_pb2.SetPolicyRequest(policy="sjf", reason="test"))
        state = await rig.control.GetState(control_pb2.GetStateRequest())
    assert (answer.policy, answer.previous, answer.reordered) == ("sjf", "fcfs", 3)
    assert (state.policy, state.policy_reason, state.running, state.waiting) == ("sjf", "test", 2, 3)
    assert state.simulated_profile == "test"
    assert list(state.waiting_ids) == [before[1], before[2], before[0]]


async def test_an_unknown_policy_is_rejected_and_changes_nothing(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as rejection:
        await rig.control.SetPolicy(control_pb2.SetPolicyRequest(policy="lifo"))
    assert rejection.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rig.engine.core.policy.name == "fcfs"


@pytest.mark.parametrize("parameters", [{"fast_share": 7.0}, {"speed": 1.0}])
async def test_a_bad_parameter_is_rejected_with_its_name(rig: Rig, parameters: dict[str, float]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as rejection:
        await rig.control.SetPolicy(control_pb2.SetPolicyRequest(policy="two-lane", parameters=parameters))
    assert rejection.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(parameters)) in str(rejection.value.details())
    assert rig.engine.core.policy.name == "fcfs"


async def test_parameters_in_force_are_in_the_state_and_in_the_reports(rig: Rig) -> None:
    await rig.control.SetPolicy(control_pb2.SetPolicyRequest(policy="two-lane", parameters={"fast_share": 0.5}))
    state = await rig.control.GetState(control_pb2.GetStateRequest())
    reports = rig.control.WatchQos(control_pb2.WatchQosRequest(period_s=0.1))
    report = await reports.read()
    reports.cancel()
    assert dict(state.policy_parameters) == dict(report.policy_parameters) == {"threshold_s": 4.0, "fast_share": 0.5}


class PreemptOnce:
    """A regulator that preempts the running calls of the third step."""

    SAFETY = False

    def __init__(self) -> None:
        self.steps = 0

    def observe(self, facts: StepFacts) -> None:
        self.steps += 1

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        running = tuple(call.item.call.id for call in engine.running)
        return replace(plan, preempt=running) if self.steps == 3 else plan


async def test_the_engine_double_carries_out_the_plans_of_a_regulator() -> None:
    engine = realtime.RealtimeEngine(COST, policy="fcfs", regulators=[PreemptOnce()])
    stepping = asyncio.create_task(engine.run())
    call = Call(id=CallId("a"), arrived_at_s=0.0, prompt_tokens=10, output_predicted=8)
    assert [done async for _, done in engine.generate([call], 8, [()])] == list(range(1, 9))
    assert engine.core.preemptions == 1
    stepping.cancel()


async def test_controls_bound_the_calls_that_run_together(rig: Rig) -> None:
    controls = control_pb2.Controls(max_running=1)
    await rig.control.SetControls(control_pb2.SetControlsRequest(controls=controls))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(rig.ask(max_tokens=20))
        await until(lambda: rig.engine.running == 1 and rig.engine.waiting == 2)
    assert rig.engine.running == 0


async def test_reports_count_every_call_once(rig: Rig) -> None:
    reports = rig.control.WatchQos(control_pb2.WatchQosRequest(period_s=0.1))
    first = await reports.read()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(rig.ask(max_tokens=5))
    finished = first.finished
    async with asyncio.timeout(10):
        while finished < 6:
            finished += (await reports.read()).finished
    reports.cancel()
    assert finished == 6


async def test_an_adapter_is_served_under_its_name() -> None:
    engine = realtime.RealtimeEngine(COST, policy="fcfs")
    identity = openai_double.Identity(model="m", profile="test", adapters=("sql",))
    runner = web.AppRunner(openai_double.SimulatedEngine(engine, identity).app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stepping = asyncio.create_task(engine.run())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
        async with http.get("/v1/models") as response:
            assert [item["id"] for item in (await response.json())["data"]] == ["m", "sql"]
        for model, status in (("sql", 200), ("m", 200), ("other", 400)):
            async with http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1}) as response:
                answer = await response.json()
                assert (response.status, answer.get("model")) == (status, model if status == 200 else None)
    stepping.cancel()
    await runner.cleanup()


def test_a_watch_may_be_closed_after_its_engine_has_ended() -> None:
    async def watch() -> engine_status.Watch:
        engine, loop = realtime.RealtimeEngine(COST, policy="fcfs"), asyncio.get_running_loop()
        return await loop.run_in_executor(None, loop_governor.LoopGovernor(engine, "test", loop).watch)

    asyncio.run(watch()).close()


async def test_tokens_come_at_the_pace_of_the_profile(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    call = Call(id=CallId("a"), arrived_at_s=loop.time(), prompt_tokens=10, output_predicted=200)
    start = loop.time()
    async for _, done in rig.engine.generate([call], 200, [()]):
        assert done <= 200
    assert loop.time() - start >= COST.call_seconds(call) * 0.99


def test_labels_survive_the_wire() -> None:
    call = Call(id=CallId("a"), arrived_at_s=0.0, prompt_tokens=1, output_predicted=9, tenant="t", due_at_s=3.0)
    body = json.dumps({"prompt": "x", "max_tokens": 20, "vllm_xargs": labels.write(0.0, call)}).encode()

    async def parse() -> Call:
        return sim_request.parse(body, chat=False, models=["m"]).calls[0]

    read = asyncio.run(parse())
    assert (read.tenant, read.output_predicted) == ("t", 9)
    assert read.due_at_s is not None
    assert read.due_at_s - read.arrived_at_s == pytest.approx(3.0)


async def test_a_response_has_vllms_shape_whole_and_streamed(rig: Rig) -> None:
    items = [
        {"role": "user", "content": "hello there"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    for given in ("hello there", items):
        body = {"model": "m", "input": given, "instructions": "Be brief.", "max_output_tokens": 5}
        async with rig.http.post(rig.url + "/v1/responses", json=body) as response:
            whole = await response.json()
        assert (whole["object"], whole["status"], whole["usage"]["output_tokens"]) == ("response", "incomplete", 5)
        assert whole["output"][0]["content"][0]["text"].startswith("[simulated test engine]")
        async with rig.http.post(rig.url + "/v1/responses", json={**body, "stream": True}) as response:
            events = [event.partition("\ndata: ") for event in (await response.text()).split("\n\n") if event]
        assert [name for name, _, _ in events].count("event: response.output_text.delta") == 5
        last = json.loads(events[-1][2])
        assert (last["type"], last["response"]["usage"]) == ("response.incomplete", whole["usage"])
    for bad in ({"input": []}, {"input": "x", "model": "other"}, {"input": "x", "max_output_tokens": 0}):
        async with rig.http.post(rig.url + "/v1/responses", json={"model": "m", **bad}) as response:
            assert response.status in (400, 404)


async def test_a_required_tool_is_called_whole_and_streamed(rig: Rig) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    asked: dict[str, object] = {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": "required",
    }
    _, answer = await rig.ask(**asked)
    choice = answer["choices"][0]  # type: ignore[index]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "simulated"})
    _, cut = await rig.ask(**asked, max_tokens=1)
    assert cut["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
    deltas = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "?"}],
        stream=True,
        **asked,  # type: ignore[call-overload]
    )
    calls = [chunk.choices[0].delta.tool_calls[0] async for chunk in deltas if chunk.choices[0].delta.tool_calls]
    await client.close()
    assert calls[0].function.name == "weather"
    assert json.loads("".join(part.function.arguments for part in calls)) == {"city": "simulated"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 1_000_000}, "dimensions"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_wrong_requests_for_embeddings_name_their_field(rig: Rig, fields: dict[str, object], param: str) -> None:
    status, answer = await rig.ask("/v1/embeddings", **fields)
    assert (status, answer["error"]["param"]) == (400, param)  # type: ignore[index]


async def test_an_embedding_takes_the_time_of_its_prompt(rig: Rig) -> None:
    status, answer = await rig.ask("/v1/embeddings", input=["a city", [1, 2, 3]])
    assert (status, len(answer["data"]), rig.engine.running) == (200, 2, 0)  # type: ignore[arg-type]
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    async with rig.http.get(rig.url + "/metrics") as response:
        page = await response.text()
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 4.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0' in page


async def test_answers_that_do_not_fit_into_the_memory_start_together_and_are_preempted_as_in_vllm() -> None:
    """Memory is taken as an answer grows, and not kept for whole answers."""
    tight = cost.CostModel(step_s=0.001, prefill_s=1e-6, kv_tokens=16 * 33, max_batch=4)
    engine = realtime.RealtimeEngine(tight, policy="fcfs")
    stepping = asyncio.create_task(engine.run())
    calls = [Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=32, output_predicted=8) for name in "abc"]
    most = 0
    async for _ in engine.generate(calls, 200, [()] * 3):
        most = max(most, engine.running)
    assert most == 3
    assert engine.core.preemptions > 0
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0.0)
    stepping.cancel()


async def test_a_call_that_is_longer_than_the_context_is_rejected_in_vllms_words(rig: Rig) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": rig.engine.context}
    async with rig.http.post(rig.url + "/v1/completions", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"].startswith("This model's maximum context length is ")
    body = {"model": "m", "prompt": [7] * (rig.engine.context - 3)}
    async with rig.http.post(rig.url + "/v1/completions", json=body) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 3
    async with rig.http.get(rig.url + "/v1/models") as response:
        assert (await response.json())["data"][0]["max_model_len"] == rig.engine.context


TEXT = "".join(f"{number:4}" for number in range(160))
"""160 tokens, of which no ten blocks are alike."""


@pytest.mark.parametrize(
    ("path", "first", "second", "cached"),
    [
        ("completions", {"prompt": TEXT}, {"prompt": TEXT}, 144),
        ("completions", {"prompt": TEXT}, {"prompt": TEXT[:400] + "and now something else" * 5}, 96),
        ("completions", {"prompt": TEXT}, {"prompt": "x" + TEXT}, 0),
        ("completions", {"prompt": TEXT}, {"prompt": TEXT, "cache_salt": "of another tenant"}, 0),
        ("completions", {"prompt": TEXT}, {"prompt": TEXT, "model": "adapter"}, 0),
        ("completions", {"prompt": [*range(160)]}, {"prompt": [*range(100), *range(60)]}, 96),
        ("completions", {"prompt": TEXT}, {"prompt": [TEXT, TEXT], "n": 2}, 4 * 144),
        ("chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, {}, 144),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": TEXT}]},
            {
                "messages": [{"role": "user", "content": TEXT}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            0,
        ),
        ("responses", {"input": TEXT}, {}, 144),
        ("embeddings", {"input": TEXT}, {}, 144),
    ],
)
async def test_an_engine_computes_the_equal_beginning_of_two_prompts_once(
    rig: Rig, path, first, second, cached
) -> None:
    for body in (first, second or first):
        async with rig.http.post(f"{rig.url}/v1/{path}", json={"model": "m", **body}) as response:
            assert response.status == 200, await response.text()
    async with rig.http.get(rig.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    (hits,) = (line for line in lines if line.startswith("vllm:prefix_cache_hits_total"))
    assert float(hits.split()[-1]) == cached
