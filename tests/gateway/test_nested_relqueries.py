"""RelQueries that can be read and not written, because they are nested deeply, are errors of their clients."""

from typing import Any

import grpc
import orjson
import pytest
import relquery_requests

import fake_engine
from tidegate_gateway.openai import error_table, request_fields
from tidegate_gateway.relqueries import relquery_submission
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

TOO_DEEP = "the body is nested too deeply"


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("field", "levels", "words"),
    [
        (b'"foo":%s,"model":"fake","template":"{{city}}"', 300, TOO_DEEP),
        (b'"model":"fake","template":[{"role":"user","content":"{{city}}","y":%s}]', 300, TOO_DEEP),
        (b'"model":%s,"template":"{{city}}"', 1000, "model must be the name of a model"),
    ],
    ids=["field", "template", "model"],
)
async def test_a_relquery_that_is_nested_deeply_is_a_bad_request(
    up: Any, field: bytes, levels: int, words: str
) -> None:
    body = b'{%s,"rows":[{"city":"a"}]}' % (field % nested(levels))
    assert orjson.loads(body), "orjson reads it"
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", "/v1/relqueries", data=body)
        assert (status, error["error"]["code"]) == (400, "invalid_request")
        assert words in error["error"]["message"]
        assert not engine.bodies


async def test_more_fields_over_grpc_that_are_nested_deeply_are_a_bad_request(up: Any) -> None:
    rows = [inference_pb2.Row(values=row) for row in relquery_requests.rows(1)]
    asked = inference_pb2.SubmitRelQueryRequest(
        model="fake",
        text="{{city}}",
        list=inference_pb2.RowList(rows=rows),
        more_fields=f'{{"foo":{nested(300).decode()}}}',
    )
    async with fake_engine.engine() as engine, up(engine, listen={"grpcPort": 0}) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [event async for event in inference_pb2_grpc.RelQueriesStub(channel).Submit(asked)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == TOO_DEEP


class Unshown(list[float]):
    """A model whose text is too costly to make."""

    def __str__(self) -> str:
        raise AssertionError

    __repr__ = __str__


def test_a_model_that_is_no_text_is_never_made_one() -> None:
    document = {"model": Unshown([1.5]), "template": "{{city}}"}
    with pytest.raises(error_table.BadRequest, match="model must be the name of a model"):
        relquery_submission.spec(document, request_fields.RequestFields())
