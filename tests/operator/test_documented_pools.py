"""The API server accepts the objects that the pages for operators show."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = ("operations.md", "placement.md", "weights.md")


def blocks():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL), start=1):
            if block.startswith("apiVersion:"):
                yield pytest.param(block, id=f"{page} {number}")


@pytest.mark.parametrize("block", [*blocks()])
def test_the_api_server_accepts_a_documented_object(plane, namespace, block):
    said = plane.kubectl("-n", namespace, "create", "--dry-run=server", "-f", "-", stdin=block)
    assert all(line.endswith("created (server dry run)") for line in said.splitlines()), said
