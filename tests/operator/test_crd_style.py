"""The style of the custom resource's schema, in the spec and the status, as reviewers of Kubernetes' APIs expect it."""

import re

import pytest
import yaml

from tidegate_policy.dispatch import routing

from .conftest import CRD

UNIT = re.compile(
    r"[a-z](Seconds?|Secs?|Ms|Millis|Minutes|Hours|Days|Bytes|[KMGT]i?B)$|^(seconds|minutes|hours|days|bytes)$"
)
OLD = {".spec.engine.offloadGiB"}
"""Deprecated: its rule refuses it, and stored pools keep it."""
OF_KUBERNETES = {"tolerationSeconds"}
DURATION = re.compile(r"\bduration\b|\d(ms|[smh])\b", re.IGNORECASE)
"""In the description of a string that is a duration."""


def schema():
    crd = yaml.safe_load(CRD.read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(node, path=""):
    """Each field, entry of an array and value of a map below the node, with its path."""
    inner = {f".{name}": child for name, child in node.get("properties", {}).items()}
    entries = [("[]", node[name]) for name in ("items", "additionalProperties") if name in node]
    for name, child in [*inner.items(), *entries]:
        yield path + name, child
        yield from fields(child, path + name)


def rules(node):
    return [item["rule"] for item in node.get("x-kubernetes-validations", ())]


def offences(root):
    for path, node in fields(root):
        name = path.rpartition(".")[2].removesuffix("[]")
        if node.get("type") == "number":
            yield f"{path} is a float: write an integer, a quantity or a decimal string"
        if node.get("type") == "array" and "x-kubernetes-list-type" not in node:
            yield f"{path} has no list type: server-side apply needs one"
        if node.get("type") == "array" and "maxItems" not in node:
            yield f"{path} has no bound: a list of thousands takes the API server seconds"
        if node.get("x-kubernetes-list-type") == "map" and not set(node["x-kubernetes-list-map-keys"]) <= set(
            node["items"].get("required", ())
        ):
            yield f"{path} has keys that are not required"
        if UNIT.search(name) and path not in OLD and name not in OF_KUBERNETES:
            yield f"{path} has a unit in its name: use a duration or a quantity"
        is_duration = (
            node.get("type") == "string" and "format" not in node and DURATION.search(node.get("description", ""))
        )
        if is_duration and path.startswith(".spec") and not any("duration(self)" in rule for rule in rules(node)):
            yield f"{path} has no rule for its duration"


def test_the_schema_has_one_style():
    assert list(offences(schema())) == []


def test_most_fields_are_seen():
    seen = {path for path, _ in fields(schema())}
    assert {
        ".spec.nodePools[].tolerations[].key",
        ".status.nodePools[].weights.state",
        ".status.conditions[].type",
    } <= seen


STRING = {"type": "string", "description": "A name."}
BAD = {
    "is a float": ("share", {"type": "number", "description": "A share."}),
    "has no list type": ("names", {"type": "array", "maxItems": 9, "items": STRING}),
    "has no bound": ("notes", {"type": "array", "x-kubernetes-list-type": "atomic", "items": STRING}),
    "has a unit in its name": ("cacheMiB", {"type": "integer", "description": "A size."}),
    "has no rule for its duration": ("grace", {"type": "string", "description": "A duration such as 10m."}),
    "has keys that are not required": (
        "things",
        {
            "type": "array", "maxItems": 9, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
            "items": {"type": "object", "properties": {"name": STRING}},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("part", ["spec", "status"])
def test_a_new_field_of_another_style_is_found(what, part):
    name, field = BAD[what]
    root = schema()
    group = root["properties"][part]["properties"]
    group["group"] = {
        "type": "array", "maxItems": 9, "x-kubernetes-list-type": "atomic", "items": {"properties": {name: field}},
    }  # fmt: skip
    found = list(offences(root))
    expected = [] if what == "has no rule for its duration" and part == "status" else [f".{part}.group[].{name} {what}"]
    assert [line.partition(":")[0] for line in found] == expected


@pytest.mark.parametrize("name", ["ttlSeconds", "waitSecs", "timeoutMs", "sizeGB", "bodyBytes", "idleMinutes"])
def test_units_are_recognised(name):
    assert len(list(offences({"properties": {name: {"type": "integer"}}}))) == 1


@pytest.mark.parametrize(
    "name", ["items", "maxReplicas", "ttft", "tokensPerMinute", "changesPerHour", "params", "seeds"]
)
def test_other_names_are_not_taken_for_units(name):
    assert list(offences({"properties": {name: {"type": "integer"}}})) == []


def test_a_pool_without_a_rule_gets_that_of_a_gateway_without_one():
    defaults = {child["default"] for path, child in fields(schema()) if path.endswith(".dispatch.rule")}
    assert defaults == {routing.DEFAULT_RULE}
