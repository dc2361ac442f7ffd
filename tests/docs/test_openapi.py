"""docs/openapi.yaml has the paths, headers, errors and objects of the code."""

import json
import pathlib
import re
import secrets
import urllib.error
import urllib.request
from typing import Any

import jsonschema
import pytest
import yaml

from tidegate_gateway.openai import error_table, http_headers

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text())
METHODS = {"get", "post", "put", "delete"}


def test_the_paths_and_their_methods_are_those_of_the_client_port(running_up: Any) -> None:
    said = send(f"{running_up.url}/no-such-path")["error"]["message"].partition("there is /")[2]
    served = {f"/{path}".replace("//", "/") for path in said.split(", ")}
    assert {path for path in served if path.startswith(("/v1", "/health", "/ready", "/metrics"))} == set(
        DOCUMENT["paths"]
    )
    for path, item in DOCUMENT["paths"].items():
        message = send(running_up.url + re.sub(r"{\w+}", "x", path), "PATCH")["error"]["message"]
        assert f" takes {', '.join(sorted(method.upper() for method in METHODS & set(item)))}, not PATCH" in message


def test_the_headers_of_calls_are_those_that_the_gateway_reads() -> None:
    documented = {item["name"] for item in DOCUMENT["components"]["parameters"].values()}
    assert documented == {names[0] for names in http_headers.ALIASES.values()}
    used = {item["$ref"].rpartition("/")[2] for item in DOCUMENT["paths"]["/v1/completions"]["post"]["parameters"]}
    assert used == set(DOCUMENT["components"]["parameters"])


def test_the_page_about_http_names_every_header() -> None:
    page = (ROOT / "docs" / "http.md").read_text().lower()
    answers = set(re.findall(r"^ +(x-[a-z-]+):", (ROOT / "docs" / "openapi.yaml").read_text(), re.MULTILINE))
    assert len(answers) >= 6
    assert not [
        name for name in {names[0] for names in http_headers.ALIASES.values()} | answers if f"`{name}" not in page
    ]


def test_the_codes_of_errors_are_those_of_the_table() -> None:
    codes = DOCUMENT["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert codes == [str(code) for code in error_table.TABLE]


def test_every_reference_has_its_target() -> None:
    for reference in re.findall(r'"#/([^"]+)"', json.dumps(DOCUMENT)):
        node: Any = DOCUMENT
        for step in reference.split("/"):
            node = node[step]


def send(url: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def check(value: Any, name: str) -> None:
    """The value fits the schema and has no field beyond it."""
    schema = {**DOCUMENT["components"]["schemas"][name], "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)
    assert set(value) <= set(schema["properties"])


@pytest.mark.parametrize("template", ["text2sql", None])
def test_answers_have_the_documented_form(running_up: Any, template: str | None) -> None:
    url = f"{running_up.url}/v1"
    declared = {"template": template} if template else {"deadline_ms": 60000, "stages": [{"name": "a", "parallel": 2}]}
    check(declared, "WorkflowDeclaration")
    workflow = send(f"{url}/workflows", "POST", declared)
    for seen in (workflow, send(f"{url}/workflows/{workflow['id']}/complete", "POST")):
        check(seen, "Workflow")
        for stage in seen["stages"]:
            check(stage, "Stage")
    check(send(f"{url}/workflows/{workflow['id']}", "DELETE"), "Error")
    asked = {"id": secrets.token_hex(8), "model": "sim", "template": "{{a}}", "rows": [{"a": 1}], "stream": False}
    check(asked, "RelQueryRequest")
    check(send(f"{url}/relqueries", "POST", asked), "RelQuery")
    page = {"has_more": True, "relquery": {"status": "in_progress"}, "data": []}
    while not page["data"]:
        page = send(f"{url}/relqueries/{asked['id']}/rows?stream=false")
        check(page, "RowPage")
    check(page["data"][0], "Row")
