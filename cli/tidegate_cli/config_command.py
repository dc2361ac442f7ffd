"""`tidegate config check|show|reference`: explains a settings file, prints the settings in force, and makes the reference
page."""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping

from tidegate_cli import settings_meaning, settings_reference
from tidegate_cli.command_errors import Failed
from tidegate_gateway import gateway_settings, settings_decoder, settings_file
from tidegate_gateway.store import store_address

NO_STORE = "unix:///tidegate-up"
"""Stands for the store of `tidegate up` while a file is checked."""
STORE_NOTE = (
    "The file names no store. `tidegate up` starts one; `tidegate gateway` takes TIDEGATE_STORE_URL, and without a store "
    "it sheds workflows and refuses to start with token limits."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|show|reference")
    checking = verbs.add_parser("check", help="name the problems of a settings file, and say what the file means")
    checking.add_argument("file", type=pathlib.Path, metavar="FILE", help="settings file, YAML or JSON")
    checking.add_argument("--json", action="store_true", help="print one JSON object")
    showing = verbs.add_parser("show", help="print all settings that are in force, as YAML")
    showing.add_argument("--config", type=pathlib.Path, metavar="FILE", help="settings file (default: no file)")
    verbs.add_parser("reference", help="print the page docs/settings.md")


def run(options: argparse.Namespace) -> int:
    if options.verb == "reference":
        sys.stdout.write(settings_reference.page())
        return 0
    return _check(options) if options.verb == "check" else _show(options)


def _check(options: argparse.Namespace) -> int:
    problems: tuple[str, ...] = ()
    meaning: list[str] = []
    warnings: list[str] = []
    try:
        settings = _loaded(options.file, os.environ)
        file = settings_file.read(options.file)
        problems = tuple(map(file.located, settings_meaning.problems(settings)))
        meaning = list(settings_meaning.sentences(settings))
        meaning.append(
            STORE_NOTE if settings.store.url is None else f"State is kept in {store_address.shown(settings.store.url)}."
        )
        warnings = list(map(file.located, settings_meaning.warnings(settings)))
    except settings_decoder.BadSettings as error:
        problems = error.problems
    if options.json:
        sys.stdout.write(json.dumps({"problems": problems, "warnings": warnings, "meaning": meaning}) + "\n")
        return 1 if problems else 0
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    if problems:
        count = len(problems)
        sys.stderr.write(
            f"{options.file} has {count} problem{'s' if count > 1 else ''}; docs/settings.md has all settings\n"
        )
        return 1
    sys.stdout.writelines(f"warning: {warning}\n" for warning in warnings)
    sys.stdout.write(f"{options.file} can be used.\n")
    sys.stdout.writelines(f"- {sentence}\n" for sentence in meaning)
    return 0


def _loaded(path: pathlib.Path, environment: Mapping[str, str]) -> gateway_settings.Settings:
    """The settings in the file; token limits need no store here, because `tidegate up` starts one. Raises `BadSettings`."""
    settings = gateway_settings.load(path, environment, store_url=NO_STORE)
    if settings.store.url != NO_STORE:
        return settings
    return dataclasses.replace(settings, store=dataclasses.replace(settings.store, url=None))


def _show(options: argparse.Namespace) -> int:
    try:
        given = gateway_settings.Settings()
        if options.config is not None:
            given = _loaded(options.config, {})
        placed = gateway_settings.from_environment(given, os.environ)
    except settings_decoder.BadSettings as error:
        raise Failed("\n".join(error.problems)) from None
    sys.stdout.write(settings_meaning.in_force(given, placed))
    return 0
