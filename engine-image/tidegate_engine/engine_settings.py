"""What an engine is told by its environment; `serve` writes it from its flags, `plugin` reads it in the engine core."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "TIDEGATE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine's settings."""

    control_address: str = "127.0.0.1:9010"
    """host:port of EngineControl. Loopback: whoever reaches it can reorder the queue; a pod sets its own address."""
    policy: str = "fcfs"
    """The order at start: vLLM's own, until somebody who can see the load decides otherwise."""
    profile: str = ""
    """Cost profile by name (`tidegate_profiles`) or path; empty = a generic one, good enough to compare calls."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `TIDEGATE_*` variables."""
    names = {name: PREFIX + name.upper() for name in Settings.__dataclass_fields__}
    return Settings(**{name: environ[variable] for name, variable in names.items() if variable in environ})


def store(settings: Settings, environ: dict[str, str] | os._Environ[str]) -> None:
    """Puts the settings where `load` finds them, also in child processes."""
    for name in Settings.__dataclass_fields__:
        environ[PREFIX + name.upper()] = getattr(settings, name)
