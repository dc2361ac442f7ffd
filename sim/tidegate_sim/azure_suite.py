"""The base of the suites of which some traces replay the Azure LLM inference trace 2023, and Poisson arrivals whose rate
changes for the other traces. A cell's trace is `NAME/SEED`. The published file is read where it lies."""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from tidegate_sim import suite, trace_format
from tidegate_sim.trace_format import BadTrace, TraceCall


class AzureSuite(suite.Suite):
    """The base class."""

    replayed: ClassVar[Sequence[str]]
    """The traces that need `--trace-file`."""

    def seed(self, key: suite.CellKey) -> int:
        return int(key.trace.split("/")[1])

    def chosen_traces(self, options: suite.Options) -> Sequence[str]:
        """The names of the traces that are asked for. Without `--trace-file` those that need it are left out, and raise
        `BadTrace` if they were asked for by name."""
        if options.trace_file:
            return options.traces or self.traces
        if needy := [name for name in options.traces or () if name in self.replayed]:
            raise BadTrace(f"the trace {needy[0]} needs --trace-file, the Azure LLM inference trace 2023")
        return options.traces or [name for name in self.traces if name not in self.replayed]

    def seeded_keys(self, options: suite.Options, rows: Callable[[str], Iterable[str]]) -> list[suite.CellKey]:
        """The keys of the chosen traces and seeds, on each pool at its rates. `rows` are the rows of a trace."""
        return [
            suite.CellKey(
                suite=self.name,
                pool=pool,
                row=row,
                trace=f"{name}/{seed}",
                rate=rate,
                workflows=options.workflows or 0,
                scheduler=options.scheduler,
                trace_file=options.trace_file,
            )
            for pool, rates in self.loads(options).items()
            for rate in rates
            for name in self.chosen_traces(options)
            for seed in self.chosen_seeds(options)
            for row in rows(name)
        ]


def published(key: suite.CellKey) -> Sequence[TraceCall]:
    """The calls of the cell's published trace; none if the cell has no such trace."""
    return () if key.trace_file is None else _read(key.trace_file)


@functools.lru_cache(maxsize=2)
def _read(path: Path) -> Sequence[TraceCall]:
    return tuple(trace_format.from_azure(path))


def arrivals(
    rng: random.Random, rate: float, load: Callable[[float], float], *, most: float, length_s: float
) -> Iterator[float]:
    """The instants of a Poisson process of `rate * load(at_s)` events a second, by thinning. `most` is the greatest
    load, which may jump at any instant."""
    at_s = rng.expovariate(rate * most)
    while at_s < length_s:
        if rng.random() * most < load(at_s):
            yield at_s
        at_s += rng.expovariate(rate * most)
