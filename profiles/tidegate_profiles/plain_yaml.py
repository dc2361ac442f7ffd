"""YAML of plain values, from anybody: neither its depth nor its form can end the process or make it slow."""

from typing import Any

import yaml

DEEPEST = 8
"""Levels of mappings and lists."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where PyYAML has it: a tenth of the time. It nests in C too, so the depth is checked before."""


class NotPlain(ValueError):
    """The text has what no plain document needs. The message goes on after the name of the document."""


def load(text: str | bytes) -> Any:
    """The document. Raises `NotPlain` for values that stand for others, tags and deep nesting, and for what is no YAML."""
    depth = 0
    try:
        for event in yaml.parse(text, _LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise NotPlain("refers to a value by *; write the value")
            if (tag := getattr(event, "tag", None)) is not None:
                raise NotPlain(f"has the tag {tag[:40]}; write plain values")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise NotPlain(f"has more than {DEEPEST} levels")
        return yaml.load(text, _LOADER)  # one of the two safe loaders
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # the last two from numbers and dates that are none
        if isinstance(error, NotPlain):
            raise
        raise NotPlain("is not YAML") from error
