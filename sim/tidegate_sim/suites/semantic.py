"""The suite of urgency levels: bursts of calls on one engine (Semantic Scheduling, section 4 and appendices A and B)."""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from tidegate_sim import bench_report, cell, engine_rows, load_suite, suite, urgent_bursts
from tidegate_sim.bench_report import Report
from tidegate_sim.perception import Perception
from tidegate_sim.trace_format import TraceCall

ENGINES = {
    "a100-4b": "a100-qwen1.5-4b",
    "a100-7b": "a100-qwen1.5-7b",
    "a5000-4b": "a5000-qwen1.5-4b",
    "a5000-7b": "a5000-qwen1.5-7b",
}
GAPS_S = {"gap0.1": 0.1, "gap1.0": 1.0}
LARGEST = (5, 20, 50, 100)
"""The largest bursts, the paper's loads."""
SMALL_BATCHES = (4, 16, 64)
"""Calls that the engine runs at once, in the workloads that show what the size of the batch changes."""
PREDICTED = Perception(length_error=0.2, urgency_error=0.0)
"""What the rows of the main table know: the paper's example error of the length predictor, and the true urgency."""
ERRORS = (0.1, 0.3, 0.5, 0.7, 0.9)
LATENCIES_S = (0.001, 0.01, 0.1, 1.0)

HIGHEST_FIRST = "vLLM, highest priority first"
ROWS: Mapping[str, cell.Row] = {
    "vLLM, FCFS": engine_rows.stock("fcfs", predictors=PREDICTED),
    HIGHEST_FIRST: engine_rows.stock("priority", stock_key="urgency", predictors=PREDICTED),
    "vLLM, SJF": engine_rows.stock("priority", stock_key="work", predictors=PREDICTED),
    "vllm-prefill-first, FCFS": engine_rows.stock("fcfs", prefill_first=True, predictors=PREDICTED),
    "priority": engine_rows.row("priority", predictors=PREDICTED),
    "sjf": engine_rows.row("sjf", predictors=PREDICTED),
    "priority + slot preemption": engine_rows.row("priority", regulators=("slot-preemption",), predictors=PREDICTED),
    "semantic": engine_rows.row("semantic", predictors=PREDICTED),
    "semantic + stage awareness": engine_rows.row("semantic", regulators=("stage-awareness",), predictors=PREDICTED),
    "semantic + slot preemption": engine_rows.row("semantic", regulators=("slot-preemption",), predictors=PREDICTED),
    "semantic, all": engine_rows.row(
        "semantic", regulators=("stage-awareness", "slot-preemption"), predictors=PREDICTED
    ),
}


def _sensitivity() -> dict[str, cell.Row]:
    """The paper's policy with worse and slower predictors (Figure 2a and 2b, Table 1)."""
    rows = {f"semantic, urgency error {error:g}": Perception(length_error=0.2, urgency_error=error) for error in ERRORS}
    rows |= {f"semantic, length error {error:g}": Perception(length_error=error) for error in ERRORS}
    rows |= {
        f"semantic, predictor of {seconds:g} s": Perception(length_error=0.2, latency_s=seconds)
        for seconds in LATENCIES_S
    }
    return {name: engine_rows.row("semantic", predictors=found) for name, found in rows.items()}


class Semantic(load_suite.LoadSuite):
    """The suite. The rate of a cell of the sweep is the size of the largest burst."""

    name = "semantic"
    parts = (*load_suite.PARTS, load_suite.SENSITIVITY)
    count = 1000
    first_seed = 3001
    headline = "waiting_a_token_0_s"
    shown: ClassVar[Mapping[str, str]] = {
        "waiting_a_token_0_s": "waiting a token, level 0, s",
        "ttft_0_s": "TTFT, level 0, s",
        "latency_a_token_0_s": "latency a token, level 0, s",
        "waiting_a_token_4_s": "waiting a token, level 4, s",
        "waiting_a_token_s": "waiting a token, all, s",
        "slowest_s": "slowest call, s",
        "slo_met": "targets met",
    }
    baselines = ("vLLM, FCFS", "vLLM, SJF", HIGHEST_FIRST)
    sustained_rows = (
        "vLLM, FCFS",
        "vllm-prefill-first, FCFS",
        "vLLM, SJF",
        HIGHEST_FIRST,
        "semantic",
        "semantic, all",
        f"semantic{load_suite.CLAIRVOYANT}",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "level 0, gap 0.1 s, bursts of 100, A100 4B": "1.7 / 6.1 / 8.7 times faster than HPJF / SJF / FCFS",
        "level 0, gap 1.0 s, A100 4B": "up to 9.1 times faster than the baselines",
        "level 0, A100 7B": "up to 6.6 times faster than the baselines",
        "level 0, A5000 4B": "up to 7.0 times faster than the baselines",
        "real data, against FCFS": "up to 270 (A5000 7B), 208 (A100 7B) and 167 (A100 4B) times faster",
    }
    notes = (
        "Waiting ends with the first token. It is divided by the call's output tokens (the paper's normalised waiting).",
        "Targets are TTFT of 0.5, 1, 2, 4 and 8 s for the levels 0 to 4. The paper states no targets.",
        "The rates below capacity and the sustained rates are calls a second in Poisson bursts of 1 to 20.",
        "The rows see true urgencies, and lengths with the error 0.2 of the paper's example.",
    )

    @property
    def workloads(self) -> Mapping[str, load_suite.Workload]:
        bursts = {
            f"{engine}-{gap}": load_suite.Workload(pool=profile, rates=LARGEST, overload=None)
            for engine, profile in ENGINES.items()
            for gap in GAPS_S
        }
        small = {
            f"a100-4b-batch{most}-gap0.1": load_suite.Workload(
                pool=ENGINES["a100-4b"], rates=LARGEST[-1:], overload=None, max_batch=most
            )
            for most in SMALL_BATCHES
        }
        poisson = {
            f"{engine}-poisson": load_suite.Workload(pool=profile, rates=(), overload=400.0)
            for engine, profile in ENGINES.items()
        }
        return {**bursts, **poisson, **small}

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        rows = engine_rows.registered(ROWS)
        ours = {name: row for name, row in rows.items() if name in ("priority", "sjf", "semantic", "semantic, all")}
        return {**rows, **load_suite.clairvoyant(ours), **self.sensitivity}

    def row_of(self, policy: str) -> cell.Row:
        return engine_rows.row(policy, predictors=PREDICTED)

    @property
    def sensitivity(self) -> Mapping[str, cell.Row]:
        return engine_rows.registered(_sensitivity())

    def load_name(self, workload: str, rate: float) -> str:
        in_sweep = self.workloads[workload].overload is None
        return f"bursts of up to {rate:g}" if in_sweep else super().load_name(workload, rate)

    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        gap_s = GAPS_S.get(workload.rsplit("-", 1)[1])
        largest = 20 if gap_s is None else round(rate)
        return urgent_bursts.trace(rng, calls=count, gap_s=gap_s, rate=rate, largest=largest)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """Figures by level, of the calls' true urgencies."""
        waits: dict[int | None, list[float]] = {level: [] for level in range(urgent_bursts.LEVELS)}
        latencies: dict[int | None, list[float]] = {level: [] for level in range(urgent_bursts.LEVELS)}
        ttfts: dict[int | None, list[float]] = {level: [] for level in range(urgent_bursts.LEVELS)}
        met = []
        for item in outcome.calls:
            ttft_s, e2e_s = item.ttft_s or 0.0, item.e2e_s or 0.0
            waits[item.urgency].append(ttft_s / item.output_tokens)
            latencies[item.urgency].append(e2e_s / item.output_tokens)
            ttfts[item.urgency].append(ttft_s)
            met.append(ttft_s <= urgent_bursts.TTFT_TARGETS_S[item.urgency or 0])
        report: Report = {
            "waiting_a_token_s": fmean(value for of_level in waits.values() for value in of_level),
            "latency_a_token_s": fmean(value for of_level in latencies.values() for value in of_level),
            "slowest_s": max(item.e2e_s or 0.0 for item in outcome.calls),
            "slo_met": fmean(met),
            "throughput": load_suite.steady_throughput(outcome.finished_s),
            "preemptions": outcome.preemptions,
            "steps": outcome.steps,
        }
        for level in range(urgent_bursts.LEVELS):
            report[f"waiting_a_token_{level}_s"] = fmean(waits[level] or [0.0])
            report[f"latency_a_token_{level}_s"] = fmean(latencies[level] or [0.0])
            report[f"ttft_{level}_s"] = fmean(ttfts[level] or [0.0])
            report[f"ttft_95_{level}_s"] = bench_report.attained_s(ttfts[level] or [0.0], 0.95)
        return report


SUITE = Semantic()
