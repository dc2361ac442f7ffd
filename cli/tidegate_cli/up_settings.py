"""Combines the options of `tidegate up` with a settings file: an option wins over the file, the file over the defaults.

The result is a settings file for `tidegate gateway`. The file has the same form for both commands. Where it names no store,
`tidegate up` starts one; where it names no engines, `tidegate up` starts those of `--engines`.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_cli import embedded_valkey, engine_spec
from tidegate_cli.command_errors import Usage
from tidegate_gateway import access_settings, gateway_settings, settings_decoder, settings_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What `tidegate up` starts."""

    file: dict[str, Any]
    """The content of the settings file."""
    settings: gateway_settings.Settings
    """The settings in the file and the environment, with the embedded store where they name none."""
    wanted: Sequence[engine_spec.Engine]
    engines_in_file: bool
    """The engines of the file serve, and none is started."""
    embedded_store: bool


def combine(options: argparse.Namespace) -> Combined:
    """Reads `--config`, and completes the options from it. Raises `Usage`."""
    own_store = embedded_valkey.url(options.state)
    try:
        if options.config is None:
            file: dict[str, Any] = {}
            settings = gateway_settings.Settings(store=gateway_settings.Store(url=own_store))
        else:
            file = settings_file.read(options.config).content
            settings = gateway_settings.load(options.config, os.environ, store_url=own_store)
    except settings_decoder.BadSettings as error:
        raise Usage("\n".join(error.problems)) from None
    for name in ("host", "port", "grpc_port", "admin_port"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(settings.listen, name))
    if options.admin_port is None:
        raise Usage("listen.adminPort is null, and `tidegate up` needs the admin port: give one by --admin-port")
    if access_settings.is_open(settings.auth, options.host):
        raise Usage(
            f"--host {options.host} lets other machines call, and callers need no API key: give a settings file by --config"
            " that has auth.keysFile or auth.jwt, or auth.allowUnauthenticated: true if the network or a proxy"
            " authenticates clients"
        )
    engines_in_file = options.engines is None and bool(settings.engines or settings.services)
    wanted: Sequence[engine_spec.Engine]
    if engines_in_file:
        wanted = [
            engine_spec.Running(name=item.name or item.url.partition("://")[2], url=item.url, control=item.control)
            for item in settings.engines
        ]
    else:
        wanted = engine_spec.parse(options.engines or engine_spec.DEFAULT, speed=options.sim_speed)
    return Combined(
        file=file,
        settings=settings,
        wanted=wanted,
        engines_in_file=engines_in_file,
        embedded_store=settings.store.url == own_store,
    )


def gateway_document(
    options: argparse.Namespace, combined: Combined, engines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The settings file of the gateway that `tidegate up` starts; `engines` are those that it has started."""
    listen = {
        "host": options.host,
        "port": options.port,
        "grpcPort": options.grpc_port,
        "adminHost": "127.0.0.1",
        "adminPort": options.admin_port,
    }
    journal = str(options.state / "ends.jsonl")
    store = {"pool": "up", "journal": journal, **combined.file.get("store", {}), "url": combined.settings.store.url}
    document = {**combined.file, "listen": {**combined.file.get("listen", {}), **listen}, "store": store}
    if not combined.engines_in_file:
        document |= {"engines": list(engines), "services": []}
    return document
