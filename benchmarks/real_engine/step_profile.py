"""The cost model of an engine, fitted to the times of its single steps."""

import random
import time
from typing import Any

import engine_setup
import stepped_engine
from vllm import LLM
from vllm.v1.core.sched import scheduler as vllm_scheduler

from tidegate_engine import scheduler as schedulers
from tidegate_policy.predict import cost_fit
from tidegate_sim import virtual_engine

PREFILLS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 12000)
BATCHES = (1, 2, 4, 8, 16, 24, 32)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192)
DECODED = 12
REPEATS = 3


def measured(llm: LLM, setup: engine_setup.Setup) -> tuple[list[cost_fit.Timing], dict[str, Any]]:
    """The timings and what was fitted to two of three of them."""
    core = llm.llm_engine.engine_core.engine_core
    core.scheduler = virtual_engine.in_place_of(core.scheduler, vllm_scheduler.Scheduler)
    timings: list[cost_fit.Timing] = []
    room = (setup.blocks - 1) * setup.block
    _serve(llm, 4, 64, DECODED, f"warm {time.time()}")
    for repeat in range(REPEATS):
        for tokens in PREFILLS:
            if tokens + 2 <= min(setup.model_length, room):
                timings += _serve(llm, 1, tokens, 1, f"prefill {repeat}")
        for context in CONTEXTS:
            for batch in BATCHES:
                long = context + DECODED + 1
                if batch <= setup.sequences and long <= setup.model_length and batch * long <= 0.9 * room:
                    timings += _serve(llm, batch, context, DECODED, f"decode {repeat}")
    random.Random("profile").shuffle(timings)
    fit = cost_fit.fit(timings, setup.first_cost)
    names = ("step_s", "prefill_s", "attention_s", "decode_s", "context_s")
    return timings, {
        "cost": {name: getattr(fit.cost, name) for name in names},
        "mean_error": fit.mean_error,
        "p95_error": fit.p95_error,
        "fitted": fit.fitted,
        "held_out": fit.held_out,
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{name}: {value:.4g}" for name, value in found["cost"].items()]
    lines.append(f"error on {found['held_out']} steps: {found['mean_error']:.1%} mean, {found['p95_error']:.1%} p95")
    return "\n".join(lines)


def _serve(llm: LLM, batch: int, prompt: int, output: int, name: str) -> list[cost_fit.Timing]:
    """A timing of each step in which calls of one length are served together."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    work, vllms_schedule = [], scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = vllms_schedule(*args, **kwargs)
        work.append(schedulers.step_work(scheduled, scheduler.requests))
        return scheduled

    scheduler.schedule = schedule
    params = stepped_engine.answer_of(output)
    for index in range(batch):
        call = f"{name}, {batch} of {prompt}, {index}"
        engine.add_request(call, {"prompt_token_ids": stepped_engine.text(call, prompt)}, params)
    timings = []
    while scheduler.has_requests():
        work.clear()
        began_s = time.perf_counter()
        engine.step()
        took_s = time.perf_counter() - began_s
        if work and (work[0].uncached or work[0].decodes):
            timings.append(
                cost_fit.Timing(
                    seconds=took_s,
                    uncached=work[0].uncached,
                    attended=work[0].attended,
                    decodes=work[0].decodes,
                    context=work[0].context,
                )
            )
    scheduler.schedule = vllms_schedule
    return timings
