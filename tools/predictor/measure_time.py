"""How long do predictions take? Prints the median and the 98th percentile of the CPU time of single operations.

    .venv/bin/python tools/predictor/measure_time.py

One thread drives 20,000 calls of 350 kinds and 50 tools, of 40 tenants with sessions, through the predictors of the gateway
core. The times include that of the clock, which is printed too. It runs the compiled core where there is one;
`TIDEGATE_INTERPRETED=1` runs the sources.
"""

import collections
import random
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tidegate_policy import cost
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict import engine_cost, output_length, tool_times, tool_use

CALLS, KINDS, TENANTS, TOOLS, SESSIONS = 20_000, 350, 40, 50, 400
COST = cost.CostModel(step_s=0.02, prefill_s=1e-4)

P = ParamSpec("P")
T = TypeVar("T")


class Times:
    """The time of each operation, by its name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = collections.defaultdict(list)

    def of(self, name: str, operation: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        before = time.thread_time_ns()
        result = operation(*arguments, **named)
        self.seen[name].append(time.thread_time_ns() - before)
        return result


def lengths(times: Times, rng: random.Random) -> None:
    learned = output_length.OutputLengths()
    for _ in range(CALLS):
        kind = ("tenant", "", f"stage {rng.randrange(KINDS)}", "model")
        prompt, output = rng.randrange(50, 8000), max(1, round(rng.lognormvariate(5.0, 1.0)))
        seen = output_length.LengthObservation(
            tenant="tenant",
            characters=4 * prompt,
            messages=2,
            sequences=1,
            prompt_tokens=prompt,
            output_tokens=output,
        )
        times.of("length of an answer: predict", learned.predict, kind, None, prompt)
        times.of("length of an answer: observe", learned.observe, kind, seen)


def tools(times: Times, rng: random.Random) -> None:
    learned = tool_use.ToolUse()
    now = 0.0
    for _ in range(CALLS):
        now += 0.05
        tenant, session = f"tenant {rng.randrange(TENANTS)}", f"session {rng.randrange(SESSIONS)}"
        kind = (tenant, "", f"stage {rng.randrange(KINDS // TENANTS)}", "model")
        tool = f"tool {min(rng.randrange(TOOLS), rng.randrange(TOOLS))}"
        prompt = rng.randrange(50, 8000)

        gap = times.of("tool after a call: predict", predicted, learned, now, kind, session)
        times.of("tool after a call: observe", observed, learned, now, kind, session, gap, tool, prompt)


def predicted(learned: tool_use.ToolUse, now: float, kind: output_length.Kind, session: str) -> tool_times.Gap | None:
    """What the gateway core does when a call of the session arrives."""
    gap = learned.on_arrival(now, kind[0], session)
    learned.predict(kind, kind[0], tool_use.NO_TOOL if gap is None else gap.tool)
    return gap


def observed(
    learned: tool_use.ToolUse,
    now: float,
    kind: output_length.Kind,
    session: str,
    gap: tool_times.Gap | None,
    tool: str,
    prompt_tokens: int,
) -> None:
    """What the gateway core does when the call has been answered."""
    learned.on_answer(kind, tool_use.NO_TOOL if gap is None else gap.tool, tool)
    if gap is not None:
        learned.observe(kind[0], gap, prompt_tokens)
    learned.on_leave(kind[0], session)
    learned.on_away(now, kind[0], session, tool, prompt_tokens)


def costs(times: Times, rng: random.Random) -> None:
    learned = engine_cost.EngineCost(COST)
    now = 0.0
    for number in range(CALLS):
        now += 0.05
        output = rng.randrange(20, 400)
        call = Call(
            id=CallId(str(number)), arrived_at_s=now, prompt_tokens=rng.randrange(50, 8000), output_predicted=output
        )
        first_s = now + COST.prefill_seconds(call.prompt_tokens)
        times.of("step costs of an engine: a call is sent", learned.on_sent, now, call, 0, others=0)
        times.of("step costs of an engine: its first token", learned.on_tokens, first_s, call.id, 1, 1.0)
        end_s = first_s + output * COST.step_s
        times.of("step costs of an engine: its end", learned.on_end, end_s, call.id, output, 1.0, streamed=True)


def main() -> None:
    times, rng = Times(), random.Random(1)
    for _ in range(CALLS):
        times.of("the clock alone", int)
    for part in (lengths, tools, costs):
        part(times, rng)
    print("| operation | median, us | 98%, us |\n|---|---|---|")
    for name, seen in times.seen.items():
        ordered = sorted(seen)
        median, late = (ordered[round(share * (len(ordered) - 1))] / 1000 for share in (0.5, 0.98))
        print(f"| {name} | {median:.1f} | {late:.1f} |")


if __name__ == "__main__":
    main()
