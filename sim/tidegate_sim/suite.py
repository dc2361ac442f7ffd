"""The contract of a benchmark suite, and the runner of its cells.

A suite names its traces, its pools and its rows, and formats its table. The runner runs every cell, in worker processes
where several are allowed. A cell depends on its key alone, so the same command writes the same bytes.
"""

import concurrent.futures
import contextlib
import functools
import logging
import math
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId
from tidegate_sim import bench_report, cell, engine_models, pools, suites, time_left
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much to run."""

    workflows: int | None = None
    """Workflows in each trace; None = the suite's own number."""
    jobs: int = os.cpu_count() or 1
    """Processes; with 1 every cell runs in this one."""
    pools: Sequence[str] | None = None
    """These pools only; None = the suite's own."""
    rates: Sequence[float] | None = None
    traces: Sequence[str] | None = None
    seeds: int | None = None
    """Seeds of each cell; None = the suite's own number."""
    parts: Sequence[str] | None = None
    """Parts of the run, in suites that have parts; None = all, or those that the suite runs unless others are named."""
    policy: Sequence[str] | None = None
    """Policies that run beside the baselines of the suite, in place of its other rows; None = the suite's own rows."""
    trace_file: Path | None = None
    """A published trace, in suites that replay one."""
    scheduler: engine_models.Model = "fast"
    """Whether vLLM's own scheduler runs in the cells, or the fast model of it."""
    checked_share: float = 0.1
    """The share of the cells of the fast model that run on vLLM's scheduler too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Everything that a worker needs to know of a cell."""

    suite: str
    pool: str
    row: str
    trace: str
    rate: float
    """Workflows (or calls) a second; 0 for a trace with its own instants."""
    workflows: int
    scheduler: engine_models.Model = "fast"
    trace_file: Path | None = None


@dataclass(slots=True, kw_only=True)
class Checks:
    """How many cells ran on which scheduler, and whether both gave the same figures."""

    scheduler: engine_models.Model
    cells: int = 0
    checked: int = 0
    """Cells of the fast model that ran on vLLM's scheduler too."""
    unequal: list[str] = field(default_factory=list)
    """The checked cells whose figures differ."""

    def sentence(self) -> str:
        """What a table says about its scheduler."""
        if self.scheduler == "vllm":
            return f"vLLM's own scheduler ran in all {self.cells} cells."
        if not self.checked:
            return f"The fast model of vLLM's scheduler ran in all {self.cells} cells; none was chosen for a check."
        verdict = f"{len(self.unequal)} of them gave other figures" if self.unequal else "all gave the same figures"
        return (
            f"The fast model of vLLM's scheduler ran in {self.cells} cells. {self.checked} of them ran on vLLM's own "
            f"scheduler too; {verdict}."
        )

    def report(self) -> Report:
        return {
            "scheduler": self.scheduler,
            "cells": self.cells,
            "checked_on_vllm": self.checked,
            "unequal": self.unequal,
            "sentence": self.sentence(),
        }


Tell = Callable[[str], None]
"""Takes one line of progress."""


class Suite(ABC):
    """One benchmark. A suite overrides `traces`, `trace`, `rows` and `table`, and the rest where its defaults do not
    fit."""

    name: str
    pools: Sequence[str] = ("hetero-1", "hetero-2")
    rates: Sequence[float] = (1.0,)
    workflows: int = 32
    """Workflows in each trace, unless the command line says otherwise."""

    parts: Sequence[str] = ()
    """The parts of a run that the command line can choose."""
    seeds: ClassVar[int] = 10
    """Seeds of each cell, unless the command line says otherwise. A suite with fewer says why."""
    first_seed: ClassVar[int]
    """Seeds are fixed beforehand: `first_seed`, and the numbers after it."""

    @property
    @abstractmethod
    def traces(self) -> Sequence[str]:
        """Names of the traces."""

    @abstractmethod
    def trace(self, key: CellKey) -> Sequence[TraceCall]:
        """The calls of the cell's trace, the same for all rows."""

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, cell.Row]:
        """How each row schedules the pool. The first row is the baseline."""

    @abstractmethod
    def table(self, report: Report) -> str:
        """The report for a terminal."""

    def engines(self, key: CellKey) -> Mapping[EngineId, CostModel]:
        """The engines of the cell, with their cost profiles. Raises `pools.UnknownPool`."""
        return pools.pool(key.pool)

    def learned_from(self) -> Sequence[TraceCall]:
        """The trace that the gateway has learned from before the run; none of the cells runs it."""
        return ()

    def learned_from_file(self, path: Path) -> Sequence[TraceCall]:
        """The same for the cells that replay a published trace. Raises `BadTrace`, `OSError`."""
        return self.learned_from()

    def chosen_seeds(self, options: Options) -> range:
        """The seeds of each cell."""
        return range(self.first_seed, self.first_seed + (options.seeds or self.seeds))

    def chosen_traces(self, options: Options) -> Sequence[str]:
        """The names of the traces that are asked for. Raises `BadTrace` for one that cannot be read."""
        return options.traces or self.traces

    def row_of(self, policy: str) -> cell.Row | None:
        """The row of a policy that `--policy` names; None = the suite has no such rows."""
        return None

    def row(self, name: str) -> cell.Row:
        """The row of a name in `rows`, or of a policy. Raises `KeyError`."""
        found = self.rows.get(name) or self.row_of(name)
        if found is None:
            raise KeyError(name)
        return found

    def seed(self, key: CellKey) -> int:
        """The seed of the gateway's random source."""
        return 0

    def run_row(self, key: CellKey, row: cell.Row, learned_from: Sequence[TraceCall]) -> Report:
        """The figures of the cell. A suite overrides this if more than a trace on a fixed pool runs in its cells."""
        run = cell.Cell(self.engines(key), row, learned_from, seed=self.seed(key))
        return self.numbers(run.run(self.trace(key)), key)

    def numbers(self, outcome: cell.Outcome, key: CellKey) -> Report:
        """The figures that are kept of one cell."""
        return bench_report.numbers(outcome)

    def run(self, options: Options, tell: Tell) -> Report:
        """The whole report. By default: every pool, rate, row and trace."""
        checks = Checks(scheduler=options.scheduler)
        results = run_cells(self.keys(options, self.loads(options)), options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "cells": [
                {"pool": key.pool, "rate": key.rate, "row": key.row, "trace": key.trace, **figures}
                for key, figures in results.items()
            ],
        }

    def loads(self, options: Options) -> Mapping[str, Sequence[float]]:
        """The rates to run on each pool."""
        return dict.fromkeys(options.pools or self.pools, options.rates or self.rates)

    def keys(self, options: Options, rates: Mapping[str, Sequence[float]]) -> list[CellKey]:
        """The keys of all rows and traces for each pool of `rates` at its rates."""
        return [
            CellKey(
                suite=self.name,
                pool=pool,
                row=row,
                trace=trace,
                rate=rate,
                workflows=options.workflows or self.workflows,
                scheduler=options.scheduler,
            )
            for pool, pool_rates in rates.items()
            for rate in pool_rates
            for row in self.rows
            for trace in self.chosen_traces(options)
        ]


def run_cells(keys: Sequence[CellKey], options: Options, checks: Checks, tell: Tell) -> dict[CellKey, Report]:
    """The figures of every cell, in the order of `keys`; `tell` hears of each finished cell.

    `checks` counts the cells. Some cells of the fast model run on vLLM's scheduler too, spread evenly over `keys`."""
    checked = _checked(keys, options.checked_share) if options.scheduler == "fast" else []
    results: dict[CellKey, Report] = {}
    every = [*keys, *checked]
    began_s = time.monotonic()
    for key, result in _finished(every, options.jobs):
        results[key] = result
        left = time_left.text(len(results), len(every), time.monotonic() - began_s)
        cell_name = f"{key.pool}  {key.rate:g} q/s  {key.row}  {key.trace}  {key.scheduler}"
        tell(f"{len(results)}/{len(every)}  {cell_name}  {left}".rstrip())
    checks.cells += len(keys)
    checks.checked += len(checked)
    for key in checked:
        if results[key] != results[replace(key, scheduler="fast")]:
            checks.unequal.append(f"{key.pool}, {key.rate:g} q/s, {key.row}, {key.trace}")
    return {key: results[key] for key in keys}


def _checked(keys: Sequence[CellKey], share: float) -> list[CellKey]:
    """The keys of a share of the cells, rounded up, for vLLM's scheduler."""
    count = math.ceil(share * len(keys) - 1e-9)
    return [replace(keys[index * len(keys) // count], scheduler="vllm") for index in range(count)]


def run_cell(key: CellKey) -> Report:
    """The figures of one cell, in any process: everything follows from the key."""
    suite = suites.load(key.suite)
    row = replace(suite.row(key.row), model=key.scheduler)
    with without_warnings():
        return suite.run_row(key, row, _learned_from(key.suite, key.trace_file))


@functools.cache
def _learned_from(name: str, trace_file: Path | None) -> Sequence[TraceCall]:
    """The trace that a suite learns from; all cells of a process share it."""
    suite = suites.load(name)
    return suite.learned_from() if trace_file is None else suite.learned_from_file(trace_file)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Keeps vLLM's warnings, which are meant for real engines, out of the log of a benchmark."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _finished(keys: Sequence[CellKey], jobs: int) -> Iterator[tuple[CellKey, Report]]:
    """Each cell with its figures, in the order in which they end."""
    if jobs == 1:
        yield from ((key, run_cell(key)) for key in keys)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        running = {workers.submit(run_cell, key): key for key in keys}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        finally:
            workers.shutdown(cancel_futures=True)  # after an interrupt, cells that have not begun do not run
