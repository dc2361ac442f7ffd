"""One small case of each suite in wall-clock time on a real vLLM engine core.

    .venv/bin/python benchmarks/real_engine [--parts suites,saturated,profile] [--machine cpu|gpu] [--json FILE]
                                            [--suites relquery,semantic,augmented,text2sql] [--repeats N] [--load X]
                                            [--units X] [--clock wall|cpu] [--policies NAMES]
                                            [--vllm JSON]

vLLM's executor, worker, model runner and KV cache run in this process: with `--machine cpu` a Llama with four layers on one
thread, with `--machine gpu` one of the shape of Llama-3.1-8B on one GPU (`engine_setup.py`). Weights are random.

The part `suites` has one small case of each suite. The traces come from the suites' generators, with fewer units and
shorter texts (on a GPU: the suites' own texts). The gateway core predicts, budgets and labels each call, as in production.
Load is open-loop: a late answer never delays the next arrival. The arrival rate is `--load` times the capacity, which is
the number of units of a trace divided by the seconds of the clock in which a first run serves all of them at once. The rows
of a case take turns, seed by seed, in one engine, and each turn gets a new scheduler of the row's class. The sampled tokens
are replaced by the trace's, so that an answer ends at the trace's length, which no scheduler sees.

With `--clock cpu` time passes only while this process computes, and skips its idle time. Other processes of the machine
then disturb the figures less. The table has the geometric mean of `vLLM's figure / ours`, seed by seed, with a 95%
interval. A value above 1 is a gain.

The part `saturated` has the time of a step while 2,000 more calls wait, by policy. The part `profile` fits the cost model
to the times of single steps, two of three, and prints the error on the others. Both run the model's own tokens.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping

import engine_setup
import saturated_engine
import small_cases
import step_profile
import stepped_engine  # before vLLM: it sets the environment
from vllm import LLM

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId
from tidegate_sim import bench_report, cell, engine_rows, paired_difference

FIRST_SEED, LEARNED_SEED = 9001, 7
PARTS = ("suites", "saturated", "profile")


def run(
    llm: LLM, case: small_cases.Case, row: cell.Row, cost: CostModel, seed: int, rate: float, clock_name: str
) -> tuple[cell.Outcome, stepped_engine.RealEngine]:
    """One turn: a trace on a new scheduler."""
    clock, engines = stepped_engine.RealTime(clock_name), []

    def create(_model, _clock, _cost, *, listener, **_row) -> stepped_engine.RealEngine:
        engines.append(stepped_engine.RealEngine(llm, row, cost, clock, listener))
        return engines[0]

    learned = case.trace(LEARNED_SEED, 1.0, 4 * case.units)
    turn = cell.Cell({EngineId("real"): cost}, row, learned, seed=seed, loop=clock, create=create)
    return turn.run(case.trace(seed, rate, case.units)), engines[0]


def compared(
    llm: LLM, first: CostModel, case: small_cases.Case, repeats: int, load: float, clock: str
) -> dict[str, object]:
    """The figures of all rows of a case."""
    cost = first
    for _ in range(2):  # the first run warms up
        began_s = stepped_engine.CLOCKS[clock]()
        _, engine = run(llm, case, engine_rows.row("fcfs"), cost, LEARNED_SEED + 1, 1e3, clock)
        capacity = case.units / (stepped_engine.CLOCKS[clock]() - began_s)
        cost = engine.scheduler._core.cost
    figures = {name: [] for name in case.rows}
    means = {name: [] for name in case.rows}
    lasted = []
    names = list(case.rows)
    ours = names[-1]
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            outcome, _ = run(llm, case, case.rows[name], cost, FIRST_SEED + repeat, load * capacity, clock)
            figures[name].append(case.headline(outcome))
            means[name].append(statistics.fmean(item.e2e_s for item in outcome.calls))
            lasted.append(max(outcome.finished_s))
            print(f"{ours}  {repeat + 1}/{repeats}  {name}  {lasted[-1]:.1f} s", file=sys.stderr, flush=True)
    return {
        "figure": case.figure,
        "units": f"{case.units} {case.unit}, texts 1/{case.shrink}",
        "capacity": capacity,
        "rate": load * capacity,
        "cost": {key: getattr(cost, key) for key in ("step_s", "prefill_s", "attention_s", "decode_s", "context_s")},
        "turn_s": statistics.fmean(lasted),
        "rows": {
            name: {
                "headline": paired_difference.interval(figures[name]),
                "call_s": paired_difference.interval(means[name]),
                "values": figures[name],
                "gain_of_ours": paired_difference.times_better(figures[ours], figures[name]) if name != ours else None,
                "gain_of_ours_all_calls": paired_difference.times_better(means[ours], means[name])
                if name != ours
                else None,
            }
            for name in names
        },
    }


def table(results: Mapping[str, Mapping[str, object]], options: argparse.Namespace) -> str:
    lines = []
    for suite, found in results.items():
        for name, row in found["rows"].items():
            gains = [
                "-" if row[key] is None else f"{bench_report.spread(row[key], 2)} {verdict(row[key])}"
                for key in ("gain_of_ours", "gain_of_ours_all_calls")
            ]
            head = f"{found['figure']}: {row['headline']['mean']:.3f}"
            lines.append((suite, name, head, f"{row['call_s']['mean']:.2f}", *gains))
    header = ("suite", "row", "headline (mean)", "mean call, s", "headline: vLLM / ours", "mean call: vLLM / ours")
    notes = [
        f"{suite}: {found['units']}, {found['rate']:.2f}/s, a turn lasts {found['turn_s']:.1f} s."
        for suite, found in results.items()
    ]
    notes.append(
        f"{options.clock} seconds, {options.repeats} traces a row, {options.load:g} times the measured capacity, rows in "
        "turn on one engine."
    )
    return "\n".join([bench_report.table(header, lines), "", *notes])


def verdict(ratio: Mapping[str, float]) -> str:
    if ratio["low"] is None:
        return "not known"
    return "gain" if ratio["low"] > 1 else "loss" if ratio["high"] < 1 else "no difference shown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Small cases of the suites in wall-clock time on a real vLLM engine.")
    parser.add_argument(
        "--suites", default=",".join(small_cases.CASES), help="names separated by commas; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=8, help="traces of each row; default: %(default)s")
    parser.add_argument(
        "--load", type=float, default=1.5, help="arrival rate / measured capacity; default: %(default)s"
    )
    parser.add_argument("--units", type=float, default=1.0, help="factor on the number of units of a trace; default: 1")
    parser.add_argument("--clock", choices=stepped_engine.CLOCKS, default="wall", help="default: %(default)s")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--machine", choices=engine_setup.SETUPS, default="cpu", help="default: %(default)s")
    parser.add_argument("--vllm", type=json.loads, default={}, help="further arguments of vllm.LLM, as a JSON object")
    parser.add_argument("--parts", default="suites", help=f"of {', '.join(PARTS)}; default: %(default)s")
    parser.add_argument("--policies", default="fcfs,urgency", help="rows of `saturated`; default: %(default)s")
    options = parser.parse_args()
    chosen, parts = options.suites.split(","), options.parts.split(",")
    rows = options.policies.split(",")
    named = (("suite", chosen, small_cases.CASES), ("part", parts, PARTS), ("policy", rows, policies.POLICIES))
    for kind, names, known in named:
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown {kind} {unknown[0]!r}; known are {', '.join(known)}")
    setup = engine_setup.SETUPS[options.machine]
    if "saturated" in parts:
        if len(parts) > 1:
            parser.error("the part saturated has an engine of its own: run it alone")
        setup = engine_setup.saturated(setup)
    llm = stepped_engine.model(setup, options.vllm)
    report: dict[str, object] = {key: getattr(options, key) for key in ("machine", "clock", "repeats", "load")}
    begun_at_s = time.monotonic()
    if "profile" in parts:
        timings, report["profile"] = step_profile.measured(llm, setup)
        report["timings"] = [[timing.seconds, *timing.terms()] for timing in timings]
        say(step_profile.table(report["profile"]), report, options.json)
    if "saturated" in parts:
        report["saturated"] = saturated_engine.measured(llm, setup, rows, options.repeats)
        say(saturated_engine.table(report["saturated"]), report, options.json)
    if "suites" in parts:
        results = report["suites"] = {}
        for name in chosen:
            case = small_cases.CASES[name].on(setup, options.units)
            results[name] = compared(llm, setup.first_cost, case, options.repeats, options.load, options.clock)
            say(table(results, options), report, options.json)
    print(f"The turns took {time.monotonic() - begun_at_s:.0f} s. Load averages of the machine: {os.getloadavg()}.")
    return 0


def say(text: str, report: Mapping[str, object], path: pathlib.Path | None) -> None:
    """Prints a table as soon as its part is done, and writes all figures so far."""
    print(text, flush=True)
    if path is not None:
        path.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    sys.exit(main())
