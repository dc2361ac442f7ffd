"""Published data: not part of this repository, used where it is."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TIDEGATE_DATA", Path(__file__).parents[3] / "shared" / "data"))
"""Folder with azure_llm_2023/ (Azure's public traces) and text2sql_workflows/ (published with HexGen-Text2SQL)."""


@pytest.fixture
def published():
    """A file of the published data; the test is skipped where it is not."""

    def find(name: str) -> Path:
        if not (DATA / name).exists():
            pytest.skip(f"{name} is not in {DATA} (TIDEGATE_DATA)")
        return DATA / name

    return find
