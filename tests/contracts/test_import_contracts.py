"""The import contracts that list modules list all of them, so that a new module is not forgotten."""

import pathlib
import tomllib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATOR = {"__main__", "cluster", "handlers", "watch_session", "watches"}
"""The modules of the operator that may import kopf and Kubernetes clients."""
GATEWAY: set[str] = set()
"""The modules of the gateway without a layer."""


def contract(beginning: str) -> dict[str, Any]:
    """The one contract whose name begins so."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (item for item in contracts if item["name"].startswith(beginning))
    return dict(found)


def modules(package: pathlib.Path) -> list[str]:
    """The modules and packages directly in a package."""
    files = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    return sorted([*files, *(path.parent.name for path in package.glob("*/__init__.py"))])


def operator_modules() -> list[str]:
    listed = contract("Inside the operator only the entry point")["source_modules"]
    return [name.removeprefix("tidegate_operator.") for name in listed]


def gateway_modules() -> list[str]:
    layers = contract("Inside the gateway: edges > the whole")["layers"]
    return [name for layer in layers for name in layer.split(" | ")]


@pytest.mark.parametrize(
    ("package", "listed", "exceptions"),
    [
        ("operator/tidegate_operator", operator_modules(), OPERATOR),
        ("gateway/tidegate_gateway", gateway_modules(), GATEWAY),
    ],
)
def test_a_contract_lists_every_module_of_its_package_or_leaves_it_out_for_a_stated_reason(
    package: str, listed: list[str], exceptions: set[str]
) -> None:
    assert sorted([*listed, *exceptions]) == modules(ROOT / package)
