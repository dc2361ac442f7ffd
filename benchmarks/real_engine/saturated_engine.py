"""Time of a step of a saturated engine, vLLM's scheduler and ours in turns."""

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import engine_setup
import stepped_engine
from vllm import LLM
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler

from tidegate_engine import scheduler as schedulers
from tidegate_policy import labels
from tidegate_policy.model import Call, CallId
from tidegate_sim import bench_report, paired_difference, virtual_engine

STOCK = "vLLM, FCFS"
WAITING = 2000
PROMPT, OUTPUT = 64, 64
"""Tokens of each call."""


def measured(llm: LLM, setup: engine_setup.Setup, policies: Sequence[str], repeats: int) -> dict[str, Any]:
    """Milliseconds of a step by row. All rows serve the same calls, which arrive at once."""
    rows = [STOCK, *policies]
    turns: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    calls = setup.sequences + WAITING
    _turn(llm, STOCK, setup.sequences)  # warms up
    for repeat in range(repeats):
        for row in rows[repeat % len(rows) :] + rows[: repeat % len(rows)]:
            turns[row].append(_turn(llm, row, calls))
    steps = {row: [turn["step_ms"] for turn in turns[row]] for row in rows}
    return {
        "running": setup.sequences,
        "waiting": WAITING,
        "rows": {
            row: {
                "step_ms": paired_difference.interval(steps[row]),
                "scheduler_ms": statistics.fmean(turn["scheduler_ms"] for turn in turns[row]),
                "tokens_s": statistics.fmean(turn["tokens_s"] for turn in turns[row]),
                "ratio": None if row == STOCK else paired_difference.times_better(steps[STOCK], steps[row]),
                "turns": turns[row],
            }
            for row in rows
        },
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        (
            name,
            bench_report.spread(row["step_ms"], 2),
            f"{row['scheduler_ms']:.2f}",
            f"{row['tokens_s']:.0f}",
            "-" if row["ratio"] is None else bench_report.spread(row["ratio"], 3),
        )
        for name, row in found["rows"].items()
    ]
    header = ("row", "a step, ms", "in the scheduler, ms", "output tokens a second", "step: this row / vLLM")
    return bench_report.table(header, lines) + f"\n\n{found['running']} calls run and {found['waiting']} wait at first."


def _turn(llm: LLM, row: str, count: int) -> dict[str, float]:
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    before = core.scheduler
    ahead = isinstance(before, async_scheduler.AsyncScheduler)
    kind: Any = async_scheduler.AsyncScheduler if ahead else vllm_scheduler.Scheduler
    if row != STOCK:
        kind = functools.partial(schedulers.over(kind), policy=row, learn_cost=True)
    scheduler = core.scheduler = virtual_engine.in_place_of(before, kind)
    spent = [0.0]
    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, _timed(getattr(scheduler, name), spent))
    rng, now_s = random.Random("saturated"), time.monotonic()
    for index in range(count):
        call = Call(
            id=CallId(f"call {index}"),
            arrived_at_s=now_s,
            prompt_tokens=PROMPT,
            output_predicted=rng.randrange(OUTPUT // 2, 2 * OUTPUT),
            tenant=f"tenant {index % 8}",
            urgency=index % 5,
            due_at_s=now_s + rng.uniform(10.0, 60.0),
            group=f"group {index // 16}",
            group_size=16,
        )
        params = stepped_engine.answer_of(OUTPUT, labels.write(now_s, call))
        engine.add_request(call.id, {"prompt_token_ids": stepped_engine.text(call.id, PROMPT)}, params)
    steps, began_s = 0, time.monotonic()
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    took_s = time.monotonic() - began_s
    while scheduler.has_requests():  # the worker has yet to hear of the last ends
        engine.step()
    return {
        "step_ms": 1e3 * took_s / steps,
        "scheduler_ms": 1e3 * spent[0] / steps,
        "tokens_s": count * OUTPUT / took_s,
        "steps": steps,
    }


def _timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - began_s

    return timed
