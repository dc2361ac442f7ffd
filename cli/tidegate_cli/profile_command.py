"""`tidegate profile`: measures a live engine and writes its cost profile with the error of the fit. `tidegate profile
estimate` prints one before anybody has measured it (`profile_estimate`)."""

import argparse
import asyncio
import datetime
import pathlib
import platform
import sys

from tidegate_cli import base_url, profile_document, profile_estimate, profile_measurement
from tidegate_cli.command_errors import Failed, Usage
from tidegate_policy.cost import CostModel
from tidegate_policy.predict import cost_fit
from tidegate_profiles import roofline

LARGE_ERROR = 0.3
"""A mean error of a fit beyond this is reported as a problem."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", metavar="ENGINE", help="base URL of an engine that serves nothing else (required unless estimating)"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: the model's name)")
    parser.add_argument("--accelerator", default="", metavar="NAME", help="the accelerator, as Kubernetes labels it")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument(
        "--max-batch", type=int, default=256, metavar="N", help="the engine's --max-num-seqs (default: %(default)s)"
    )
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="the engine's --max-num-batched-tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("profiles"), metavar="DIR", help="folder of the file"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="estimate")
    profile_estimate.add_arguments(
        verbs.add_parser("estimate", help="print the profile of an engine that nobody has measured, from datasheets")
    )


def run(options: argparse.Namespace) -> int:
    """Writes DIR/NAME.yaml and prints the error of the fit."""
    if options.verb == "estimate":
        return profile_estimate.run(options)
    if options.url is None:
        raise Usage("name an engine by --url, or estimate a profile: tidegate profile estimate --help")
    engine, timings = asyncio.run(_measured(options))
    first = CostModel(
        step_s=1.0,
        prefill_s=1.0,
        kv_tokens=engine.kv_tokens or 1_000_000,
        max_batch=options.max_batch,
        max_step_tokens=options.max_step_tokens,
    )
    try:
        fitted = cost_fit.fit(timings, first)
    except cost_fit.TooFewTimings as error:
        raise Failed(f"{error}: the engine's context or KV cache is too small to measure") from error
    name = options.name or engine.model.rstrip("/").rsplit("/", 1)[-1].lower()
    path = options.out / f"{name}.yaml"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(document(engine, fitted, options))
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from error
    sys.stdout.write(
        f"{path}\n"
        f"error on {fitted.held_out} timings that were not fitted: mean {fitted.mean_error:.1%}, "
        f"95th percentile {fitted.p95_error:.1%}\n"
        f"a request costs {fitted.request_s * 1000:.2f} ms outside the engine's steps; this time is not in the profile\n"
    )
    if fitted.mean_error > LARGE_ERROR:
        sys.stderr.write(
            "the error is large: other work ran on the engine or on this machine, or --max-step-tokens is not the engine's "
            "--max-num-batched-tokens; measure again before you use this profile\n"
        )
    if engine.kv_tokens is None:
        sys.stdout.write("the engine's metrics state no KV capacity; set kv_tokens by hand\n")
    return 0


def document(engine: profile_measurement.Engine, fitted: cost_fit.Fit, options: argparse.Namespace) -> str:
    """The profile as YAML."""
    cost = fitted.cost
    return profile_document.text(
        {
            "model": engine.model,
            "accelerator": options.accelerator or platform.machine(),
            "tensor_parallel": options.tensor_parallel,
            "source": f"measured by `tidegate profile` on {datetime.datetime.now(datetime.UTC).date()}",
            "derivation": f"non-negative least squares on {fitted.fitted} timings of prefills and decodes",
            "fit": {
                "held_out_timings": fitted.held_out,
                "mean_error": round(fitted.mean_error, 3),
                "p95_error": round(fitted.p95_error, 3),
            },
        },
        {name: getattr(cost, name) for name in roofline.COEFFICIENTS},
        kv_tokens=cost.kv_tokens,
        max_batch=cost.max_batch,
        max_step_tokens=cost.max_step_tokens,
    )


async def _measured(options: argparse.Namespace) -> tuple[profile_measurement.Engine, list[cost_fit.Timing]]:
    url = base_url.of(options.url)
    engine = await profile_measurement.inspect(url)
    timings = await profile_measurement.measure(
        engine,
        max_batch=options.max_batch,
        max_step_tokens=options.max_step_tokens,
        tell=lambda line: sys.stderr.write(f"{line}\n"),
    )
    return engine, timings
