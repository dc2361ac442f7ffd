"""The message of `tidegate up` when it is ready: addresses, a first call to paste, and notes."""

import argparse
import json
from collections.abc import Iterator, Sequence

from tidegate_cli import engine_spec


def text(
    options: argparse.Namespace,
    wanted: Sequence[engine_spec.Engine],
    *,
    url: str,
    model: str,
    needs_key: bool = False,
) -> str:
    """The message for a gateway at `url` that serves `model`; `options` are those of `tidegate up`."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 24})
    names = ", ".join(engine.name for engine in wanted) or "those of the services in the settings file"
    ports = "" if options.grpc_port is None else f"gRPC {options.grpc_port}, "
    lines = [
        f"tidegate is ready: {url}   ({ports}admin {options.admin_port}; engines: {names}; "
        f"logs in {options.state / 'logs'})",
        *_notes(wanted),
        "",
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\",
        *(['    -H "authorization: Bearer $TIDEGATE_API_KEY" \\'] if needs_key else []),
        f"    -d '{body}'",
        "",
        f"The page at {url}/ shows the live state, `tidegate top --url {url}` shows it in a terminal,",
        f"and http://127.0.0.1:{options.admin_port}/admin/state has it as JSON.",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines) + "\n"


def _notes(wanted: Sequence[engine_spec.Engine]) -> Iterator[str]:
    if any(isinstance(engine, engine_spec.Simulated) for engine in wanted):
        yield "The engines are simulated: times and queues are real, the text is filler."
        yield "`tidegate up --engines vllm`, or `make up ENGINES=vllm` in a clone, runs a real model."
    if any(isinstance(engine, engine_spec.Running) and engine.control is None for engine in wanted):
        yield "Engines without `control` keep their own scheduler: a policy changes only the gateway's queue."
