"""The suite about prefixes: its traces, its bisection, and a small part of a run."""

import gzip
import json
import math
import random
from pathlib import Path

import pytest

from tidegate_policy import gateway_core
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import (
    bench,
    bench_report,
    cell,
    mooncake_trace,
    pools,
    suite,
    suites,
    sustained_rate,
    text2sql_workflows,
    trace_format,
)

DATABASES = (text2sql_workflows.FINANCIAL, text2sql_workflows.FORMULA1)


def text2sql(share: float, databases: int = 95, workflows: int = 12) -> list[trace_format.TraceCall]:
    shared = text2sql_workflows.SharedPrefix(share=share, databases=databases)
    return text2sql_workflows.trace(random.Random(1), DATABASES, workflows=workflows, rate=0.1, name="t", shared=shared)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Forty conversations of two turns, in the published form."""
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for number in range(80):
            turn, talk = divmod(number, 40)
            hashes = [0, *range(talk * 100 + 1, talk * 100 + 4 + 2 * turn)]
            row = {
                "timestamp": number * 1000,
                "input_length": 512 * len(hashes) - 100,
                "output_length": 20,
                "hash_ids": hashes,
            }
            lines.write(json.dumps(row) + "\n")
    return path


def test_shared_prefixes_change_nothing_else_in_a_trace() -> None:
    plain, shared = text2sql(0.0), text2sql(0.8)
    assert [(call.id, call.arrival_s, call.prompt_tokens, call.output_tokens) for call in plain] == [
        (call.id, call.arrival_s, call.prompt_tokens, call.output_tokens) for call in shared
    ]
    assert not any(call.prefix for call in plain)


def test_all_calls_of_a_workflow_share_the_beginning_of_one_database() -> None:
    asked: dict[str | None, set[int]] = {}
    for call in text2sql(0.5, databases=5, workflows=40):
        ((database, tokens),) = call.prefix
        assert tokens == round(0.5 * call.prompt_tokens)
        asked.setdefault(call.workflow, set()).add(database)
    assert all(len(databases) == 1 for databases in asked.values())
    assert {database for databases in asked.values() for database in databases} == set(range(5))


def test_the_mooncake_trace_gives_blocks_of_512_tokens(mooncake: Path) -> None:
    calls = mooncake_trace.read(mooncake)
    assert len(calls) == 80
    assert calls[0].prefix == ((0, 512), (1, 512), (2, 512), (3, 412))
    assert calls[40].prefix[:3] == calls[0].prefix[:3]
    assert calls[1].arrival_s == 1.0


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 0}', '{"timestamp": "x", "input_length": 1}'])
def test_a_line_that_is_not_of_the_mooncake_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(trace_format.BadTrace, match=r"bad\.jsonl:1"):
        mooncake_trace.read(path)


@pytest.mark.parametrize("low", [0.0, 0.1])
def test_a_bisection_finds_the_highest_rate_that_meets_its_condition(low: float) -> None:
    limits = {"a": 0.3, "b": 1.1, "never": 0.0}
    found = sustained_rate.search(
        dict.fromkeys(limits, (low, 2.0)), 12, lambda rates: {name: rates[name] <= limits[name] for name in rates}
    )
    assert found["a"] == pytest.approx(0.3, rel=0.01)
    assert found["b"] == pytest.approx(1.1, rel=0.01)
    assert math.isclose(found["never"], low)


def test_workflows_that_share_prefixes_are_faster_when_dispatch_knows_it() -> None:
    calls = text2sql(0.8, databases=8, workflows=24)

    def latencies_s(entries: int) -> float:
        settings = gateway_core.CoreSettings(dispatch=DispatchSettings(prefix_entries=entries))
        row = cell.Row(gateway=settings, model="fast")
        outcome = cell.Cell(pools.pool("hetero-1"), row, (), seed=1).run(calls)
        return sum(outcome.latencies_s)

    assert latencies_s(10_000) < latencies_s(0)


def test_without_shared_prefixes_the_index_changes_nothing() -> None:
    calls = text2sql(0.0, workflows=6)
    outcomes = []
    for entries in (0, 10_000):
        settings = gateway_core.CoreSettings(dispatch=DispatchSettings(prefix_entries=entries))
        row = cell.Row(gateway=settings, model="fast")
        outcomes.append(cell.Cell(pools.pool("hetero-2"), row, (), seed=1).run(calls))
    assert outcomes[0] == outcomes[1]


def test_a_small_part_of_the_suite_runs_and_prints_each_row() -> None:
    chosen = suites.load("prefix")
    options = suite.Options(
        traces=("text2sql-80-hetero-1",), parts=("ablations",), workflows=3, seeds=1, jobs=1, checked_share=0.0
    )
    report = chosen.run(options, lambda line: None)
    table = chosen.table(report)
    (found,) = report["traces"].values()
    assert set(found) == {"3x", "5x"}
    for row in report["rows"]:
        assert row in table
        assert found["5x"][row]["rate"]["mean"] > 0
    json.loads(bench_report.text(report))


def test_each_rule_serves_a_slice_of_the_mooncake_trace(mooncake: Path) -> None:
    chosen = suites.load("prefix")
    for row in chosen.rows:
        key = suite.CellKey(
            suite="prefix",
            pool="hetero-2",
            row=row,
            trace="mooncake/402",
            rate=0.5,
            workflows=40,
            trace_file=mooncake,
        )
        figures = suite.run_cell(key)
        assert sum(figures["calls_on"].values()) == 40
        assert figures == suite.run_cell(key)


def test_the_mooncake_workload_needs_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prefix", "--traces", "mooncake-hetero-1", "--parts", "rules", "--seeds", "1", "--jobs", "1"]
    assert bench.main([*words, "--checked-share", "0"]) == 1
    assert "--trace-file" in capsys.readouterr().err
