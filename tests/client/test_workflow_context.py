"""A workflow of the client helper begins, ends and repeats its calls as the API says."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import tidegate_client

MESSAGES: Any = [{"role": "user", "content": "Plan a query."}]


@pytest.fixture
def client(running_up: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running_up.url}/v1", api_key="none") as made:
        yield made


def ask(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=4)
    return answer.choices[0].message.content or ""


def test_a_workflow_is_met_when_its_block_ends_before_the_deadline(client: openai.OpenAI) -> None:
    with tidegate_client.Workflow(client, deadline_s=60, tenant="product", session="chat-1") as flow:
        assert 0 < flow.left_s <= 60
        assert flow.outcome is None
        ask(flow.stage("plan"))
        ask(flow.stage("answer"))
    assert flow.outcome == "met"
    assert flow.record.ended_at is not None
    assert [(stage.name, stage.state, stage.calls_done) for stage in flow.record.stages] == [
        ("plan", "done", 1),
        ("answer", "done", 1),
    ]


def test_a_workflow_is_late_when_its_block_ends_after_the_deadline(client: openai.OpenAI) -> None:
    with tidegate_client.Workflow(client, deadline_s=0.1) as flow:
        time.sleep(flow.left_s + 0.01)
    assert flow.outcome == "late"
    assert flow.record.left_ms < 0


def test_an_exception_in_the_block_cancels_the_workflow_and_is_raised(client: openai.OpenAI) -> None:
    flow = tidegate_client.Workflow(client, deadline_s=60)
    with pytest.raises(ZeroDivisionError), flow:
        raise ZeroDivisionError
    assert flow.outcome == "cancelled"


def test_a_declared_workflow_takes_its_stages_and_completes_the_stage_of_a_tool(client: openai.OpenAI) -> None:
    stages = [tidegate_client.Stage(name="plan"), tidegate_client.Stage(name="tool", after=["plan"])]
    with tidegate_client.Workflow(client, deadline_s=60, stages=stages) as flow:
        ask(flow.stage("plan", urgency=2, deadline_s=30))
        assert flow.complete_stage("tool").outcome == "met"
    assert flow.outcome == "met"


def test_a_stage_may_be_repeated_as_often_as_it_is_declared(client: openai.OpenAI) -> None:
    stages = [
        tidegate_client.Stage(name="correct", repeat=3),
        tidegate_client.Stage(name="answer", after=["correct"]),
    ]
    with tidegate_client.Workflow(client, deadline_s=60, stages=stages) as flow:
        for state in ("running", "running", "done"):
            ask(flow.stage("correct"))
            assert flow.refresh().stages[0].state == state
        ask(flow.stage("answer"))
    assert flow.outcome == "met"


def test_a_workflow_of_a_template_has_the_deadline_and_the_stages_of_the_template(client: openai.OpenAI) -> None:
    with tidegate_client.Workflow(client, template="text2sql") as flow:
        assert 110 < flow.left_s <= 120
        assert [stage.name for stage in flow.record.stages] == ["link", "candidates", "correct", "evaluate"]


def test_a_workflow_that_was_ended_elsewhere_tells_how(client: openai.OpenAI) -> None:
    with tidegate_client.Workflow(client, deadline_s=60) as flow:
        client.delete(f"/workflows/{flow.id}", cast_to=tidegate_client.WorkflowRecord)
    assert flow.outcome == "cancelled"


def test_the_exception_of_the_block_is_raised_also_if_the_gateway_has_forgotten_the_workflow() -> None:
    record = {"id": "w", "state": "running", "deadline": "2026-01-01T00:00:00Z", "deadline_ms": 1000, "left_ms": 1000}

    def answer(request: httpx.Request) -> httpx.Response:
        status = {"POST": 201, "DELETE": 409, "GET": 404}[request.method]
        return httpx.Response(
            status, json={**record, "stages": []} if status == 201 else {"error": {"message": "gone"}}
        )

    transport = httpx.MockTransport(answer)
    with (
        openai.OpenAI(
            base_url="http://gateway/v1", api_key="x", http_client=httpx.Client(transport=transport)
        ) as client,
        pytest.raises(ZeroDivisionError),
        tidegate_client.Workflow(client, deadline_s=1),
    ):
        raise ZeroDivisionError


def test_a_workflow_that_has_not_begun_has_no_record() -> None:
    client = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")
    with pytest.raises(RuntimeError, match="begins with its `with` block"):
        _ = tidegate_client.Workflow(client, deadline_s=1).record
    client.close()


async def test_an_async_workflow_runs_calls_of_a_stage_together(running_up: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running_up.url}/v1", api_key="none") as client:
        stages = [tidegate_client.Stage(name="draft", parallel=3)]
        async with tidegate_client.AsyncWorkflow(client, deadline_s=60, stages=stages) as flow:
            drafts = (
                flow.stage("draft").chat.completions.create(model="sim", messages=MESSAGES, max_tokens=4)
                for _ in range(3)
            )
            await asyncio.gather(*drafts)
            assert (await flow.refresh()).outcome == "met"
        assert flow.outcome == "met"
        with pytest.raises(ZeroDivisionError):
            async with tidegate_client.AsyncWorkflow(client, deadline_s=60) as flow:
                raise ZeroDivisionError
        assert flow.outcome == "cancelled"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": ["a"], "deadline_s": 1}, r"stages must be a list of tidegate_client.Stage.* has 'a'"),
        ({"stages": "a", "deadline_s": 1}, r"stages must be a list of tidegate_client.Stage.* has 'a'"),
        ({}, r"needs deadline_s"),
        ({"client": "http://127.0.0.1:8000", "deadline_s": 1}, r"needs an openai.OpenAI as its first argument"),
    ],
)
def test_a_wrong_argument_of_a_workflow_is_named(arguments: dict[str, Any], words: str) -> None:
    given = {"client": openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none"), **arguments}
    with pytest.raises((TypeError, ValueError), match=words):
        tidegate_client.Workflow(given.pop("client"), **given)
    with pytest.raises(TypeError, match=r"AsyncWorkflow needs an openai.AsyncOpenAI"):
        tidegate_client.AsyncWorkflow(openai.OpenAI(api_key="none"), deadline_s=1)  # type: ignore[arg-type]
