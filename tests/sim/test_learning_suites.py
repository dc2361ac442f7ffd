"""Small parts of the suites about learned costs, workflow admission and floods."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate_policy.model import EngineId
from tidegate_sim import beliefs, bench, cell, pools, suite, suites, text2sql_workflows
from tidegate_sim.suites import admission, costs, flood

POOL = pools.pool("hetero-1")
DATABASES = (text2sql_workflows.FINANCIAL,)


def test_beliefs_change_what_the_gateway_knows_and_not_the_engines() -> None:
    (first, *_) = POOL.values()
    assert beliefs.of("exact", POOL, 1) == POOL
    assert set(beliefs.of("equal", POOL, 1).values()) == {first}
    assert set(beliefs.of("none", POOL, 1).values()) == {None}
    for name, wrong in beliefs.of("wrong-40", POOL, 1).items():
        assert wrong is not None
        assert {round(wrong.step_s / POOL[name].step_s, 6), 0.6, 1.4} == {0.6, 1.4}


def test_a_cell_learns_what_its_engines_cost() -> None:
    calls = text2sql_workflows.trace(random.Random(3), DATABASES, workflows=14, rate=0.1, name="t")
    run = cell.Cell(POOL, replace(costs.ROWS["40% wrong, learning"], model="fast"), (), seed=3)
    wrong = beliefs.of("wrong-40", POOL, 3)
    run.run(calls)
    for engine in run.core.engines:
        true, start = POOL[engine.facts.id], wrong[engine.facts.id]
        assert start is not None

        def error(found: object, true: object = true) -> float:
            return max(abs(math.log(getattr(found, field) / getattr(true, field))) for field in ("step_s", "prefill_s"))

        assert error(engine.cost) < 0.5 * error(start)


def test_a_bound_on_active_workflows_is_found_and_every_workflow_ends() -> None:
    calls = text2sql_workflows.trace(random.Random(3), DATABASES, workflows=40, rate=1.0, name="t")
    run = cell.Cell(POOL, replace(admission.ROWS[admission.BOUNDED], model="fast"), (), seed=3)
    outcome = run.run(calls)
    gate = run.core.dispatcher.gate
    assert len(outcome.latencies_s) == 40
    assert gate.limit is not None
    assert 10 < gate.limit < 40
    assert (gate.held, gate.active, len(gate)) == (0, 0, 0)


@pytest.mark.timeout(300)
def test_a_flood_of_one_tenant_hardly_delays_the_others() -> None:
    """A tenant that sends fifty times its share for eight seconds, on one engine."""
    pool = {EngineId("only"): next(iter(POOL.values()))}

    def p95_s(name: str, row: str) -> float:
        calls = [
            replace(call, arrival_s=call.arrival_s - 40.0)
            for call in flood.trace(name, 2.0)
            if call.arrival_s > 40.0 and (not call.id.startswith("more") or call.arrival_s < flood.FLOOD_FROM_S + 8.0)
        ]
        outcome = cell.Cell(pool, replace(flood.ROWS[row], model="fast"), (), seed=1).run(calls)
        latencies_s = sorted(call.e2e_s or math.inf for call in outcome.calls if call.tenant in flood.TENANTS)
        return latencies_s[int(0.95 * len(latencies_s))]

    quiet_s, flooded_s = p95_s("801", "shares by tenant"), p95_s("801-flood", "shares by tenant")
    assert flooded_s < 1.5 * quiet_s
    assert p95_s("801-flood", "no shares") > 2 * flooded_s


@pytest.mark.parametrize("name", suites.NAMES)
def test_every_suite_has_the_number_of_seeds_that_is_asked_for(name: str) -> None:
    chosen = suites.load(name)
    own = {"prefix": 5, "autoscaling": 5}.get(name, 10)
    for seeds, count in ((None, own), (2, 2), (12, 12)):
        assert len(chosen.chosen_seeds(suite.Options(seeds=seeds))) == count


@pytest.mark.parametrize("name", ["flood", "costs", "admission"])
def test_a_suite_whose_traces_are_seeds_runs_one_trace_for_each(name: str) -> None:
    chosen = suites.load(name)
    for seeds in (1, 3, 12):
        options = suite.Options(seeds=seeds)
        traces = {key.trace for key in chosen.keys(options, chosen.loads(options))}
        assert {int(trace.partition("-")[0]) for trace in traces} == set(chosen.chosen_seeds(options))
    named = suite.Options(seeds=3, traces=[chosen.traces[0]])
    assert {key.trace for key in chosen.keys(named, chosen.loads(named))} == {chosen.traces[0]}


def test_the_command_line_says_how_many_seeds_a_flood_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["flood", "--seeds", "2", "--rates", "0.2", "--jobs", "1", "--checked-share", "0", "--json"]
    assert bench.main([*words, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["traces"] == ["801", "801-flood", "802", "802-flood"]
    assert report["scheduler"]["cells"] == 8
