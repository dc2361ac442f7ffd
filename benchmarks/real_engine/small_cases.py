"""The small cases: a trace, the figure that counts, and the rows of each suite."""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import engine_setup

from tidegate_sim import (
    bench_report,
    cell,
    engine_rows,
    relational_queries,
    text2sql_workflows,
    tool_sessions,
    urgent_bursts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small case of a suite."""

    calls: Callable[[random.Random, float, int], Sequence[object]]
    """The suite's generator: a trace of some units at a rate."""
    units: int
    unit: str
    shrink: int
    """The factor by which all texts are shorter than in the suite."""
    headline: Callable[[cell.Outcome], float]
    figure: str
    rows: Mapping[str, cell.Row]
    """The first row is the baseline and the last is ours."""
    tool_factor: float = 1.0
    """Seconds of a tool over those in the suite."""

    def on(self, setup: engine_setup.Setup, units: float) -> "Case":
        """The case with `units` times its units, and with texts that are as long as this engine can serve in seconds."""
        return replace(
            self,
            units=round(self.units * units),
            shrink=self.shrink if setup.short_texts else 1,
            tool_factor=setup.tool_factor,
        )

    def trace(self, seed: int, rate: float, units: int) -> list[object]:
        return [self._small(call) for call in self.calls(random.Random(f"real engine {seed}"), rate, units)]

    def _small(self, call):
        prefix = tuple((name, self._tokens(tokens)) for name, tokens in call.prefix)
        own = call.prompt_tokens - sum(tokens for _, tokens in call.prefix)
        tool = call.tool and replace(call.tool, duration_s=call.tool.duration_s * self.tool_factor)
        return replace(
            call,
            prompt_tokens=max(sum(tokens for _, tokens in prefix) + self._tokens(own), 1),
            output_tokens=self._tokens(call.output_tokens),
            prefix=prefix,
            tool=tool,
        )

    def _tokens(self, tokens: int) -> int:
        return max(round(tokens / self.shrink), 1) if tokens else 0


def relquery_calls(rng: random.Random, rate: float, units: int):
    """Every fourth row of the groups."""
    calls = relational_queries.trace(rng, relational_queries.TABLES["beer"], queries=units, rate=rate)
    return [call for call in calls if int(call.id.split("-")[1]) % 4 == 0]


def group_latency_s(outcome: cell.Outcome) -> float:
    """The mean time from the arrival of a group of calls to its last token."""
    groups = defaultdict(list)
    for item in outcome.calls:
        groups[item.id.split("-")[0]].append(item)
    return statistics.fmean(
        max(item.finished_at_s for item in group) - min(item.arrived_at_s for item in group)
        for group in groups.values()
    )


def waiting_a_token_0_s(outcome: cell.Outcome) -> float:
    """The mean wait of the most urgent calls for their first token, divided by their output tokens."""
    return statistics.fmean(item.ttft_s / item.output_tokens for item in outcome.calls if item.urgency == 0)


def session_ttft_s(outcome: cell.Outcome) -> float:
    """The mean time to the first token of a session."""
    return statistics.fmean(item.ttft_s for item in outcome.calls if item.id.endswith("-0"))


CASES = {
    "relquery": Case(
        calls=relquery_calls,
        units=16,
        unit="relQueries",
        shrink=4,
        headline=group_latency_s,
        figure="relQuery latency, s",
        rows={
            "vLLM, FCFS": engine_rows.stock("fcfs"),
            "vLLM, static priority": engine_rows.stock("priority", stock_key="group-work"),
            "relquery": engine_rows.row("relquery"),
        },
    ),
    "semantic": Case(
        calls=lambda rng, rate, units: urgent_bursts.trace(rng, calls=units, gap_s=None, rate=rate, largest=20),
        units=80,
        unit="calls",
        shrink=4,
        headline=waiting_a_token_0_s,
        figure="waiting a token, level 0, s",
        rows={
            "vLLM, FCFS": engine_rows.stock("fcfs"),
            "vLLM, highest priority first": engine_rows.stock("priority", stock_key="urgency"),
            "semantic": engine_rows.row("semantic"),
        },
    ),
    "augmented": Case(
        calls=lambda rng, rate, units: tool_sessions.trace(rng, sessions=units, rate=rate),
        units=45,
        unit="sessions",
        shrink=8,
        headline=session_ttft_s,
        figure="TTFT of a session, s",
        rows={
            "vLLM, FCFS": engine_rows.stock("fcfs"),
            "vLLM, SJF": engine_rows.stock("priority", stock_key="work"),
            "augmented": engine_rows.row("augmented"),
        },
    ),
    "text2sql": Case(
        calls=lambda rng, rate, units: text2sql_workflows.trace(
            rng, [text2sql_workflows.FINANCIAL], workflows=units, rate=rate, name="w"
        ),
        units=10,
        unit="workflows",
        shrink=16,
        headline=lambda outcome: bench_report.attained_s(outcome.latencies_s, 0.95),
        figure="deadline at 95%, s",
        rows={
            "vLLM, FCFS": engine_rows.stock("fcfs", workflow_deadline_s=15.0),
            "vLLM, latest start first": engine_rows.stock("priority", workflow_deadline_s=15.0),
            "urgency": engine_rows.row("urgency", workflow_deadline_s=15.0),
        },
    ),
}
