"""What reaches the gateway from outside, changed again and again so that it takes new ways through the code (`fuzzing`).

`make test` tries the valid examples of each harness alone. `make faults` fuzzes each harness for `FUZZ_S` seconds.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from fuzzing.__main__ import HARNESSES

FUZZ_S = 60
START_S = 600
"""For a child to import and instrument the gateway, on a busy machine."""
FOLDER = pathlib.Path(__file__).parent


def run(*words: str, within_s: float) -> subprocess.CompletedProcess[str]:
    """A child that runs harnesses; atheris ends its process itself, and the tests here run the compiled core.

    libFuzzer bounds the greatest memory that its process has had. Linux counts that of the process which executed the
    program, and this one may have had much, so a shell stands between them."""
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "fuzzing", *words]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "TIDEGATE_INTERPRETED": "1"}
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        check=False,
    )


def test_the_valid_examples_of_all_harnesses_pass() -> None:
    child = run("all", "--replay", within_s=START_S)
    assert child.returncode == 0, child.stdout[-5000:]
    assert child.stdout.split()[::3] == [f"{name}:" for name in HARNESSES]


@pytest.mark.faults
@pytest.mark.timeout(START_S + 2 * FUZZ_S)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python or machine"
)
@pytest.mark.parametrize("name", HARNESSES)
def test_no_input_breaks_a_parser(name: str, tmp_path: pathlib.Path, figure: Any) -> None:
    child = run(name, f"--seconds={FUZZ_S}", f"--folder={tmp_path}", within_s=START_S + FUZZ_S)
    found = sorted(tmp_path.glob(f"finding-{name}-*"))
    executions = re.search(r"number_of_executed_units: (\d+)", child.stdout)
    covered = re.findall(r"cov: (\d+) ft: (\d+)", child.stdout)
    assert executions is not None, child.stdout[-5000:]
    assert covered, child.stdout[-5000:]
    edges, features = covered[-1]
    figure(f"fuzzed {name}: inputs", executions[1], goal="no finding", met=not found)
    figure(f"fuzzed {name}: branches, features covered", f"{edges}, {features}", goal="-", met=True)
    inputs = [f"{path.name}: {path.read_bytes().hex()}" for path in found]
    assert child.returncode == 0, "\n".join([child.stdout[-5000:], *inputs])
    assert not found, inputs
