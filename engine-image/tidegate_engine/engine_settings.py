"""The settings of one engine.

`vllm_server` writes them into the environment, and `plugin` reads them in vLLM's engine core process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_policy import policies

PREFIX = "TIDEGATE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine's settings."""

    control_address: str = "127.0.0.1:9010"
    """host:port of EngineControl. Every client that reaches it can reorder the queue, so the default is loopback; a pod
    sets its own address. Data-parallel rank r of a host serves on the port plus r."""
    policy: str = policies.DEFAULT
    """The scheduling policy at start."""
    regulators: str = ""
    """The regulators that shape each step, as names separated by commas."""
    hold: str = "0"
    """Share of the KV cache, 0 to 1, that may be held for sessions whose client runs a tool; 0 = nothing is held."""
    profile: str = ""
    """The cost profile, by name (`tidegate_profiles`) or path. Without one the engine uses a generic profile, which is
    good enough to compare calls."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `TIDEGATE_*` variables."""
    names = {name: PREFIX + name.upper() for name in Settings.__dataclass_fields__}
    return Settings(**{name: environ[variable] for name, variable in names.items() if variable in environ})


def store(settings: Settings, environ: dict[str, str] | os._Environ[str]) -> None:
    """Puts the settings where `load` finds them, also in child processes."""
    for name in Settings.__dataclass_fields__:
        environ[PREFIX + name.upper()] = getattr(settings, name)


def names(text: str) -> list[str]:
    """The names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
