"""The suite of sessions with tools on one engine (AugServe, section 5; InferCept's mix of six tools)."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from tidegate_policy.engine import session_hold
from tidegate_sim import bench_report, cell, engine_rows, load_suite, pools, suite, tool_sessions
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

TTFT_S = 1.0
ITERATIONS = 10.0
"""The paper's targets: TTFT below 1 s, and a normalised latency below ten iterations."""
RATES = (2.0, 3.0, 4.0, 5.0)
VARIATIONS = {"poisson": 1.0, "gamma1.5": 1.5, "gamma2": 2.0}
PUBLISHED = "published"

HOLD = session_hold.Settings()
MIN_WASTE = "InferCept min-waste, FCFS"

ROWS: Mapping[str, cell.Row] = {
    "vLLM, FCFS": engine_rows.stock("fcfs"),
    "vllm-no-prefix-cache, FCFS": engine_rows.stock("fcfs", prefix_cache=False),
    "vllm-prefill-first, FCFS": engine_rows.stock("fcfs", prefill_first=True),
    "vLLM, SJF": engine_rows.stock("priority", stock_key="work"),
    "sjf": engine_rows.row("sjf"),
    "srtf": engine_rows.row("srtf"),
    MIN_WASTE: engine_rows.row("fcfs", hold=HOLD),
    "fcfs + memory limit": engine_rows.row("fcfs", regulators=("memory-limit",)),
    "augmented": engine_rows.row("augmented"),
    "augmented + hold": engine_rows.row("augmented", hold=HOLD),
    "augmented + memory limit": engine_rows.row("augmented", regulators=("memory-limit",)),
    "augmented + fence": engine_rows.row("augmented", regulators=("fence",)),
    "sjf + fence": engine_rows.row("sjf", regulators=("fence",)),
    "augmented, all": engine_rows.row("augmented", regulators=("fence", "memory-limit"), hold=HOLD),
}


class Augmented(load_suite.LoadSuite):
    """The suite."""

    name = "augmented"
    count = 400
    first_seed = 4001
    learned = 200
    headline = "ttft_s"
    shown: ClassVar[Mapping[str, str]] = {
        "goodput": "goodput, 1/s",
        "slo_met": "targets met",
        "ttft_s": "TTFT, s",
        "ttft_95_s": "TTFT at 95%, s",
        "latency_a_token_s": "latency a token, s",
        "latency_a_token_with_tools_s": "with tools, s",
        "turn_wait_s": "wait of a turn, s",
    }
    baselines = ("vLLM, FCFS", "vllm-no-prefix-cache, FCFS", MIN_WASTE)
    sustained_rows = (
        "vLLM, FCFS",
        "vllm-no-prefix-cache, FCFS",
        "vLLM, SJF",
        MIN_WASTE,
        "augmented",
        "augmented + fence",
        "sjf + fence",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "AugServe against vLLM (discard)": "4.7 times the goodput on average; TTFT up to 96.3% lower",
        "AugServe against InferCept (min-waste, FCFS)": "3.3 to 3.7 times the goodput on average; TTFT up to 95.0% lower",
        "H800, 2 a second (Table 6)": "goodput 0.22 vLLM, 0.28 InferCept, 0.87 AugServe",
        "H800, 3 a second (Table 6)": "goodput 0.15 vLLM, 0.20 InferCept, 1.16 AugServe",
        "H800, 2 a second, CV 2 (Table 6)": "goodput 0.05 vLLM, 0.08 InferCept, 0.47 AugServe",
    }
    notes = (
        f"A session meets its targets if its first token comes within {TTFT_S:g} s, and if its latency a token without the "
        f"time of its tools is below {ITERATIONS:g} decode steps of one sequence. The paper does not say if tools count.",
        "Goodput is the share of sessions that meet their targets, times the rate at which sessions complete.",
        "The paper's vLLM computes a session's context again after each tool: the row vllm-no-prefix-cache. Today's vLLM "
        "finds the part that is still cached.",
        "ToolBench is left out: its lengths and tool times are not published in numbers.",
        "Engines hold or discard contexts and do not swap them: the profiles have no swap time.",
    )
    published_notes = (
        "Tools, their times, the tokens that they return and all lengths are those of published sessions.",
        "Instants of arrival are Poisson. Half of the sessions run, drawn with repetition. The gateway has learned from "
        "the other half.",
    )

    @property
    def workloads(self) -> Mapping[str, load_suite.Workload]:
        return {
            f"{card}-{arrivals}": load_suite.Workload(
                pool=profile, rates=RATES, overload=overload, published=arrivals == PUBLISHED
            )
            for card, profile, overload in (("h800", "h800-opt-13b", 12.0), ("rtx4090", "rtx4090-gptj-6b", 8.0))
            for arrivals in (*VARIATIONS, PUBLISHED)
        }

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        rows = engine_rows.registered(ROWS)
        ours = {name: row for name, row in rows.items() if name in ("sjf", "augmented", "augmented, all")}
        return {**rows, **load_suite.clairvoyant(ours)}

    def row_of(self, policy: str) -> cell.Row:
        return engine_rows.row(policy)

    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        variation = VARIATIONS[workload.split("-")[1]]
        return tool_sessions.trace(rng, sessions=count, rate=rate, variation=variation)

    def sampled(self, path: Path, rng: random.Random, rate: float, count: int, half: int) -> Sequence[TraceCall]:
        return tool_sessions.sampled(path, rng, half=half, sessions=count, rate=rate)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """Figures of the sessions."""
        (cost,) = pools.pool(key.pool).values()
        iteration_s = cost.step_seconds(uncached=0, decodes=1, context=0)
        tools_s: dict[str, float] = defaultdict(float)
        for call in self.trace(key):
            tools_s[call.session or ""] += call.tool.duration_s if call.tool else 0.0
        turns: dict[str, list[cell.CallOutcome]] = defaultdict(list)
        for item in outcome.calls:
            turns[item.id.split("-")[0]].append(item)
        ttfts, own, whole, ends, met = [], [], [], [], []
        for session, of_session in turns.items():
            arrived_at_s = min(item.arrived_at_s for item in of_session)
            ttft_s = min(item.first_at_s or 0.0 for item in of_session) - arrived_at_s
            end_at_s = max(item.finished_at_s or 0.0 for item in of_session)
            tokens = sum(item.output_tokens for item in of_session)
            ttfts.append(ttft_s)
            ends.append(end_at_s)
            whole.append((end_at_s - arrived_at_s) / tokens)
            own.append((end_at_s - arrived_at_s - tools_s[session]) / tokens)
            met.append(ttft_s <= TTFT_S and own[-1] <= ITERATIONS * iteration_s)
        throughput = load_suite.steady_throughput(ends)
        return {
            "goodput": fmean(met) * throughput,
            "slo_met": fmean(met),
            "throughput": throughput,
            "ttft_s": fmean(ttfts),
            "ttft_95_s": bench_report.attained_s(ttfts, 0.95),
            "latency_a_token_s": fmean(own),
            "latency_a_token_with_tools_s": fmean(whole),
            "turn_wait_s": fmean(item.ttft_s or 0.0 for item in outcome.calls),
            "preemptions": outcome.preemptions,
            "steps": outcome.steps,
        }


SUITE = Augmented()
