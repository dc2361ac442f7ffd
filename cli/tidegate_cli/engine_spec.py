"""Parses the `--engines` option of `tidegate up`, and describes the environment of the engines on this machine.

`sim:a100,a6000` starts one simulated engine for each profile. `vllm` and `vllm:2` start real engines. URLs name engines
that already run.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import tidegate_profiles
from tidegate_cli.command_errors import Usage
from tidegate_gateway import engine_entries
from tidegate_policy import cost

DEFAULT = "sim:a100,a6000"
MAX_ENGINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated engine to start, paced by a cost profile."""

    name: str
    profile: str
    cost: cost.CostModel
    """Scaled by --sim-speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """A real engine to start."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that already runs."""

    name: str
    url: str
    control: str | None = None
    """host:port of its EngineControl; only a settings file names it."""


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
        raise Usage(f"--engines {text!r} is not one of sim:PROFILE,..., vllm[:N] and http://HOST:PORT,...")
    if not 1 <= len(engines) <= MAX_ENGINES:
        raise Usage(f"--engines {text!r} names {len(engines)} engines; name from 1 to {MAX_ENGINES}")
    return _numbered(engines)


def vllm_environment(engines: int, *, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """Environment of each of `engines` vLLM processes on one machine: a share of the cores, a small cache, no downloads.

    Without it every CPU engine uses all cores, and the threads of the engines wait for each other. Variables that the
    user has set (`given`) stay unchanged.
    """
    ours = {
        "OMP_NUM_THREADS": str(max(cores // engines, 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {name: value for name, value in ours.items() if name not in given}


def _simulated(name: str, speed: float) -> Simulated:
    profile = tidegate_profiles.SHORT_NAMES.get(name, name)
    try:
        model = cost.from_mapping(tidegate_profiles.find(profile)["cost"])
    except tidegate_profiles.UnknownProfile as error:
        raise Usage(f"--engines: {error}; short names are {', '.join(tidegate_profiles.SHORT_NAMES)}") from None
    except OSError as error:
        raise Usage(f"--engines: cannot read the profile {profile}: {error.strerror}") from None
    except cost.BadProfile as error:
        raise Usage(f"--engines: the profile {profile} cannot be used: {error}") from None
    return Simulated(name=tidegate_profiles.short(name), profile=profile, cost=cost.scaled(model, 1 / speed))


def _running(url: str) -> Running:
    if wrong := engine_entries.address_problem(url):
        raise Usage(f"--engines: {url!r} {wrong}")
    parts = urlsplit(url)
    if parts.path not in ("", "/"):
        raise Usage(f"--engines: {url!r} is not an engine's address such as http://127.0.0.1:8100")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return Running(name=f"{host}:{port}", url=url.rstrip("/"))


def _numbered(engines: list[Engine]) -> list[Engine]:
    """Appends a number to each name that several engines share."""
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
