"""Every program in `benchmarks/` starts. Its modules are imported by name, so a name that moves breaks it."""

import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(
    path for path in FOLDER.iterdir() if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(path, id=path.name, marks=[pytest.mark.vllm] if path.name == "engine" else []) for path in PROGRAMS],
)
def test_a_benchmark_starts_and_tells_its_options(program: pathlib.Path) -> None:
    told = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"usage: {program.name}")


def test_the_programs_are_found() -> None:
    assert len(PROGRAMS) > 10
