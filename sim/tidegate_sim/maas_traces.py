"""Traces of a shared service: thirteen kinds of tasks with targets of their own, under loads that change (H-MAS, section 4
and appendices D.2 and E.5).

The targets by task are those of the paper's Table 6, scaled by the importance of the call (eq 14). The paper publishes no
lengths by task and no mix, so the medians of `TASKS` and the mixes below are assumptions. Each trace depends on its name,
its seed and its load alone. `replay` and `task-drift` take the arrivals, and `replay` also the lengths, from a slice of the
Azure LLM inference trace 2023 (CC-BY 4.0), which is read from a file and never copied.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_sim import azure_suite
from tidegate_sim.trace_format import BadTrace, TraceCall

LENGTH_S = 600.0
"""The length of every trace."""
PHASE_S = LENGTH_S / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of task: its base targets (Table 6) and the medians of its lengths (assumed)."""

    ttft_ms: float
    tpot_ms: float
    prompt_tokens: int
    output_tokens: int


TASKS: Mapping[str, Task] = {
    "qa": Task(ttft_ms=4000, tpot_ms=70, prompt_tokens=300, output_tokens=60),
    "dialogue": Task(ttft_ms=4000, tpot_ms=70, prompt_tokens=500, output_tokens=90),
    "translation": Task(ttft_ms=4500, tpot_ms=80, prompt_tokens=250, output_tokens=120),
    "extraction": Task(ttft_ms=6000, tpot_ms=80, prompt_tokens=900, output_tokens=50),
    "paraphrasing": Task(ttft_ms=6000, tpot_ms=90, prompt_tokens=300, output_tokens=150),
    "code": Task(ttft_ms=6000, tpot_ms=90, prompt_tokens=600, output_tokens=250),
    "instruction": Task(ttft_ms=6000, tpot_ms=100, prompt_tokens=250, output_tokens=180),
    "summarization": Task(ttft_ms=7000, tpot_ms=110, prompt_tokens=1800, output_tokens=150),
    "letter": Task(ttft_ms=8000, tpot_ms=120, prompt_tokens=250, output_tokens=300),
    "math": Task(ttft_ms=10000, tpot_ms=130, prompt_tokens=250, output_tokens=350),
    "essay": Task(ttft_ms=10000, tpot_ms=130, prompt_tokens=200, output_tokens=600),
    "long-form": Task(ttft_ms=12000, tpot_ms=150, prompt_tokens=300, output_tokens=800),
    "research": Task(ttft_ms=13000, tpot_ms=150, prompt_tokens=1500, output_tokens=600),
}
SPREAD = 0.5
"""The standard deviation of the logarithm of a length."""
LONGEST_PROMPT, LONGEST_OUTPUT = 6000, 2000
IMPORTANCE, FACTOR = (0.5, 1.0), 0.2
"""The range of a call's importance, and by how much the targets of the ends of this range differ from the base (eq 14)."""

Mix = Mapping[str, float]
"""Weights of the tasks."""
INTERACTIVE: Mix = {"qa": 4, "dialogue": 4, "translation": 1, "extraction": 1, "paraphrasing": 1, "instruction": 1}
LONG: Mix = {"letter": 1, "math": 1, "essay": 2, "long-form": 3, "research": 1, "dialogue": 2}
MIXED: Mix = dict.fromkeys(TASKS, 1.0)
SHARED: Mix = {name: INTERACTIVE.get(name, 0.0) + 0.5 * LONG.get(name, 0.0) + 0.7 for name in TASKS}
"""Mostly interactive calls, with all other kinds among them."""
TENANTS: Mapping[str, float] = {"": 1}
"""The tenants, and how much each sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace changes over time: the load as a multiple of the base load, and the mix of the tasks."""

    load: Callable[[float], float]
    mix: Callable[[float], Mix]


def _stress(at_s: float) -> float:
    """The arrival rate of eq 13: steady, surge, then on and off."""
    if at_s < PHASE_S:
        return 0.6
    if at_s < 2 * PHASE_S:
        return 1.4
    return 1.8 if at_s % 20 < 10 else 0.2


def _bursts(at_s: float) -> float:
    """Five times the load for 6 s of each minute; the mean is the base load."""
    return 5.0 if at_s % 60 >= 54 else 5 / 9


def _shifted(at_s: float) -> float:
    return (0.6, 1.2, 0.8, 1.3)[min(int(at_s // (LENGTH_S / 4)), 3)]


def _shifted_mix(at_s: float) -> Mix:
    return (INTERACTIVE, MIXED, LONG, INTERACTIVE)[min(int(at_s // (LENGTH_S / 4)), 3)]


def _drifting(at_s: float) -> Mix:
    """From interactive to long tasks, evenly over the trace."""
    share = at_s / LENGTH_S
    return {name: (1 - share) * INTERACTIVE.get(name, 0.0) / 12 + share * LONG.get(name, 0.0) / 10 for name in TASKS}


def _regimes(at_s: float) -> Mix:
    """The three regimes of the paper's semantic drift."""
    return (INTERACTIVE, LONG, MIXED)[min(int(at_s // PHASE_S), 2)]


SHAPES: Mapping[str, Shape] = {
    "stress": Shape(load=_stress, mix=lambda at_s: SHARED),
    "burst": Shape(load=_bursts, mix=lambda at_s: SHARED),
    "drift": Shape(load=lambda at_s: 1.0, mix=_drifting),
    "shift": Shape(load=_shifted, mix=_shifted_mix),
}
"""The traces whose arrivals are an inhomogeneous Poisson process."""
FROM_AZURE = ("replay", "task-drift")
NAMES = (*FROM_AZURE, *SHAPES)


def trace(name: str, seed: int, rate: float, arrivals: Sequence[TraceCall] = ()) -> list[TraceCall]:
    """The calls of one trace; `rate` is the base load in calls a second. `arrivals` is the Azure trace, for those that
    replay it."""
    rng = random.Random(f"maas {name} {seed}")
    if name in SHAPES:
        return _shaped(rng, SHAPES[name], rate)
    taken = _slice(arrivals, rng, rate)
    if name == "replay":
        return [_as_task(rng, call) for call in taken]
    return [
        replace(_drawn(rng, index, call.arrival_s, _regimes(call.arrival_s)), id=call.id)
        for index, call in enumerate(taken)
    ]


def learned(calls: int) -> list[TraceCall]:
    """Calls from which a gateway has learned the lengths of the tasks; no trace has them."""
    rng = random.Random("maas learned")
    return [_drawn(rng, index, float(index), MIXED) for index in range(calls)]


def _shaped(rng: random.Random, shape: Shape, rate: float) -> list[TraceCall]:
    """Calls of a load that may jump at any instant."""
    most = max(shape.load(at_s / 2) for at_s in range(int(2 * LENGTH_S)))
    instants = azure_suite.arrivals(rng, rate, shape.load, most=most, length_s=LENGTH_S)
    return [_drawn(rng, index, at_s, shape.mix(at_s)) for index, at_s in enumerate(instants)]


def _drawn(rng: random.Random, index: int, at_s: float, mix: Mix) -> TraceCall:
    """A call of a task from `mix`, with its lengths."""
    name = rng.choices(list(mix), list(mix.values()))[0]
    task = TASKS[name]
    call = TraceCall(
        id=f"c{index}",
        arrival_s=at_s,
        prompt_tokens=_length(rng, task.prompt_tokens, LONGEST_PROMPT),
        output_tokens=_length(rng, task.output_tokens, LONGEST_OUTPUT),
    )
    return _annotated(rng, call, name)


def _as_task(rng: random.Random, call: TraceCall) -> TraceCall:
    """A call of the Azure trace with its own lengths, and a task to which its output length is likely to belong."""
    weights = [_density(call.output_tokens, task.output_tokens) for task in TASKS.values()]
    return _annotated(rng, call, rng.choices(list(TASKS), weights)[0])


def _annotated(rng: random.Random, call: TraceCall, name: str) -> TraceCall:
    """The call with its task, tenant and targets (eq 14): greater importance means tighter targets."""
    task, importance = TASKS[name], rng.uniform(*IMPORTANCE)
    low, high = IMPORTANCE
    factor = 1 + FACTOR - 2 * FACTOR * (importance - low) / (high - low)
    return replace(
        call,
        tenant=rng.choices(list(TENANTS), list(TENANTS.values()))[0],
        task_type=name,
        slo_class=name,
        ttft_slo_ms=float(math.floor(task.ttft_ms * factor)),
        tpot_slo_ms=float(math.floor(task.tpot_ms * factor)),
    )


def _length(rng: random.Random, median: int, most: int) -> int:
    return min(max(round(median * math.exp(rng.gauss(0, SPREAD))), 1), most)


def _density(tokens: int, median: int) -> float:
    """The likelihood of a length under a task, up to a factor that all tasks share."""
    return math.exp(-0.5 * (math.log(max(tokens, 1) / median) / SPREAD) ** 2) + 1e-9


def _slice(calls: Sequence[TraceCall], rng: random.Random, rate: float) -> list[TraceCall]:
    """Consecutive calls from a random place of the trace, with the instants stretched so that they fill the length of the
    trace at `rate` calls a second."""
    count = round(rate * LENGTH_S)
    if len(calls) <= count:
        raise BadTrace(f"a replay needs more than {count} calls of the Azure trace, and there are {len(calls)}")
    first = rng.randrange(len(calls) - count)
    taken = calls[first : first + count + 1]
    begins_s = taken[0].arrival_s
    factor = LENGTH_S / max(taken[-1].arrival_s - begins_s, 1e-3)
    return [replace(call, arrival_s=(call.arrival_s - begins_s) * factor) for call in taken[:-1]]
