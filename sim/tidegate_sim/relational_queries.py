"""Relational queries: one template of a prompt over the rows of a table (RelServe, section 5.1).

A relQuery is a group of calls that its client waits for together. Its rows arrive at once. Four tables and five templates
make twenty kinds. Mean lengths are the paper's (Table 4), and the output limits of the templates are the paper's. The
deviations of the logarithms of lengths, the share of the template in a prompt and the length of answers by kind of task are
fitted to 40 templates with 200 rows each of published relational prompts (ag_news, amazon_polarity, imdb, samsum, xsum,
yelp_review_full and others): the deviation of row lengths is 0.35 to 0.8, a template is 5% to 25% of a prompt, and an
answer of a classification has 1 to 3 tokens. Rows share the template and no values.
"""

import functools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_sim.trace_format import BadTrace, TraceCall, opened

MOST_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table whose rows fill templates."""

    number: int
    prompt_tokens: int
    """Mean tokens of a prompt."""
    spread: float
    """Deviation of the logarithm of a row's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A kind of question about a row."""

    number: int
    limit: int
    """The most output tokens that the client allows."""
    median: float
    spread: float
    """Median of the output tokens, and deviation of their logarithm."""


TABLES: Mapping[str, Table] = {
    "amazon": Table(number=1, prompt_tokens=234, spread=0.5),
    "rotten": Table(number=2, prompt_tokens=215, spread=0.4),
    "beer": Table(number=3, prompt_tokens=174, spread=0.5),
    "pdmx": Table(number=4, prompt_tokens=158, spread=0.6),
}
TEMPLATES: Mapping[str, Template] = {
    "filter": Template(number=1, limit=5, median=1.2, spread=0.4),
    "classify": Template(number=2, limit=10, median=2.2, spread=0.5),
    "rate": Template(number=3, limit=5, median=1.5, spread=0.4),
    "summarize": Template(number=4, limit=50, median=27.0, spread=0.4),
    "open": Template(number=5, limit=100, median=65.0, spread=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tokens of one published row."""

    prompt_tokens: int
    shared_tokens: int
    """Of the beginning that all rows of the template share."""
    output_tokens: int


def imported(path: Path, rng: random.Random, *, queries: int, rate: float, half: int | None = None) -> list[TraceCall]:
    """relQueries over the rows of published templates (`prompts.jsonl.gz`), Poisson at `rate` a second. The template and
    the number of its rows are drawn. With `half`, only every second row of a template is used: the first, third and so on
    with half 0, the others with half 1. So a gateway can learn from one half while the other half runs. Raises
    `BadTrace`, `OSError`."""
    known = {name: rows if half is None else rows[half::2] for name, rows in published(path).items()}
    templates = [name for name, rows in known.items() if rows]
    if not templates:
        raise BadTrace(f"{path}: no template has rows enough")
    calls: list[TraceCall] = []
    arrival_s = 0.0
    for number in range(queries):
        arrival_s += rng.expovariate(rate)
        chosen = rng.randrange(len(templates))
        rows = known[templates[chosen]]
        for index, row in enumerate(rng.sample(rows, k=min(rng.randint(1, MOST_ROWS), len(rows)))):
            calls.append(
                TraceCall(
                    id=f"q{number}-{index}",
                    arrival_s=arrival_s,
                    prompt_tokens=row.prompt_tokens,
                    output_tokens=row.output_tokens,
                    slo_class=templates[chosen],
                    relquery=f"q{number}",
                    prefix=((1000 + chosen, row.shared_tokens),) if row.shared_tokens else (),
                )
            )
    return calls


@functools.lru_cache(maxsize=2)
def published(path: Path) -> Mapping[str, Sequence[Row]]:
    """The rows of each published template. Rows of a template share the characters with which all its prompts begin. Raises
    `BadTrace`, `OSError`."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    with opened(path) as lines:
        try:
            for line in lines:
                row = json.loads(line)
                sizes = (row["prompt"], max(int(row["prompt_tokens"]), 1), max(int(row["output_tokens"]), 1))
                found.setdefault(f"{row['dataset']} {row['template']}", []).append(sizes)
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"{path}: not the relational prompts: {error!r}") from error
    templates: dict[str, Sequence[Row]] = {}
    for name, rows in found.items():
        common = _common([prompt for prompt, _, _ in rows])
        templates[name] = [
            Row(
                prompt_tokens=tokens,
                shared_tokens=round(tokens * common / max(len(prompt), 1)),
                output_tokens=output,
            )
            for prompt, tokens, output in rows
        ]
    return templates


def _common(prompts: Sequence[str]) -> int:
    """The characters with which all the prompts begin."""
    least, greatest = min(prompts), max(prompts)
    return next((at for at, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b), len(least))


def trace(rng: random.Random, table: Table, *, queries: int, rate: float) -> list[TraceCall]:
    """`queries` relQueries, Poisson at `rate` a second, each with 1 to 100 rows."""
    calls: list[TraceCall] = []
    arrival_s = 0.0
    for number in range(queries):
        arrival_s += rng.expovariate(rate)
        name, template = rng.choice(list(TEMPLATES.items()))
        share = random.Random(f"{table.number} {template.number}").uniform(0.05, 0.25)
        shared = round(share * table.prompt_tokens)
        own = table.prompt_tokens - shared
        for index in range(rng.randint(1, MOST_ROWS)):
            tokens = max(round(rng.lognormvariate(math.log(own) - table.spread**2 / 2, table.spread)), 4)
            output = round(rng.lognormvariate(math.log(template.median), template.spread))
            calls.append(
                TraceCall(
                    id=f"q{number}-{index}",
                    arrival_s=arrival_s,
                    prompt_tokens=shared + tokens,
                    output_tokens=min(max(output, 1), template.limit),
                    slo_class=name,
                    relquery=f"q{number}",
                    prefix=((10 * table.number + template.number, shared),),
                )
            )
    return calls
