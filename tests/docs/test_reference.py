"""The reference pages agree with the code."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_generated_pages_agree_with_the_code() -> None:
    program = [sys.executable, str(ROOT / "tools/reference/generate"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
