"""C extensions of the modules of `tidegate_policy` and `tidegate_gateway` that run for each call, made by
`tools/compiled_core/build`.

The build writes this file as the package `tidegate_compiled`, with the extensions beside it. `tidegate_policy` calls `use`
when it is imported, and `tidegate_gateway` imports it first. The extensions are used while the sources of both packages are
those that they were made from; after an edit Python runs the sources, until the next build. TIDEGATE_INTERPRETED=1 chooses
the sources.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

FOLDER = pathlib.Path(__file__).parent
MANIFEST = "manifest.json"


class Extensions(importlib.abc.MetaPathFinder):
    """Finds these modules in their extensions."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, FOLDER / file)


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of a folder with extensions: `digest` of their sources, and `files` by module. None if it has none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest


def digest(packages: Iterable[pathlib.Path]) -> str:
    """Of the sources of the packages and of the kind of extension that this Python loads."""
    found = hashlib.sha256(sysconfig.get_config_var("EXT_SUFFIX").encode())
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(package)}:{len(content)}:".encode() + content)
    return found.hexdigest()


def use(policy: pathlib.Path) -> bool:
    """Lets this process import the extensions, if they are made from the sources of `tidegate_policy`, whose folder this
    is, and of the installed `tidegate_gateway`. Returns whether it does."""
    if os.environ.get("TIDEGATE_INTERPRETED") == "1":
        return False
    manifest = read(FOLDER)
    if manifest is None or manifest["digest"] != digest([policy, *_gateway()]):
        return False
    sys.meta_path.insert(0, Extensions(manifest["files"]))
    return True


def _gateway() -> list[pathlib.Path]:
    """The folder of the gateway's package as this process would import it."""
    found = importlib.util.find_spec("tidegate_gateway")
    return [] if found is None or found.origin is None else [pathlib.Path(found.origin).parent]
