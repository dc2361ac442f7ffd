"""Trains the weights of the selector `classifier` in virtual time and writes `classifier.json`.

    .venv/bin/python tools/steering/train_selectors.py --trace-file AzureLLMInferenceTrace_conv.csv.gz

Every fixed policy runs on the traces of the suite `maas`, on development seeds only. A sample is a window under one policy:
its features, and how many of the calls that arrive in the *next* window meet their targets under each policy. The loss is
the cross entropy weighted by how much better a policy is than the mean of all, so windows in which the policy
does not matter count for nothing. The last lines compare the chosen policies with the best fixed policy on further
development seeds.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tidegate_policy.qos import Qos
from tidegate_policy.steer import features
from tidegate_policy.steer.proposal import Memory, Proposal
from tidegate_sim import cell, maas_traces, pools, suite
from tidegate_sim.suites import maas

POLICIES = ("sjf", "edf", "urgency", "two-lane")
"""The policies among which the classifier chooses."""
FIRST_SEED = 4
STEPS, RATE, DECAY = 3000, 0.5, 1e-3
OUT = Path(__file__).parents[2] / "policy/tidegate_policy/steer/classifier.json"

Key = tuple[str, int, str]


@dataclass(slots=True)
class Recorder:
    """A selector that keeps the policy and records each window."""

    windows: list[Sequence[float] | None] = field(default_factory=list)

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        self.windows.append(features.vector(qos) if features.is_evidence(qos) else None)
        return None


def recorded(key: Key, path: Path) -> tuple[list[Sequence[float] | None], list[int]]:
    """The features of the windows of one run, and the met targets by window of arrival."""
    name, seed, policy = key
    run = suite.CellKey(
        suite="maas", pool=maas.POOL, row=policy, trace=f"{name}/{seed}", rate=maas.RATE, workflows=0, trace_file=path
    )
    recorder = Recorder()
    settings = replace(maas.steered(recorder), allow=(policy,))
    row = replace(maas.SUITE.rows[policy], model="fast", steering=settings)
    engines = pools.pool(maas.POOL)
    outcome = cell.Cell(engines, row, maas.SUITE.learned_from(), seed=seed).run(maas.SUITE.trace(run))
    return recorder.windows, maas.SUITE.numbers(outcome, run)["met_by_window"]


def samples(runs: dict[Key, tuple[list[Sequence[float] | None], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Features, and met targets of the next window by policy."""
    inputs, gains = [], []
    for (name, seed, _), (windows, _) in runs.items():
        met = [runs[name, seed, policy][1] for policy in POLICIES]
        for index, vector in enumerate(windows[: len(met[0]) - 1]):
            if vector is not None:
                inputs.append([*vector, 1.0])
                gains.append([counts[index + 1] for counts in met])
    return np.array(inputs), np.array(gains, dtype=float)


def trained(inputs: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Gradient descent on the weighted cross entropy."""
    above = np.maximum(gains - gains.mean(axis=1, keepdims=True), 0.0)
    weights = np.zeros((inputs.shape[1], len(POLICIES)))
    for _ in range(STEPS):
        chance = chances(inputs, weights)
        slope = inputs.T @ (above.sum(axis=1, keepdims=True) * chance - above) / above.sum()
        weights -= RATE * (slope + DECAY * weights)
    return weights


def chances(inputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    scores = inputs @ weights
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def main() -> None:
    options = argparse.ArgumentParser(description="Trains the selector classifier.")
    options.add_argument("--trace-file", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=6)
    options.add_argument("--jobs", type=int, default=2)
    given = options.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    assert set(seeds) <= set(maas.DEVELOPMENT_SEEDS)
    keys = [(name, seed, policy) for name in maas_traces.NAMES for seed in seeds for policy in POLICIES]
    with concurrent.futures.ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as workers:
        found = workers.map(recorded, keys, [given.trace_file] * len(keys))
        runs = dict(zip(keys, found, strict=True))
    held_out = seeds[-1]
    weights = trained(*samples({key: run for key, run in runs.items() if key[1] != held_out}))
    inputs, gains = samples({key: run for key, run in runs.items() if key[1] == held_out})
    chosen = gains[np.arange(len(gains)), chances(inputs, weights).argmax(axis=1)]
    print(f"{len(inputs)} windows of seed {held_out}: met in the next window {chosen.mean():.2f}")
    for index, policy in enumerate(POLICIES):
        print(f"  always {policy}: {gains[:, index].mean():.2f}")
    print(f"  best in each window: {gains.max(axis=1).mean():.2f}")
    OUT.write_text(
        json.dumps(
            {
                "features": list(features.NAMES),
                "weights": {
                    policy: [round(float(value), 4) for value in weights[:, index]]
                    for index, policy in enumerate(POLICIES)
                },
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
