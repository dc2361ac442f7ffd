"""The compiled core gives the results of its sources, and is used only while it is made from them."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

import tidegate_gateway
import tidegate_policy
from tidegate_cli import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(tidegate_policy.__file__).parent
GATEWAY = pathlib.Path(tidegate_gateway.__file__).parent
CELL = ("--traces=formula1-hetero-1", "--rates=0.5", "--parts=sweep", "--seeds=2", "--workflows=3", "--jobs=1")


def run(*words: str, interpreted: bool) -> str:
    environment = {**os.environ, "TIDEGATE_INTERPRETED": "1" if interpreted else "0"}
    return subprocess.run(
        processes.ourselves(*words), env=environment, check=True, capture_output=True, text=True
    ).stdout


FILE = pathlib.Path("values.py")
VALUES = '''
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A value."""

    late: str = "x"
    """Needed fields may come after it."""
    needed: int
    items: list[int] = field(default_factory=list)

    def twice(self) -> int:
        return 2 * self.needed


@dataclass
class Base:
    one: int


@dataclass
class Derived(Base):
    two: int = 2


@dataclass(slots=True)
class Plain:
    one: int
    two: float = 0.5

'''
"""Classes of every kind that the compiled modules have."""


@pytest.fixture
def written_constructors() -> ModuleType:
    file = ROOT / "tools" / "compiled_core" / "written_constructors.py"
    spec = importlib.util.spec_from_file_location("written_constructors", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_written_constructors_make_the_values_that_dataclasses_make(written_constructors: ModuleType) -> None:
    written = written_constructors.written({FILE: VALUES})[FILE]
    assert [
        (was, now)
        for was, now in zip(VALUES.split("\n"), written.split("\n"), strict=True)
        if was.strip() and was != now
    ] == []
    assert written.count("def __init__(") == 2  # of Frozen and Plain; Derived has fields of Base
    for words in (
        "Frozen(needed=3)",
        "Frozen(needed=3, late='y', items=[1])",
        "Frozen(needed=3).twice()",
        "Plain(1)",
        "Plain(1, 2)",
        "Plain(two=3, one=1)",
        "Derived(1, 3)",
    ):
        results = []
        for source in (VALUES, written.replace("frozen=True", "frozen=False")):
            names: dict[str, object] = {"__name__": "values"}
            exec(source, names)
            results.append(repr(eval(words, names)))
        assert results[0] == results[1]


def test_a_class_without_a_blank_line_behind_it_is_an_error(written_constructors: ModuleType) -> None:
    source = "@dataclass(slots=True)\nclass A:\n    one: int\nTWO = 2\n"
    with pytest.raises(ValueError, match="blank line must follow the class A"):
        written_constructors.written({FILE: source})


@pytest.fixture
def extensions(tmp_path: pathlib.Path) -> ModuleType:
    """The module that finds the extensions, with a manifest for the sources of this tree and no extension in it."""
    file = shutil.copy(ROOT / "tools" / "compiled_core" / "tidegate_compiled.py", tmp_path / "__init__.py")
    spec = importlib.util.spec_from_file_location("found_extensions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / module.MANIFEST).write_text(json.dumps({"digest": module.digest([PACKAGE, GATEWAY]), "files": {}}))
    return module


def test_a_benchmark_writes_the_same_bytes_with_the_compiled_core_and_with_its_sources(tmp_path: pathlib.Path) -> None:
    if json.loads(run("version", "--json", interpreted=False))["decision core"] == "interpreted":
        pytest.skip("the decision core is not compiled; `make compiled` needs a C compiler and Python's headers")
    reports = []
    for interpreted in (True, False):
        out = tmp_path / str(interpreted)
        run("bench", "text2sql", *CELL, "--checked-share=0", f"--out={out}", interpreted=interpreted)
        reports.append((out / "report.json").read_bytes())
    assert reports[0] == reports[1]


def test_the_interpreted_core_can_be_chosen() -> None:
    assert json.loads(run("version", "--json", interpreted=True))["decision core"] == "interpreted"


def test_extensions_of_other_sources_are_not_used(
    extensions: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_INTERPRETED", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    edited = shutil.copytree(PACKAGE, tmp_path / "edited", ignore=shutil.ignore_patterns("__pycache__"))
    assert extensions.use(edited)
    with (edited / "cost.py").open("a") as source:
        source.write("# an edit\n")
    assert not extensions.use(edited)


def test_an_edit_of_the_gateway_sets_the_extensions_aside(extensions: ModuleType, tmp_path: pathlib.Path) -> None:
    edited = shutil.copytree(GATEWAY, tmp_path / "edited", ignore=shutil.ignore_patterns("__pycache__"))
    assert extensions.digest([PACKAGE, edited]) == extensions.digest([PACKAGE, GATEWAY])
    with (edited / "app.py").open("a") as source:
        source.write("# an edit\n")
    assert extensions.digest([PACKAGE, edited]) != extensions.digest([PACKAGE, GATEWAY])


def test_a_folder_without_a_manifest_is_not_used(
    extensions: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_INTERPRETED", raising=False)
    (tmp_path / extensions.MANIFEST).unlink()
    assert not extensions.use(PACKAGE)
