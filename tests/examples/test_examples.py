"""The examples run against `tidegate up` with simulated engines, and do their task where the model answers sensibly."""

import csv
import json
import pathlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import scripted_engine

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TIME_S = 120
CORRECT = "SELECT city, SUM(euros) FROM customer JOIN orders ON customer.id = customer_id GROUP BY city"


def run(name: str, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *words, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_S)


def outcome(output: str) -> tuple[str, str]:
    """The id and the outcome of the workflow that an example prints."""
    (found,) = re.findall(r"^Workflow (\S+): (\w+), -?\d+ ms left$", output, re.MULTILINE)
    return found


def workflow(url: str, name: str) -> Any:
    with urllib.request.urlopen(f"{url}/v1/workflows/{name}", timeout=10) as response:
        return json.load(response)


def scripted(body: dict[str, Any]) -> dict[str, Any]:
    """A model that writes wrong SQL first, uses a tool once, rates messages and knows capitals."""
    last = body["messages"][-1]
    said = str(last["content"])
    if last["role"] == "tool":
        return {"content": f"The result is {said}."}
    if body.get("tools"):
        call = {"name": "calculate", "arguments": json.dumps({"expression": "240*0.175"})}
        return {"tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    if "This query failed" in said:
        return {"content": f"```sql\n{CORRECT}\n```"}
    if "SQLite query" in said:
        return {"content": "SELECT town FROM customer" if body["temperature"] == 0 else "DELETE FROM orders"}
    if "Rate the urgency" in said:
        return {"content": "0" if "down" in said else "3"}
    return {"content": "Lima" if "Peru" in said else "It is so."}


@pytest.fixture(scope="module")
def scripted_url(up_system: Callable[..., AbstractContextManager[Any]]) -> Iterator[str]:
    with scripted_engine.serving(scripted) as engine, up_system(f"--engines={engine}") as system:
        yield system.url


def test_text_to_sql_gives_up_honestly_when_no_draft_is_sql(running_up: Any) -> None:
    done = run("text_to_sql.py", running_up.url, "--corrections", "2")
    assert (done.returncode, done.stderr) == (1, "")
    assert "SQL after 2 corrections" in done.stdout
    assert "It fails: " in done.stdout
    name, ended = outcome(done.stdout)
    assert ended == "met"
    stages = {stage["name"]: stage["calls_done"] for stage in workflow(running_up.url, name)["stages"]}
    assert stages == {"draft": 2, "correct": 2, "answer": 0}


def test_text_to_sql_corrects_its_query_by_the_error_of_sqlite(scripted_url: str) -> None:
    done = run("text_to_sql.py", scripted_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SQL after 1 corrections: SELECT city, SUM(euros)" in done.stdout
    assert "Rows: [('Lima', 20.0), ('Oslo', 49.5)]" in done.stdout
    assert outcome(done.stdout)[1] == "met"


def test_the_tool_agent_calls_a_tool_of_simulated_engines_and_survives_its_arguments(running_up: Any) -> None:
    done = run("tool_agent.py", running_up.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'calculate({"expression":"simulated"}) -> error: ' in done.stdout
    assert outcome(done.stdout)[1] == "met"


def test_the_tool_agent_answers_with_the_result_of_its_tool(scripted_url: str) -> None:
    done = run("tool_agent.py", scripted_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'calculate({"expression": "240*0.175"}) -> 42.0' in done.stdout
    assert "Answer: The result is 42.0." in done.stdout


def test_a_spreadsheet_gets_a_column_and_a_second_run_asks_no_row_again(
    scripted_url: str, tmp_path: pathlib.Path
) -> None:
    source, target = tmp_path / "countries.csv", tmp_path / "answered.csv"
    source.write_text("country,continent\nPeru,America\nChad,Africa\n")
    words = [str(source), str(target), "--question", "Name the capital of {{country}}.", "--column", "capital"]
    first = run("spreadsheet.py", scripted_url, *words)
    assert first.returncode == 0, first.stderr
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"country": "Peru", "continent": "America", "capital": "Lima"}
    assert rows[1]["capital"] == "It is so."
    target.unlink()
    before = calls(scripted_url)
    again = run("spreadsheet.py", scripted_url, *words)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert calls(scripted_url) == before
    assert target.read_text().splitlines()[0] == "country,continent,capital"


def calls(url: str) -> str:
    """The calls that the gateway has admitted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return "\n".join(re.findall(r"^tidegate_requests_total.*$", response.read().decode(), re.MULTILINE))


def test_triage_rates_messages_by_the_model_or_by_their_words(running_up: Any, scripted_url: str) -> None:
    simulated, rated = run("triage.py", running_up.url, "--tenant", "product"), run("triage.py", scripted_url)
    for done, by in ((simulated, "words"), (rated, "model")):
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert len([line for line in lines if f"(by {by}): " in line]) == 6
        assert lines[-1].startswith("6 replies, ")
    assert "urgency 0 (by model)" in rated.stdout


@pytest.mark.parametrize("name", ["spreadsheet.py", "text_to_sql.py", "tool_agent.py", "triage.py"])
def test_an_address_without_a_gateway_is_named(name: str, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "countries.csv"
    source.write_text("country\nPeru\n")
    words = [str(source), str(tmp_path / "out.csv"), "--question={{country}}?"] if name == "spreadsheet.py" else []
    done = run(name, "http://127.0.0.1:1", *words)
    assert done.returncode == 1
    assert "no gateway answers at http://127.0.0.1:1/v1/models" in done.stderr
    assert "--url" in done.stderr
