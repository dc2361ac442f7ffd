"""The commands of the README and of the pages run, and print the output that the pages show.

A block of code with `run` after its language runs. A block `text output` after it shows its output, where `...` stands
for any text. The blocks of a page run in order, in one folder.
"""

import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = (
    "../README.md", "start.md", "how-to-application.md", "how-to-platform.md", "how-to-research.md", "client.md", "http.md",
    "grpc.md", "relqueries.md",
)  # fmt: skip
FENCE = re.compile(r"^```(\w+) (run|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIME_S = 180


@dataclass(slots=True, kw_only=True)
class Block:
    """A block to run, and its expected output."""

    language: str
    code: str
    expected: list[str] = field(default_factory=list)


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    for language, kind, text in FENCE.findall((ROOT / "docs" / page).read_text()):
        if kind == "run":
            found.append(Block(language=language, code=text))
        else:
            found[-1].expected.append(text)
    return found


def run(language: str, code: str, folder: pathlib.Path) -> str:
    words = {"sh": ["bash", "-euo", "pipefail", "-c", code], "python": [sys.executable, "-W", "error", "-c", code]}
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(words[language], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_S)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fits(output: str, expected: str) -> bool:
    pattern = ".*".join(re.escape(part.strip("\n")) for part in expected.strip().split("..."))
    return re.search(pattern, output.replace("\r", ""), re.DOTALL) is not None


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, running_up: Any, tmp_path: pathlib.Path) -> None:
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = blocks(page)
    assert found
    program = ""
    for block in found:
        code = block.code.replace("http://127.0.0.1:8001", running_up.admin_url)
        code = code.replace("127.0.0.1:9000", running_up.grpc)
        code = code.replace("http://127.0.0.1:8000", running_up.url)
        code = re.sub(r"python (examples/\S+)", rf"python \1 --url {running_up.url}", code)
        if block.language == "python":  # the Python blocks of a page are one program
            program += code
            continue
        output = run(block.language, code, tmp_path)
        for expected in block.expected:
            assert fits(output, expected), f"{code}\n{output}"
    if program:
        run("python", program, tmp_path)


def test_every_link_of_the_documents_has_its_target() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", re.sub(r"`[^`\n]*`", "", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*") if page.is_file() and page.name != "README.md"]
    folders = [folder.name for folder in (ROOT / "docs").glob("*/") if (folder / "README.md").exists()]
    assert not [name for name in pages if f"]({name})" not in index]
    assert not [name for name in folders if f"({name}/README.md)" not in index]
