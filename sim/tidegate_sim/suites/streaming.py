"""The suite of targets for time per output token: streamed chats beside long prompts on one engine.

No paper has it. It exists because several ideas (chunks that follow slack, stage awareness, the loops around the load) act
on such targets alone. The strongest simple baseline is vLLM with a smaller budget of tokens a step.
"""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from tidegate_policy import policies
from tidegate_sim import bench_report, cell, engine_rows, load_suite, streamed_chats, suite
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

FCFS, SMALL_CHUNKS = "vLLM, FCFS", "vLLM, FCFS, 512 tokens a step"
OURS = policies.DEFAULT
REGULATORS = (
    "slack-chunks",
    "load-band",
    "stage-awareness",
    "strict-stage-awareness",
    "prefill-order",
    "arranger",
    "slot-preemption",
)


def _rows() -> dict[str, cell.Row]:
    rows = {
        FCFS: engine_rows.stock("fcfs"),
        "vLLM, FCFS, 1024 tokens a step": engine_rows.stock("fcfs", max_step_tokens=1024),
        SMALL_CHUNKS: engine_rows.stock("fcfs", max_step_tokens=512),
        "vLLM, FCFS, 256 tokens a step": engine_rows.stock("fcfs", max_step_tokens=256),
        "vLLM, highest priority first": engine_rows.stock("priority", stock_key="urgency"),
        "semantic": engine_rows.row("semantic"),
        OURS: engine_rows.row(OURS),
        f"{OURS}, 512 tokens a step": engine_rows.row(OURS, max_step_tokens=512),
        **{f"{OURS} + {name}": engine_rows.row(OURS, regulators=(name,)) for name in REGULATORS},
        "semantic + prefill-order": engine_rows.row("semantic", regulators=("prefill-order",)),
    }
    return engine_rows.registered(rows)


class Streaming(load_suite.LoadSuite):
    """The suite. A unit is a call."""

    name = "streaming"
    count = 600
    learned = 200
    first_seed = 6001
    headline = "missed"
    shown: ClassVar[Mapping[str, str]] = {
        "slo_met": "targets met",
        "chats_met": "of chats",
        "summaries_met": "of summaries",
        "tpot_95_s": "time per token of chats at 95%, s",
        "ttft_95_s": "TTFT of chats at 95%, s",
        "throughput": "throughput, 1/s",
    }
    baselines = (FCFS, SMALL_CHUNKS)
    capacity_rows = (FCFS, SMALL_CHUNKS)
    paper: ClassVar[Mapping[str, str]] = {"none": "no paper has this set-up; the targets are those of H-MAS Table 6"}
    notes = (
        "A call meets its targets if its TTFT and its mean time per output token do (H-MAS eq 8).",
        f"{streamed_chats.SUMMARY_SHARE:.0%} of the calls summarise documents; their share and lengths are assumptions.",
        "`times better` compares the shares of the calls that miss a target, with one call added to each.",
    )

    @property
    def workloads(self) -> Mapping[str, load_suite.Workload]:
        return {
            "a100-7b": load_suite.Workload(pool="a100-qwen1.5-7b", rates=(), overload=4.0),
            "a5000-4b": load_suite.Workload(pool="a5000-qwen1.5-4b", rates=(), overload=4.0),
        }

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        rows = _rows()
        return {**rows, **load_suite.clairvoyant({OURS: rows[OURS]})}

    def row_of(self, policy: str) -> cell.Row:
        return engine_rows.row(policy)

    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        return streamed_chats.trace(rng, calls=count, rate=rate)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """Figures of the calls after the first fifth, which fills the engine."""
        counted = sorted(outcome.calls, key=lambda item: item.arrived_at_s)[key.workflows // 5 :]
        met: dict[str, list[bool]] = {streamed_chats.CHAT: [], streamed_chats.SUMMARY: []}
        tpots_s, ttfts_s = [0.0], [0.0]
        for item in counted:
            kind, ttft_s = item.tenant, item.ttft_s or 0.0
            tpot_s = ((item.e2e_s or 0.0) - ttft_s) / max(item.output_tokens - 1, 1)
            met[kind].append(ttft_s <= streamed_chats.TTFT_S[kind] and tpot_s <= streamed_chats.TPOT_S[kind])
            if kind == streamed_chats.CHAT:
                tpots_s.append(tpot_s)
                ttfts_s.append(ttft_s)
        every = [one for of_kind in met.values() for one in of_kind]
        return {
            "slo_met": fmean(every),
            "missed": (every.count(False) + 1) / (len(every) + 1),
            "chats_met": fmean(met[streamed_chats.CHAT] or [True]),
            "summaries_met": fmean(met[streamed_chats.SUMMARY] or [True]),
            "tpot_95_s": bench_report.attained_s(tpots_s, 0.95),
            "ttft_95_s": bench_report.attained_s(ttfts_s, 0.95),
            "throughput": load_suite.steady_throughput(outcome.finished_s),
            "preemptions": outcome.preemptions,
        }


SUITE = Streaming()
