"""Messages of all methods of the gRPC port. The first byte of an input chooses the method, the second one the compression.

Property: the call ends with a status that does not blame the gateway, and nothing of it goes on.
"""

import gzip
import zlib

from fuzzing import http2_ports, memory_gateway
from google.protobuf import message

from tidegate_gateway.edge import http2_frames
from tidegate_proto.v1 import inference_pb2 as v1

_server = http2_ports.grpc_server()
METHODS = sorted(http2_ports.grpc_methods())
_ENCODINGS = ("", "gzip", "deflate", "identity")

_CONVERSATION = v1.Messages(messages=[v1.Message(role="user", content="x")])
_TEMPLATE = v1.Messages(messages=[v1.Message(role="user", content="{{a}}")])
MESSAGES: dict[str, list[message.Message]] = {
    "Inference/Generate": [
        v1.GenerateRequest(model="fake", prompt="x", max_tokens=2, temperature=0.5, stop=["a"], seed=-1),
        v1.GenerateRequest(model="fake", messages=_CONVERSATION, slo_class="c", urgency=2, deadline_ms=500),
        v1.GenerateRequest(model="fake", prompt="x", workflow="w", stage="s", session="t", request_id="r"),
    ],
    "Inference/Call": [
        v1.CallRequest(path="/v1/completions", body=b'{"model":"fake","prompt":"x","stream":true}', tenant="a"),
        v1.CallRequest(path="/v1/embeddings", body=b'{"model":"fake","input":["x"]}', slo_ttft_ms=5, slo_tpot_ms=1),
    ],
    "Workflows/Create": [
        v1.CreateWorkflowRequest(
            id="w",
            tenant="a",
            deadline_ms=5000,
            idempotency_key="k",
            stages=[v1.StageSpec(name="a"), v1.StageSpec(name="b", after=["a"], parallel=2, repeat=3)],
        )
    ],
    "Workflows/Get": [v1.GetWorkflowRequest(id="w")],
    "Workflows/List": [v1.ListWorkflowsRequest(state="running", limit=5)],
    "Workflows/CompleteStage": [v1.CompleteStageRequest(id="w", stage="a", idempotency_key="k")],
    "RelQueries/Submit": [
        v1.SubmitRelQueryRequest(
            model="fake",
            text="{{a}} and {{b}}",
            list=v1.RowList(rows=[v1.Row(values={"a": "1", "b": "2"})]),
            more_fields='{"temperature":0}',
            max_tokens=3,
        ),
        v1.SubmitRelQueryRequest(
            model="fake", messages=_TEMPLATE, file=v1.RowFile(format=v1.RowFile.Format.CSV, content=b'a,b\n1,"2\n"\n')
        ),
        v1.SubmitRelQueryRequest(
            model="fake",
            text="{{a}}",
            endpoint="/v1/completions",
            file=v1.RowFile(format=v1.RowFile.Format.JSON_LINES, content=b'{"a":1}\n\n{"a":null}\n'),
        ),
        v1.SubmitRelQueryRequest(model="fake", text="{{a}}", rows_url="https://host/a.csv", deadline_ms=900),
    ],
    "RelQueries/Rows": [v1.RowsRequest(id="q", after=3)],
}
_COMPRESSED = (lambda raw: raw, gzip.compress, zlib.compress)


def _seeds() -> list[bytes]:
    found = [bytes((number, 0)) for number in range(len(METHODS))]
    for name, messages in MESSAGES.items():
        number = METHODS.index("/tidegate.v1." + name)
        for each in messages:
            raw = each.SerializeToString()
            found += [bytes((number, coding)) + compress(raw) for coding, compress in enumerate(_COMPRESSED[:1])]
    generate = MESSAGES["Inference/Generate"][0].SerializeToString()
    number = METHODS.index("/tidegate.v1.Inference/Generate")
    return found + [bytes((number, coding)) + compress(generate) for coding, compress in enumerate(_COMPRESSED)]


SEEDS = _seeds()
DICTIONARY = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "{{a}}", "fake", "\\x1f\\x8b\\x08",
    "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x01", "\\x00\\x00\\xc0\\x7f", "\\x00\\x00\\x80\\x7f",
    "\\xed\\xa0\\x80", '{"a":1}\\x0a', "a,b\\x0a1,2\\x0a", '{"n":2}', '{"stream":true}', "\\x0a\\x00", "\\x12\\x00",
)  # fmt: skip


def try_input(data: bytes) -> None:
    if len(data) >= 2:
        memory_gateway.run(_call(data))


async def _call(data: bytes) -> None:
    encoding = _ENCODINGS[data[1] % len(_ENCODINGS)]
    path = METHODS[data[0] % len(METHODS)]
    opened = http2_ports.opened(path, *([("grpc-encoding", encoding)] if encoding else []))
    sent = http2_ports.data(data[2:], compressed=bool(encoding), ends=True)
    await http2_ports.converse(
        _server, [http2_frames.PREFACE + opened, sent], lambda: not http2_ports.CALLS.running, waits=bool(encoding)
    )
