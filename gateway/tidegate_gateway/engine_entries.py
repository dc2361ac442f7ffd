"""Which engines does a settings file name? The entries of `engines` and `services`, and the checks of them."""

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_policy import cost


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticEngine:
    """One engine by address."""

    url: str
    """Such as http://127.0.0.1:8100, without /v1."""
    name: str | None = None
    """Its id in headers, metrics and logs; default: host:port of the url."""
    control: str | None = None
    """host:port of its EngineControl; null = it has none."""
    node_pool: str = ""
    """Name of the engine's group in the state and on the page."""
    profile: str | None = None
    """Name of a shipped cost profile; null (and no cost) = a default that learns online."""
    cost: Mapping[str, float] | None = None
    """The profile's `cost` mapping inline; wins over `profile`."""

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/")

    @property
    def id(self) -> str:
        """Its id in headers, metrics and logs."""
        return self.name or urllib.parse.urlsplit(self.base_url).netloc


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineService:
    """Engines behind a headless service: one for each address that its name resolves to."""

    name: str
    """DNS name, such as chat-a100.default.svc.cluster.local."""
    port: int = 8000
    """HTTP port of each engine."""
    control_port: int | None = None
    """Port of each engine's EngineControl; null = they have none."""
    node_pool: str = ""
    """Name of the engines' group in the state and on the page."""
    profile: str | None = None
    """Name of a shipped cost profile; null (and no cost) = a default that learns online."""
    cost: Mapping[str, float] | None = None
    """The profile's `cost` mapping inline; wins over `profile`."""


def address_problem(url: str) -> str | None:
    """What is wrong with the address of an engine; the sentence follows the address."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"is not an address: {error}"
    if parts.scheme not in ("http", "https"):
        return "must start with http:// or https://"
    if not parts.hostname or parts.query or parts.fragment:
        return "is not an engine's address such as http://127.0.0.1:8100"
    if parts.path.rstrip("/").endswith("/v1"):
        return "is not an engine's address such as http://127.0.0.1:8100: leave out /v1"
    return None


def problems(engines: Sequence[StaticEngine], services: Sequence[EngineService]) -> list[str]:
    """What is wrong with the entries; each problem begins with the path of its setting."""
    found = []
    names: dict[str, int] = {}
    urls: dict[str, int] = {}
    for i, engine in enumerate(engines):
        if wrong := address_problem(engine.url):
            found.append(f"engines[{i}].url {engine.url!r} {wrong}")
            continue
        if (first := urls.setdefault(engine.base_url, i)) != i:
            found.append(f"engines[{i}].url is that of engines[{first}] too: name each engine once")
            continue
        if (first := names.setdefault(engine.id, i)) != i:
            found.append(f"engines[{i}] has the name {engine.id} of engines[{first}]: each engine needs its own")
    groups: Sequence[tuple[str, Sequence[StaticEngine | EngineService]]] = (
        ("engines", engines),
        ("services", services),
    )
    for group, entries in groups:
        for i, entry in enumerate(entries):
            if entry.cost is None:
                continue
            try:
                cost.from_mapping(entry.cost)
            except cost.BadProfile as error:
                named = f" of {entry.name}" if entry.name else ""
                found.append(f"{group}[{i}].cost{named} cannot be used: {error}")
    return found
