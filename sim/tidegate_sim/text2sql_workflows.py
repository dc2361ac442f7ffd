"""Agentic text-to-SQL workflows: what one question makes a CHESS-like agent ask of a model (HexGen-Text2SQL 2.1).

Schema linking, two SQL candidates in parallel, 0 to 10 corrections one after the other, unit tests, and one evaluation for
each test in parallel. The numbers below are fitted to 78 workflows of Llama-3.1-70B over two BIRD databases, published with
HexGen-Flow (57 of `financial`, 15 of `formula1`): counts are shares of those workflows, log-normal parameters are means and
deviations of logarithms. The data does not say which prompts share text, so by default no prefix is shared, and what is
shared is an assumption (`SharedPrefix`). SQL execution between calls takes no time.
"""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate_sim.trace_format import BadTrace, TraceCall, opened

LINK, KEYWORDS = "Information Retriever", "extract_keywords"
CANDIDATE, REVISE = "generate_candidate_llama-agent", "revise"
UNIT_TESTER, UNIT_TEST, EVALUATE = "unit_tester", "generate_unit_test", "evaluate"
PARALLEL = (CANDIDATE, EVALUATE)
"""Neighbouring calls of these stages run together; all others run one after the other."""

Step = tuple[str, int, int]
"""(stage, prompt tokens, output tokens)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A database and the questions that are asked of it."""

    name: str
    schema_tokens: tuple[int, int]
    """Range of the first candidate's prompt, most of which is the schema."""
    revised: float
    """Share of the questions whose SQL needs a correction."""


FINANCIAL = Database(name="financial", schema_tokens=(11735, 12286), revised=0.30)
FORMULA1 = Database(name="formula1", schema_tokens=(13703, 14000), revised=0.47)
BOTH = (FINANCIAL, FORMULA1)

MEAN_REVISIONS, MOST_REVISIONS = 2.83, 10
"""Of workflows that have any; geometric."""
EVALUATIONS = {2: 1, 3: 8, 4: 22, 5: 25, 6: 15, 7: 1, 8: 1}
"""Number of evaluations: workflows that had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """An assumption, because the data does not show text: the prompts about one database start with the same tokens."""

    share: float = 0.0
    """The share of each prompt that it has in common with the other prompts about its database."""
    databases: int = 95
    """Databases that questions are asked of, each as often as the others. BIRD has 95 (69 to train, 11 dev, 15 test)."""


NOTHING_SHARED = SharedPrefix()


def workflow(rng: random.Random, database: Database) -> list[Step]:
    """The calls of one question, in order."""
    schema = rng.randint(*database.schema_tokens)
    first = LINK, 301, 5 if rng.random() < 0.55 else rng.randint(24, 46)
    second = (KEYWORDS, rng.randint(635, 733), _log_normal(rng, 3.69, 0.42, 13, 119))
    links: list[Step] = [
        first,
        *([second] if rng.random() < 0.85 else []),
        (LINK, 304, 5),
        (LINK, 308, 5),
        (LINK, 312, 4),
    ]
    difficulty = rng.gauss(0, 1)  # shared by the two candidates, whose lengths go together (0.7)
    candidates = [
        (CANDIDATE, schema, _candidate(rng, difficulty, 6.54, 0.245, 360, 1026)),
        (CANDIDATE, schema - 3866, _candidate(rng, difficulty, 6.16, 0.187, 274, 772)),
    ]
    return [*links, *candidates, *_revisions(rng, database, schema), *_tests(rng)]


def trace(
    rng: random.Random,
    databases: Sequence[Database],
    *,
    workflows: int,
    rate: float,
    name: str,
    shared: SharedPrefix = NOTHING_SHARED,
) -> list[TraceCall]:
    """`workflows` questions, Poisson at `rate` a second, each to one of `databases` at random. What the prompts share does
    not change anything else in the trace."""
    steps = [workflow(rng, rng.choice(databases)) for _ in range(workflows)]
    calls = _calls(rng, steps, rate, name)
    if not shared.share:
        return calls
    choice = random.Random(f"databases of {name} {rng.random()}")
    asked: dict[str | None, int] = {}
    for call in calls:
        asked.setdefault(call.workflow, choice.randrange(shared.databases))
    return [replace(call, prefix=((asked[call.workflow], round(shared.share * call.prompt_tokens)),)) for call in calls]


def learned() -> list[TraceCall]:
    """The trace that gateways have learned lengths and remaining work from. No suite runs it."""
    return trace(random.Random(7), BOTH, workflows=200, rate=1.0, name="learned")


def imported(path: Path, rng: random.Random, *, rate: float) -> list[TraceCall]:
    """The published workflows themselves (`workflows.jsonl.gz`), Poisson at `rate`. Raises `BadTrace`, `OSError`."""
    with opened(path) as lines:
        try:
            steps = [
                [(step["step"], step["input_length"], step["output_length"]) for step in json.loads(line)["steps"]]
                for line in lines
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"{path}: not the text-to-SQL workflows: {error!r}") from error
    return _calls(rng, steps, rate, "text2sql")


def _calls(rng: random.Random, workflows: Iterable[Sequence[Step]], rate: float, name: str) -> list[TraceCall]:
    calls: list[TraceCall] = []
    arrival_s = 0.0
    for number, steps in enumerate(workflows):
        arrival_s += rng.expovariate(rate)
        before: list[str] = []
        group: list[str] = []
        stage_of_group = ""
        for index, (stage, prompt, output) in enumerate(steps):
            if stage != stage_of_group or stage not in PARALLEL:
                before, group, stage_of_group = group, [], stage
            call = TraceCall(
                id=f"{name}-{number}-{index}",
                arrival_s=0.0 if before else arrival_s,
                prompt_tokens=prompt,
                output_tokens=output,
                workflow=f"{name}-{number}",
                stage=stage,
                after=tuple(before),
            )
            group.append(call.id)
            calls.append(call)
    return calls


def _revisions(rng: random.Random, database: Database, schema: int) -> list[Step]:
    if rng.random() >= database.revised:
        return []
    count = 1
    while count < MOST_REVISIONS and rng.random() > 1 / MEAN_REVISIONS:
        count += 1
    prompt = schema - 3866 - (1229 if rng.random() < 0.1 else rng.randint(2130, 2220))
    return [(REVISE, prompt + rng.randint(-15, 15), _revision(rng)) for _ in range(count)]


def _revision(rng: random.Random) -> int:
    """One in seventeen runs on until a limit of about a thousand tokens."""
    return rng.randint(988, 1078) if rng.random() < 0.06 else _log_normal(rng, 4.32, 0.645, 11, 187)


def _tests(rng: random.Random) -> list[Step]:
    if rng.random() < 0.064:
        return [(UNIT_TESTER, 271, 6), (UNIT_TESTER, 275, 4), (UNIT_TESTER, 278, 4)]
    prompt = min(max(round(rng.gauss(1030, 210)), 628), 1571)
    evaluations = rng.choices(list(EVALUATIONS), weights=list(EVALUATIONS.values()))[0]
    evaluated = max(prompt - round(rng.gauss(125, 120)), 500)
    return [
        (UNIT_TESTER, 271, 6),
        (UNIT_TEST, prompt, min(max(round(rng.gauss(91, 28)), 26), 153)),
        (UNIT_TESTER, 275, 4),
        *((EVALUATE, evaluated + rng.randint(-10, 10), _evaluation(rng)) for _ in range(evaluations)),
        (UNIT_TESTER, 278, 4),
    ]


def _evaluation(rng: random.Random) -> int:
    return 22 if rng.random() < 0.933 else _log_normal(rng, 4.6, 0.55, 32, 357)


def _candidate(rng: random.Random, difficulty: float, mean: float, deviation: float, low: int, high: int) -> int:
    mixed = 0.7**0.5 * difficulty + 0.3**0.5 * rng.gauss(0, 1)
    return min(max(round(math.exp(mean + deviation * mixed)), low), high)


def _log_normal(rng: random.Random, mean: float, deviation: float, low: int, high: int) -> int:
    return min(max(round(rng.lognormvariate(mean, deviation)), low), high)


def in_turn(calls: Sequence[TraceCall], active: int) -> list[TraceCall]:
    """The same workflows as a closed loop: `active` start at once, and each of the others starts when the workflow `active`
    places before it ends. So the pool has the same load all the time, and its throughput is its capacity."""
    groups: dict[str | None, list[TraceCall]] = {}
    for call in calls:
        groups.setdefault(call.workflow, []).append(call)
    workflows = list(groups.values())
    lasts = []
    for group in workflows:
        followed = {before for call in group for before in call.after}
        lasts.append(tuple(call.id for call in group if call.id not in followed))
    made = []
    for number, group in enumerate(workflows):
        before = lasts[number - active] if number >= active else ()
        made += [call if call.after else replace(call, arrival_s=0.0, after=before) for call in group]
    return made
