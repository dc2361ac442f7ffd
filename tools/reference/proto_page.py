"""docs/grpc.md from the .proto files."""

import pathlib
import re
from collections.abc import Iterator

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto" / "tidegate_proto" / "v1"
OPENING = """# gRPC

`tools/reference/generate` makes this page from `proto/tidegate_proto/v1`. A gateway serves `Inference`, `Workflows` and
`RelQueries` (port 9000); an engine serves `EngineControl`. All have reflection and `grpc.health.v1`. Fields without a
comment have the meaning of the fields and headers of the same names over HTTP ([http.md](http.md)); its table of errors has
the codes. Errors carry `ErrorInfo`, and `RetryInfo` where a repetition makes sense.

A connection may give up 1,000 calls a second before their answers, and 500 at first; what comes beyond is read later, and
the other calls of the connection wait behind it. Further frames that bring no call (pings, settings, calls without a key)
end a connection from 200 a second on. So a proxy that sends the calls of several tenants over one connection should bound
the calls that a tenant may begin in a second. Metadata of more than 32 KiB are refused with RESOURCE_EXHAUSTED. They end
the connection from 64 KiB on.

A client in Python, with the package `tidegate` (clients in other languages are generated from the files in `proto/`) and a
gateway of `tidegate up`, which prints its ports and serves the model `sim`:

```python run
import grpc
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

with grpc.insecure_channel("127.0.0.1:9000") as channel:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(model="sim", prompt="Hello", max_tokens=16, deadline_ms=5000)
    for event in stub.Generate(request):
        print(event.text, end="")
```
"""
COLUMNS = {
    "service": ("method", "request", "answer"),
    "message": ("field", "type", "number"),
    "enum": ("value", "number"),
}
BLOCK = re.compile(r"^(service|message|enum) (\w+) \{")
RPC = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\)")
FIELD = re.compile(r"(?:(optional|repeated) )?((?:map<[^>]+>)|[\w.]+) (\w+) = (\d+);")
VALUE = re.compile(r"([A-Z][A-Z0-9_]+) = (\d+);")


def page() -> str:
    return "\n".join([OPENING, *(line for path in sorted(PROTO.glob("*.proto"), reverse=True) for line in _file(path))])


def _file(path: pathlib.Path) -> Iterator[str]:
    yield f"## `{path.name}`\n"
    comments: list[str] = []
    rows: list[str] = []
    names: list[str] = []
    for raw in path.read_text().splitlines():
        line = raw.strip()
        if line.startswith("//"):
            comments.append(line.removeprefix("//").strip())
            continue
        block = BLOCK.match(line)
        if block and not names:
            kind, name = block.groups()
            names.append(f"{kind} {name}")
            yield from _head(kind, name, comments)
        elif line.endswith("{"):
            names.append("")
        elif line == "}" and names:
            names.pop()
            if not names:
                yield "\n".join(rows) + "\n" if rows else "No fields.\n"
                rows = []
        elif names:
            rows += _row(line, comments)
        comments = []
        if line.endswith("{}") and block:
            names.pop()


def _head(kind: str, name: str, comments: list[str]) -> Iterator[str]:
    yield f"### {kind} `{name}`\n"
    if comments:
        yield " ".join(comments) + "\n"
    columns = COLUMNS[kind]
    yield "| " + " | ".join([*columns, "meaning"]) + " |\n" + "|---" * (len(columns) + 1) + "|"


def _row(line: str, comments: list[str]) -> Iterator[str]:
    code, _, trailing = line.partition("//")
    meaning = " ".join([*comments, trailing.strip()]).strip().replace("|", "\\|")
    if found := RPC.search(code):
        name, sent, request, streamed, answer = found.groups()
        yield f"| `{name}` | {sent or ''}`{request}` | {streamed or ''}`{answer}` | {meaning} |"
    elif found := FIELD.search(code):
        label, kind, name, number = found.groups()
        yield f"| `{name}` | {f'{label} ' if label else ''}`{kind}` | {number} | {meaning} |"
    elif found := VALUE.search(code):
        yield f"| `{found[1]}` | {found[2]} | {meaning} |"
