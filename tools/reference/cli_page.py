"""docs/cli.md from the parsers of the program."""

import argparse
import pathlib
from collections.abc import Iterator

from tidegate_cli import main

OPENING = """# Command line

`tools/reference/generate` makes this page from the parsers of the program. `tidegate COMMAND --help` shows the same.
The exit code is 0, or 1 for a failure, or 2 for a wrong command line. Errors go to the standard error in one sentence.
`tidegate completion` makes a shell complete commands and options.

| command | task |
|---|---|
"""


def page() -> str:
    summaries = {name: summary for name, (_, summary) in (main.COMMANDS | main.COMPONENTS).items()}
    table = "".join(f"| [`tidegate {name}`](#tidegate-{name}) | {text} |\n" for name, text in summaries.items())
    (commands,) = (item for item in main.whole_parser()._actions if isinstance(item, argparse._SubParsersAction))
    sections = (
        line for name in summaries for line in _sections(commands.choices[name], f"tidegate {name}", summaries[name])
    )
    return "\n".join([OPENING + table, *sections]).rstrip() + "\n"


def _sections(parser: argparse.ArgumentParser, name: str, summary: str) -> Iterator[str]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    rows = [row for action in parser._actions if action not in below for row in _rows(action)]
    words = " ".join(f"`{_metavar(action)}`" for action in parser._actions if _positional(action))
    yield f"{'#' * len(name.split())} {name}\n"
    yield f"{summary[0].upper()}{summary[1:]}.{f' Usage: `{name}` {words}' if words else ''}\n"
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"
    for action in below:
        summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for child, child_parser in action.choices.items():
            yield from _sections(child_parser, f"{name} {child}", summaries.get(child, ""))


def _positional(action: argparse.Action) -> bool:
    return not action.option_strings and not isinstance(action, argparse._SubParsersAction)


def _rows(action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return
    names = ", ".join(action.option_strings) or _metavar(action)
    taken = "" if action.nargs == 0 or not action.option_strings else f" {_metavar(action)}"
    meaning = (action.help or "") % {"default": action.default}
    if action.choices is not None:
        meaning = f"{meaning}{'; ' if meaning else ''}one of {', '.join(map(str, action.choices))}"
    if (
        action.default not in (None, argparse.SUPPRESS, "", False, [])
        and "default" not in meaning
        and not _machine(action)
    ):
        meaning += f" (default: {action.default})"
    if action.required and action.option_strings:
        meaning += " (required)"
    text = meaning.replace(str(pathlib.Path.home()), "~").replace("|", "\\|")
    shown = f"{names}{taken}".replace("|", "\\|")
    yield f"| `{shown}` | {text.strip()} |"


def _machine(action: argparse.Action) -> bool:
    """Whether the default depends on the machine."""
    return action.dest in ("identity", "jobs")


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None and action.option_strings:
        return action.dest.upper()
    return action.dest.upper()
