"""The suite about steering: a shared service whose load and mix change (H-MAS, section 4).

Fixed policies, vLLM's own two policies, and every selector of the steering loop run on the same traces. The *oracle* is no
row that runs. For each window of 30 s it takes the fixed policy of Tidegate under which the most calls that arrive in this
window meet their targets, and adds up these counts. Each policy enters a window with the backlog that it left itself, so
the oracle is a reference that looks back, and no policy is promised to reach it.

`maas_ablations` adds rows that leave one part of the product out, on one trace. The part `policies` of a run has other
rows: every policy, fixed (`maas_policies`). It runs only where the command line names it.
"""

from collections.abc import Mapping, Sequence

from tidegate_policy import gateway_core
from tidegate_policy.admit import entitlements
from tidegate_policy.steer import guards, proposal, selectors, steering_loop
from tidegate_sim import (
    asked_model,
    azure_suite,
    bench_report,
    cell,
    engine_rows,
    maas_ablations,
    maas_figures,
    maas_policies,
    maas_traces,
    paired_difference,
    suite,
)
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

POOL = "a100-40-llama2-70b-tp4"
RATE = 1.8
"""Calls a second: the base load of all traces, a little below what the engine serves of the mix `SHARED`."""
FIRST_SEED, SEEDS = 1401, 10
"""The seeds of the published table. No rule, threshold or weight was chosen by them."""
DEVELOPMENT_SEEDS = range(1, 21)
"""The seeds by which rules, thresholds and weights were chosen."""
FIXED = ("fcfs", "edf", "urgency", "sjf", "two-lane", "wfq")
"""The fixed policies of the table and of the oracle."""
ALLOW = ("two-lane", "edf", "sjf", "urgency", "fcfs")
"""The policies among which the selectors choose: those that a ServingPool allows by default."""
STOCK = {"vLLM, FCFS": "fcfs", "vLLM, priority": "priority"}
INTERVAL_S = 30.0
"""The time between two decisions, as a ServingPool has it by default."""
SELECTORS, POLICIES = "selectors", "policies"
"""The parts of a run. Without `--parts` the first one runs."""
SHOWN = {
    "goodput": ("goodput, 1/s", 3),
    "attainment": ("targets met", 3),
    "ttft_compliance": ("TTFT met", 3),
    "esg": ("ESG", 3),
    "mismatch": ("mismatch", 2),
    "mismatch_95": ("at 95%", 2),
    "drop": ("drop I to III", 3),
    "recovery": ("III over II", 3),
    "switches_an_hour": ("switches/h", 1),
    "regret": ("regret", 3),
}
PAPER = (
    "The paper's figures are of other engines, lengths and loads: goodput 1.2 to 3.0 times vLLM; ESG 2.13 times vLLM at 50 "
    "calls/s; TTFT met 81.8 / 88.0 / 60.1% in burst / drift / shift (vLLM 19.2 / 29.0 / 11.3%); mismatch there 1.20 / 1.42 "
    "/ 1.80 (vLLM 1.56 / 1.84 / 2.20), at 95% 2.77 / 1.63 / 4.09 (vLLM 3.59 / 2.11 / 5.61); drop and recovery 29.4% and"
    " 0.89 in stress (vLLM 100% and 0.00), 7.1% and 0.93 in task-drift (vLLM 94.0% and 0.07)."
)


def steered(selector: proposal.Selector) -> steering_loop.Settings:
    """The loop of a ServingPool with its default settings."""
    return steering_loop.Settings(allow=ALLOW, interval_s=INTERVAL_S, guards=guards.GuardSettings(), selector=selector)


def _row(policy: str, **more: object) -> cell.Row:
    """The product's gateway and engine under one policy. A call's class is its task, by which the gateway predicts its
    length."""
    settings = gateway_core.CoreSettings(
        policy=policy, classes=tuple(entitlements.SloClass(name=name) for name in maas_traces.TASKS)
    )
    return cell.Row(gateway=settings, engine_policy=policy, **more)  # type: ignore[arg-type]  # fields of Row


def _stock(policy: str) -> cell.Row:
    found = engine_rows.stock(policy)
    return cell.Row(
        gateway=gateway_core.CoreSettings(
            policy="fcfs",
            max_inflight=None,
            limits=found.gateway.limits,
            classes=tuple(entitlements.SloClass(name=name) for name in maas_traces.TASKS),
        ),
        engine_policy=policy,
        stock_scheduler=True,
    )


class Maas(azure_suite.AzureSuite):
    """The suite. A cell's trace is `NAME/SEED`."""

    name = "maas"
    pools = (POOL,)
    rates = (RATE,)
    workflows = 0
    """A number that is not 0 keeps only as many calls of each trace."""
    replayed = maas_traces.FROM_AZURE
    parts = (SELECTORS, POLICIES)
    first_seed, seeds = FIRST_SEED, SEEDS

    @property
    def traces(self) -> Sequence[str]:
        return maas_traces.NAMES

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        """All rows, by name."""
        everywhere = self.everywhere
        return {
            **{policy: _row(policy) for policy in maas_policies.ROWS},
            **everywhere,
            **maas_ablations.rows(everywhere[maas_ablations.WHOLE]),
        }

    @property
    def with_selectors(self) -> Sequence[str]:
        """The rows of the part `selectors` on the trace of the ablations."""
        everywhere = self.everywhere
        return [*everywhere, *maas_ablations.rows(everywhere[maas_ablations.WHOLE])]

    @property
    def everywhere(self) -> Mapping[str, cell.Row]:
        """The rows that run on every trace."""
        return {
            **{name: _stock(policy) for name, policy in STOCK.items()},
            **{policy: _row(policy) for policy in FIXED},
            **{
                f"selector {name}": _row(guards.start_policy(ALLOW), steering=steered(create()))
                for name, create in selectors.SELECTORS.items()
                if name != "fixed" and (name != "llm" or asked_model.is_there())
            },
        }

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        name, seed = key.trace.split("/")
        calls = maas_traces.trace(name, int(seed), key.rate, azure_suite.published(key))[: key.workflows or None]
        return maas_ablations.trace(key.row, calls)

    def learned_from(self) -> Sequence[TraceCall]:
        return maas_traces.learned(1000)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        return maas_figures.figures(self.trace(key), outcome, maas_traces.LENGTH_S)

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        """All rows on all traces that are asked for. Without `--trace-file` the two traces from Azure are left out."""
        checks = suite.Checks(scheduler=options.scheduler)
        named, seeds = self.chosen_traces(options), self.chosen_seeds(options)
        chosen = options.parts or (SELECTORS,)

        def rows(name: str) -> list[str]:
            """The rows that the chosen parts run on a trace."""
            selectors_rows = self.with_selectors if name == maas_ablations.TRACE else self.everywhere
            wanted = [*(selectors_rows if SELECTORS in chosen else ())]
            return list(dict.fromkeys([*wanted, *(maas_policies.ROWS if POLICIES in chosen else ())]))

        results = suite.run_cells(self.seeded_keys(options, rows), options, checks, tell)
        loads = [(pool, rate) for pool, rates in self.loads(options).items() for rate in rates]
        report: Report = {"suite": self.name, "scheduler": checks.report(), "seeds": list(seeds), "pools": []}
        for pool, rate in loads:
            runs = {
                (key.trace, key.row): dict(run) for key, run in results.items() if (key.pool, key.rate) == (pool, rate)
            }
            found: Report = {"pool": pool, "rate": rate}
            if SELECTORS in chosen:
                found |= _compared(runs, named, seeds)
            if POLICIES in chosen:
                found["policies"] = maas_policies.compared(runs, named, seeds)
            report["pools"].append(found)
        return report

    def table(self, report: Report) -> str:
        parts = [
            _table(f"{name}: {found['pool']}, {found['rate']:g} calls/s", rows)
            for found in report["pools"]
            for name, rows in found.get("traces", {}).items()
        ]
        for found in report["pools"]:
            if "policies" in found:
                parts.append(maas_policies.table(f"{found['pool']}, {found['rate']:g} calls/s", found["policies"]))
            if "overall" not in found:
                continue
            header = (
                "all traces",
                "goodput over the oracle's",
                "over vLLM, FCFS",
                "over the best fixed policy, paired",
            )
            lines = [
                (
                    name,
                    *(bench_report.spread(row[key], 3) for key in ("of_oracle", "of_vllm", "of_best_fixed")),
                )
                for name, row in found["overall"].items()
            ]
            parts.append(bench_report.table(header, lines) + f"\nThe best fixed policy is {found['best_fixed']}.")
            if "ablations" in found:
                parts.append(maas_ablations.table(found["ablations"]))
        notes = (
            f"Intervals are 95% (Student's t) over the seeds {report['seeds'][0]} to {report['seeds'][-1]}. {PAPER}",
            report["scheduler"]["sentence"],
        )
        return "\n\n".join([*parts, *notes])


SUITE = Maas()


def oracle(met: Mapping[str, Sequence[int]]) -> int:
    """Calls that meet their targets when each window has its best policy. `met` counts them by policy and window."""
    return sum(max(counts) for counts in zip(*met.values(), strict=True))


def _compared(runs: Mapping[tuple[str, str], Report], names: Sequence[str], seeds: Sequence[int]) -> Report:
    """The figures of each row on each trace, and goodput relative to the oracle, to vLLM and to the best fixed policy.
    `runs` are the figures by trace (`NAME/SEED`) and row; they get the regret too."""
    rows = list(SUITE.everywhere)
    for trace in [f"{name}/{seed}" for name in names for seed in seeds]:
        best = oracle({row: runs[trace, row]["met_by_window"] for row in FIXED}) / maas_traces.LENGTH_S
        for row in rows:
            runs[trace, row]["oracle"] = best
            runs[trace, row]["regret"] = 1 - runs[trace, row]["goodput"] / best
    by_trace = {
        name: {
            row: {
                **{
                    key: paired_difference.interval([runs[f"{name}/{seed}", row][key] for seed in seeds])
                    for key in (*SHOWN, "oracle")
                },
                "switches": {str(seed): runs[f"{name}/{seed}", row]["switches"] for seed in seeds},
            }
            for row in rows
        }
        for name in names
    }

    def totals(key: str, row: str) -> list[float]:
        """Sums over the traces, seed by seed."""
        return [sum(runs[f"{name}/{seed}", row][key] for name in names) for seed in seeds]

    best_fixed = max(FIXED, key=lambda row: sum(totals("goodput", row)))
    references = {
        "of_oracle": ("oracle", rows[0]),
        "of_vllm": ("goodput", rows[0]),
        "of_best_fixed": ("goodput", best_fixed),
    }
    overall = {
        row: {
            name: paired_difference.times_better(totals(*reference), totals("goodput", row))
            for name, reference in references.items()
        }
        for row in rows
    }
    found = {"traces": by_trace, "overall": overall, "best_fixed": best_fixed}
    if maas_ablations.TRACE in names:
        found["ablations"] = maas_ablations.compared(runs, seeds)
    return found


def _table(title: str, rows: Report) -> str:
    header = (title, *(heading for heading, _ in SHOWN.values()))
    lines = [
        (name, *(f"{row[key]['mean']:.{digits}f}" for key, (_, digits) in SHOWN.items())) for name, row in rows.items()
    ]
    return bench_report.table(header, lines)
