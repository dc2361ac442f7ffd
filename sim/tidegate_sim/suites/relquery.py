"""The relational-query suite: groups of calls on one engine (RelServe, section 5)."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from tidegate_sim import bench_report, cell, engine_rows, load_suite, pools, relational_queries, suite
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

MODELS = {
    "opt": ("a100-40-opt-13b", 4.0),
    "qwen": ("a100-40-qwen2.5-32b-tp2", 4.0),
    "llama": ("a100-40-llama2-70b-tp4", 4.0),
}
"""The paper's models: the profile of the engine, and an overload in relQueries a second."""
PUBLISHED = "published"
RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SLO_FACTOR = 5.0
"""A relQuery meets its target if it takes at most this many times as long as alone on an idle engine, and 1 s more."""

STATIC = "vLLM, static priority"
ROWS: Mapping[str, cell.Row] = {
    "vLLM, FCFS": engine_rows.stock("fcfs"),
    "vllm-prefill-first, FCFS": engine_rows.stock("fcfs", prefill_first=True),
    STATIC: engine_rows.stock("priority", stock_key="group-work"),
    "vllm-prefill-first, static priority": engine_rows.stock("priority", stock_key="group-work", prefill_first=True),
    "vLLM, SJF": engine_rows.stock("priority", stock_key="work"),
    "sjf": engine_rows.row("sjf"),
    "srtf": engine_rows.row("srtf"),
    "fcfs + arranger": engine_rows.row("fcfs", regulators=("arranger",)),
    "relquery": engine_rows.row("relquery"),
    "relquery + arranger": engine_rows.row("relquery", regulators=("arranger",)),
}


class RelQuery(load_suite.LoadSuite):
    """The suite."""

    name = "relquery"
    count = 100
    first_seed = 2001
    headline = "latency_s"
    shown: ClassVar[Mapping[str, str]] = {
        "latency_s": "relQuery latency, s",
        "waiting_s": "waiting, s",
        "core_s": "core, s",
        "tail_s": "tail, s",
        "latency_95_s": "95%, s",
        "slo_met": "targets met",
    }
    baselines = ("vLLM, FCFS", STATIC, "vllm-prefill-first, FCFS", "vllm-prefill-first, static priority")
    paper: ClassVar[Mapping[str, str]] = {
        "RelServe against vLLM (prefill first, FCFS)": "2.3 to 3.1 times lower mean latency at the highest load",
        "RelServe against vLLM with static priority": "1.4 to 2.2 times lower mean latency at the highest load",
        "vLLM with static priority against vLLM": "1.6 times lower mean latency at the highest load",
    }
    notes = (
        "Waiting ends when the first prefill of the group starts. Core ends when the last prefill of the group ends. Tail "
        "ends with the last token (RelServe eq 2).",
        f"A target is {SLO_FACTOR:g} times the time of the group alone, plus 1 s. The paper states no target.",
        "The groups have no urgencies, so highest priority first is FCFS here.",
        "The gateway predicts lengths by template from another trace. The client's limits of output are not used.",
    )
    published_notes = (
        "Templates, their shared beginnings, and the lengths of prompts and answers are those of published rows.",
        "Instants of arrival are Poisson. The template of a relQuery and its number of rows are drawn. Half of the rows of "
        "each template run, and the gateway has learned from the other half.",
    )

    @property
    def workloads(self) -> Mapping[str, load_suite.Workload]:
        return {
            f"{model}-{table}": load_suite.Workload(
                pool=profile, rates=RATES, overload=overload, published=table == PUBLISHED
            )
            for model, (profile, overload) in MODELS.items()
            for table in (*relational_queries.TABLES, PUBLISHED)
        }

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        rows = engine_rows.registered(ROWS)
        ours = {name: row for name, row in rows.items() if name in ("sjf", "relquery", "relquery + arranger")}
        return {**rows, **load_suite.clairvoyant(ours)}

    def row_of(self, policy: str) -> cell.Row:
        return engine_rows.row(policy)

    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        table = relational_queries.TABLES[workload.split("-")[1]]
        return relational_queries.trace(rng, table, queries=count, rate=rate)

    def sampled(self, path: Path, rng: random.Random, rate: float, count: int, half: int) -> Sequence[TraceCall]:
        return relational_queries.imported(path, rng, queries=count, rate=rate, half=half)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """Figures of the relQueries: means over groups."""
        groups: dict[str, list[cell.CallOutcome]] = defaultdict(list)
        for item in outcome.calls:
            groups[item.id.split("-")[0]].append(item)
        alone = self._alone_s(key)
        split = [_split(of_group) for of_group in groups.values()]
        latencies = [sum(parts) for parts in split]
        met = [latency <= alone[name] for name, latency in zip(groups, latencies, strict=True)]
        return {
            "latency_s": fmean(latencies),
            "waiting_s": fmean(parts[0] for parts in split),
            "core_s": fmean(parts[1] for parts in split),
            "tail_s": fmean(parts[2] for parts in split),
            "latency_95_s": bench_report.attained_s(latencies, 0.95),
            "latency_99_s": bench_report.attained_s(latencies, 0.99),
            "slo_met": fmean(met),
            "throughput": load_suite.steady_throughput(
                [max(item.finished_at_s or 0.0 for item in of_group) for of_group in groups.values()]
            ),
            "preemptions": outcome.preemptions,
            "steps": outcome.steps,
        }

    def _alone_s(self, key: suite.CellKey) -> dict[str, float]:
        """The target of each group."""
        (cost,) = pools.pool(key.pool).values()
        prefill_s: dict[str, float] = defaultdict(float)
        longest: dict[str, int] = defaultdict(int)
        rows: dict[str, int] = defaultdict(int)
        for call in self.trace(key):
            group = call.relquery or ""
            prefill_s[group] += cost.prefill_s * call.prompt_tokens
            longest[group] = max(longest[group], call.output_tokens)
            rows[group] += 1
        return {
            group: SLO_FACTOR * (seconds + longest[group] * (cost.step_s + cost.decode_s * rows[group])) + 1.0
            for group, seconds in prefill_s.items()
        }


def _split(group: Sequence[cell.CallOutcome]) -> tuple[float, float, float]:
    """Seconds of waiting, core and tail of a group."""
    arrived_at_s = min(item.arrived_at_s for item in group)
    starts = [item.started_at_s for item in group if item.started_at_s is not None]
    firsts = [item.first_at_s for item in group if item.first_at_s is not None]
    ends = [item.finished_at_s for item in group if item.finished_at_s is not None]
    return min(starts) - arrived_at_s, max(firsts) - min(starts), max(ends) - max(firsts)


SUITE = RelQuery()
