"""Reads a settings file (YAML; JSON is YAML), and finds the line of the setting that a problem names.

A key that occurs twice in one mapping is an error: YAML would ignore the first of the two.
"""

import pathlib
import re
import stat
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from tidegate_gateway.settings_decoder import BadSettings

MOST_BYTES = 4 << 20
"""Of a file with API keys, public keys or a certificate: 30,000 API keys have as much."""
_ITEM = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """The content of a settings file, and the places of its keys."""

    path: pathlib.Path
    content: dict[str, Any]
    root: yaml.Node

    def located(self, problem: str) -> str:
        """The problem, which starts with the path of a setting, after the name of the file and the line of the setting."""
        node, line, rest = self.root, 1, problem
        while step := _child(node, rest):
            node, line, rest = step
        return f"{self.path}:{line}: {problem}"


def named(path: str, setting: str) -> bytes:
    """The content of the file that a setting names. Raises `BadSettings`."""
    found = pathlib.Path(path)
    try:
        status = found.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be read for ever
            raise BadSettings(f"{setting}: {path} is no file")
        if status.st_size > MOST_BYTES:
            raise BadSettings(f"{setting}: {path} has {status.st_size} bytes; {MOST_BYTES} are read at most")
        return found.read_bytes()
    except OSError as error:
        raise BadSettings(f"{setting}: cannot read {path}: {error.strerror}") from error


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        known = set()
        for key, _ in node.value:
            if key.value in known and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} occurs twice", key.start_mark)
            known.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def read(path: pathlib.Path) -> SettingsFile:
    """The file at `path`. Raises `BadSettings`."""
    try:
        loader = _Loader(path.read_bytes())
    except OSError as error:
        raise BadSettings(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadSettings(f"{path} is not YAML: {error}") from error
    try:
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadSettings(f"{path}:{line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise BadSettings(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise BadSettings(f"{path} has too many levels of mappings and lists") from error
    finally:
        loader.dispose()
    if root is None or content is None:
        raise BadSettings(f"{path} is empty")
    if not isinstance(content, dict):
        raise BadSettings(f"{path}:1: the settings must be a mapping of names to values")
    return SettingsFile(path=path, content=content, root=root)


def _child(node: yaml.Node, rest: str) -> tuple[yaml.Node, int, str] | None:
    """The node below `node` that `rest` names, its line, and what follows its name; None when `rest` names none."""
    if isinstance(node, yaml.MappingNode):
        rest = rest.removeprefix(".")
        for key, value in node.value:
            name = str(key.value)
            if rest.startswith(name) and not rest[len(name) : len(name) + 1].isalnum():
                return value, key.start_mark.line + 1, rest[len(name) :]
    elif isinstance(node, yaml.SequenceNode) and (match := _ITEM.match(rest)):
        for index, item in enumerate(node.value):
            if match[1] == str(index) or match[1] == _name(item):
                return item, item.start_mark.line + 1, rest[match.end() :]
    return None


def _name(node: yaml.Node) -> str | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "name":
                return str(value.value)
    return None
