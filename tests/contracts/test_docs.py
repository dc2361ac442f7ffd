"""What the documents say is what the code does."""

import pathlib
import re

from tidegate_gateway.openai import error_table
from tidegate_policy import policies
from tidegate_policy.engine import regulators

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_every_refusal_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z_-]+)` \| (\d{3}) \| ([A-Z_]+) \|$", (DOCS / "http.md").read_text(), re.MULTILINE)
    assert rows == [(str(code), str(row.status), row.grpc) for code, row in error_table.TABLE.items()]


def test_every_policy_has_its_page() -> None:
    pages = {page.stem for page in (DOCS / "policies").glob("*.md")} - {"README"}
    assert pages == set(policies.POLICIES)


def test_every_regulator_has_its_page() -> None:
    pages = {page.stem for page in (DOCS / "regulators").glob("*.md")} - {"README"}
    assert pages == set(regulators.REGULATORS)


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(
        r"`((?:policy|gateway|engine-image|operator|sim|cli)/[a-z_/-]+(?:\.py|/))`",
        (DOCS / "architecture.md").read_text(),
    )
    assert named
    assert not [name for name in named if not (DOCS.parent / name).exists()]
