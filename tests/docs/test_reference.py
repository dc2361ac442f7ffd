"""The reference pages are what the code says."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_generated_pages_are_what_the_code_says() -> None:
    program = [sys.executable, str(ROOT / "tools/reference/generate"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
