"""Rules about the tree itself that no linter knows."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def tracked(*patterns: str) -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_hand_written_file_is_longer_than_500_lines() -> None:
    long = [
        path.relative_to(ROOT)
        for path in tracked("*.py")
        if not GENERATED.search(path.name) and len(path.read_text().splitlines()) > 500
    ]
    assert not long


def test_no_package_is_importable_from_the_root_under_a_standard_name() -> None:
    for folder in (
        "operator",
        "gateway",
        "engine-image",
        "proto",
        "policy",
        "sim",
        "cli",
        "control",
        "client",
        "tests",
    ):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not tracked("tests/**/__init__.py")


def test_no_two_files_are_told_apart_by_their_folder_alone() -> None:
    names = [
        path.name
        for path in tracked("*.py", "*.lua", "*.proto", "docs")
        if path.name not in ("__init__.py", "__main__.py", "conftest.py", "README.md")
        and path.parent.name != "suites"  # a suite has the name of the policy that it measures
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_modules_open_with_their_story() -> None:
    ours = ("policy", "gateway", "operator", "engine-image", "sim", "cli", "profiles", "control", "client", "examples")
    silent = [
        path.relative_to(ROOT)
        for path in tracked(*ours)
        if path.suffix == ".py" and path.read_text().strip() and not path.read_text().lstrip().startswith('"""')
    ]
    assert not silent


def test_generated_stubs_are_what_the_proto_files_say(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto/generate", tmp_path], check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert generated
    for path in generated:
        assert (ROOT / "proto" / path).read_text() == (tmp_path / path).read_text(), path


def test_every_dockerfile_takes_its_base_as_an_argument() -> None:
    dockerfiles = tracked("Dockerfile", "*/Dockerfile")
    assert dockerfiles
    for path in dockerfiles:
        code = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert code[0].startswith("ARG BASE"), path
        assert code[1].startswith("FROM ${BASE}"), path


@pytest.mark.parametrize(
    "word",
    [
        ".".join(("pypi", "org")),
        ".".join(("proxy", "golang", "org")),
        ".".join(("deb", "debian", "org")),
        "-".join(("", "", "index", "url")),
    ],
)
def test_no_file_names_a_package_index(word: str) -> None:
    naming = [p.relative_to(ROOT) for p in tracked() if p.suffix != ".sum" and word in p.read_text(errors="ignore")]
    assert not naming
