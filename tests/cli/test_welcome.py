"""What `tidegate up` says when it is ready."""

import argparse
import json
import pathlib
import shlex

import pytest

from tidegate_cli import engine_spec, welcome

OPTIONS = argparse.Namespace(grpc_port=9000, admin_port=8001, state=pathlib.Path("/state"))
URL = "http://127.0.0.1:8000"


def said(spec: str) -> str:
    return welcome.text(OPTIONS, engine_spec.parse(spec, speed=1.0), url=URL, model="a model")


def test_the_message_names_the_page_the_admin_address_and_the_logs() -> None:
    text = said("sim:a100,a6000")
    assert text.startswith(f"tidegate is ready: {URL} ")
    assert "engines: a100, a6000; logs in /state/logs" in text
    assert f"The page at {URL}/ shows the live state" in text
    assert f"`tidegate top --url {URL}`" in text
    assert "http://127.0.0.1:8001/admin/state" in text


def test_the_first_call_has_a_key_where_callers_need_one() -> None:
    header = '-H "authorization: Bearer $TIDEGATE_API_KEY"'
    assert header not in said("sim:a100")
    assert header in welcome.text(OPTIONS, engine_spec.parse("sim:a100", speed=1.0), url=URL, model="m", needs_key=True)


@pytest.mark.parametrize(
    ("spec", "simulated", "own_order"),
    [("sim:a100", True, False), ("vllm", False, False), ("http://127.0.0.1:8100", False, True)],
)
def test_the_message_notes_simulated_and_foreign_engines(spec: str, simulated: bool, own_order: bool) -> None:
    text = said(spec)
    assert ("are simulated" in text) == simulated
    assert ("keep their own scheduler" in text) == own_order


def test_an_engine_with_control_follows_the_policy() -> None:
    engine = engine_spec.Running(name="a", url="http://127.0.0.1:8100", control="127.0.0.1:9010")
    assert "keep their own scheduler" not in welcome.text(OPTIONS, [engine], url=URL, model="m")


def test_the_first_call_can_be_pasted() -> None:
    lines = said("vllm").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  curl "))
    words = shlex.split("\n".join(lines[first : first + 2]))
    assert words[1] == f"{URL}/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "a model"
