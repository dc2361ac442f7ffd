"""Two real vLLM engines for the whole session; the one with vLLM's own scheduler has stopped when tests ask about it."""

import contextlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import grpc

from tidegate_engine import checkpoints, live_engine
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

SEQUENCES = "8"
PROMPTS = [f"Count on from {number}: {number}," for number in range(10)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What an engine with vLLM's own scheduler was like; it has been stopped since."""

    state: control_pb2.EngineState
    refusal: grpc.RpcError
    answers: dict[str, str]


@contextlib.contextmanager
def control_of(engine):
    with grpc.insecure_channel(engine.control) as channel:
        yield control_pb2_grpc.EngineControlStub(channel)


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    try:
        checkpoints.smollm2()
    except checkpoints.MissingPackage as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def greedy():
    """Greedy completions, one after the other, of prompts that the model can continue."""

    def answers(engine):
        texts = {}
        for prompt in PROMPTS:
            body = json.dumps({"model": live_engine.MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0})
            call = urllib.request.Request(
                f"{engine.http}/v1/completions", body.encode(), {"content-type": "application/json"}
            )
            texts[prompt] = json.load(urllib.request.urlopen(call, timeout=60))["choices"][0]["text"]
        return texts

    return answers


@pytest.fixture(scope="session")
def stock_soon(logs, greedy):
    """The `Stock` to come: its engine starts beside the other one, since a start keeps one core busy for a minute."""

    def run():
        amputated = ("--scheduler-cls", "without_remove_request.scheduler", "--max-num-seqs", SEQUENCES)
        here = {"PYTHONPATH": str(Path(__file__).parent)}
        with (
            live_engine.served(logs / "stock.log", *amputated, environment=here) as engine,
            control_of(engine) as control,
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                control.SetPolicy(control_pb2.SetPolicyRequest(policy="sjf"))
            state = control.GetState(control_pb2.GetStateRequest())
            return Stock(state=state, refusal=refusal.value, answers=greedy(engine))

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run)


@pytest.fixture(scope="session")
def engine(logs, stock_soon):
    """The engine that most tests use. It must run our scheduler: a run that fell back is no test of it."""
    with live_engine.served(logs / "engine.log", "--max-num-seqs", SEQUENCES, "--policy", "fcfs") as started:
        with control_of(started) as control:
            reason = control.GetState(control_pb2.GetStateRequest()).fallback_reason
        if reason:
            pytest.fail(f"vLLM fell back to its own scheduler: {reason}")
        yield started


@pytest.fixture(scope="session")
def stock(engine, stock_soon):
    """An engine whose vLLM had lost something that our scheduler needs."""
    return stock_soon.result()


@pytest.fixture
def control(engine):
    """EngineControl; afterwards the engine is as it was."""
    with control_of(engine) as stub:
        yield stub
        stub.SetPolicy(control_pb2.SetPolicyRequest(policy="fcfs", reason="between tests"))
        stub.SetControls(
            control_pb2.SetControlsRequest(controls=control_pb2.Controls(max_running=0, max_step_tokens=0))
        )
