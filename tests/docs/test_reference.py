"""The reference pages agree with the code."""

import pathlib
import re
import subprocess
import sys

from tidegate_policy.policies import POLICIES

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_generated_pages_agree_with_the_code() -> None:
    program = [sys.executable, str(ROOT / "tools/reference/generate"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_pages_name_every_policy() -> None:
    table = (ROOT / "docs/policies/README.md").read_text()
    assert {
        name for name, page in re.findall(r"^\| \[`([a-z-]+)`\]\(([a-z-]+)\.md\)", table, re.M) if name == page
    } == set(POLICIES)
    assert f"describes all {len(POLICIES)} policies" in (ROOT / "README.md").read_text()
