"""The `--engines` of `tidegate up`: what to start, or what runs already.

`sim:a100,a6000` starts one simulated engine for each profile, `vllm` or `vllm:2` real ones, and URLs join engines that
somebody else runs.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import tidegate_profiles
from tidegate_cli.command_errors import Usage
from tidegate_policy import cost

DEFAULT = "sim:a100,a6000"
MAX_ENGINES = 16
SHORT_NAMES = {"a100": "a100-70b-tp8", "a6000": "a6000-70b-tp8", "l40": "l40-70b-tp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """To start: an engine paced by a cost profile."""

    name: str
    profile: str
    cost: cost.CostModel
    """At the speed that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """To start: a real engine."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Runs already."""

    name: str
    url: str


Engine = Simulated | Vllm | Running


def parse(text: str, *, speed: float) -> list[Engine]:
    """The engines that `text` names. Raises `Usage`."""
    if text.startswith("sim:"):
        engines: list[Engine] = [_simulated(name, speed) for name in text[4:].split(",")]
    elif match := re.fullmatch(r"vllm(?::(\d{1,2}))?", text):
        engines = [Vllm(name="vllm") for _ in range(int(match[1] or 1))]
    elif text.startswith(("http://", "https://")):
        running = [_running(url) for url in text.split(",")]
        for name, count in Counter(engine.name for engine in running).items():
            if count > 1:
                raise Usage(f"--engines names {name} {count} times; name each engine once")
        engines = [*running]
    else:
        raise Usage(f"--engines {text!r} is none of sim:PROFILE,..., vllm[:N] and http://HOST:PORT,...")
    if not 1 <= len(engines) <= MAX_ENGINES:
        raise Usage(f"--engines {text!r} names {len(engines)} engines; from 1 to {MAX_ENGINES} will do")
    return _numbered(engines)


def vllm_environment(engines: int, *, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """For each of `engines` vLLM processes on one machine: its share of the cores, a small cache, no downloads. By itself
    every CPU engine takes all cores, and their threads wait for each other. What the user has set stays (`given`)."""
    ours = {
        "OMP_NUM_THREADS": str(max(cores // engines, 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {name: value for name, value in ours.items() if name not in given}


def _simulated(name: str, speed: float) -> Simulated:
    profile = SHORT_NAMES.get(name, name)
    try:
        model = cost.from_mapping(tidegate_profiles.load(profile)["cost"])
    except tidegate_profiles.UnknownProfile as error:
        raise Usage(f"--engines: {error}; short names are {', '.join(SHORT_NAMES)}") from None
    return Simulated(name=name, profile=profile, cost=cost.scaled(model, 1 / speed))


def _running(url: str) -> Running:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Usage(f"--engines: {url!r} is not an address: {error}") from None
    if not parts.hostname or parts.path not in ("", "/"):
        raise Usage(f"--engines: {url!r} is not an engine's address such as http://127.0.0.1:8100")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Running(name=f"{host}:{port}", url=url.rstrip("/"))


def _numbered(engines: list[Engine]) -> list[Engine]:
    """Gives those that share a name a number each."""
    names = [engine.name for engine in engines]
    seen: dict[str, int] = {}
    numbered: list[Engine] = []
    for engine in engines:
        if names.count(engine.name) == 1 or isinstance(engine, Running):
            numbered.append(engine)
            continue
        index = seen[engine.name] = seen.get(engine.name, -1) + 1
        name = f"{engine.name}-{index}"
        if isinstance(engine, Simulated):
            numbered.append(Simulated(name=name, profile=engine.profile, cost=engine.cost))
        else:
            numbered.append(Vllm(name=name))
    return numbered
