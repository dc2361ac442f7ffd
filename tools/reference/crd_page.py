"""docs/servingpool.md from the custom resource definition."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import yaml

CRD = pathlib.Path(__file__).resolve().parents[2] / "crds" / "servingpools.tidegate.dev.yaml"
OPENING = """# ServingPool

`tools/reference/generate` makes this page from `crds/servingpools.tidegate.dev.yaml`. `kubectl explain spool.spec` shows
the same descriptions. [operations.md](operations.md) shows how to use a pool.
"""
BOUNDS = {
    "enum": "one of {}", "minimum": "at least {}", "maximum": "at most {}", "minItems": "at least {} items",
    "maxItems": "at most {} items", "minLength": "at least {} characters", "maxLength": "at most {} characters",
    "pattern": "matches `{}`", "minProperties": "at least {} fields", "maxProperties": "at most {} fields",
}  # fmt: skip


def page() -> str:
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [OPENING, f"{schema['description']}\n"]
    for name in ("spec", "status"):
        part = schema["properties"][name]
        lines += [
            f"## `{name}`\n",
            f"{part['description']}\n",
            "| field | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [*_rows(part, ""), ""]
    lines += [
        "## Rules\n",
        "The API server rejects a pool that violates one of these rules.\n",
        "| field | rule |",
        "|---|---|",
    ]
    lines += [*_rules(schema, ""), "", "## Columns of `kubectl get spool`\n", "| column | meaning |", "|---|---|"]
    for column in version["additionalPrinterColumns"]:
        lines.append(f"| {column['name']} | {column.get('description', 'The time since its creation.')} |")
    return "\n".join(lines).rstrip() + "\n"


def _children(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    required = node.get("required", ())
    for name, child in node.get("properties", {}).items():
        yield name, child, name in required


def _rows(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, child, required in _children(node):
        items = child.get("items", {})
        here = f"{path}{name}{'[]' if items.get('properties') else ''}"
        kind = _type(child)
        default = f"`{json.dumps(child['default'])}`" if "default" in child else "required" if required else ""
        bounds = "; ".join(text.format(_shown(child[key])) for key, text in BOUNDS.items() if key in child)
        meaning = " ".join(filter(None, [child.get("description", ""), bounds and f"({bounds})"]))
        yield f"| `{here}` | {kind} | {default} | {_cell(meaning)} |"
        yield from _rows(items if items.get("properties") else child, f"{here}.")


def _type(child: dict[str, Any]) -> str:
    if child.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if child.get("type") == "array":
        return f"list of {_type(child['items'])}"
    return str(child.get("type", "any"))


def _rules(node: dict[str, Any], path: str) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        yield f"| `{path or '.'}` | {_cell(rule['message'])} |"
    for name, child, _ in _children(node):
        yield from _rules(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from _rules(node["items"], f"{path}[]")


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
