"""What does a download need of the place that weights come from? `hub_origin` and `bucket_origin` implement it."""

import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate_operator.weights import weight_report

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    path: str
    """Below the folder of the model, with slashes."""
    size: int
    sha256: str | None = None
    git_sha1: str | None = None
    """The hash by which Git names the file."""

    def difference(self, file: pathlib.Path) -> str | None:
        """What a local copy has otherwise than its source states; None if nothing."""
        size = file.stat().st_size
        if size != self.size:
            return f"has {size} bytes, and its source states {self.size}"
        stated = self.sha256 or self.git_sha1
        if stated is None:
            return None
        name = "sha256" if self.sha256 else "Git hash"
        found = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                found.update(chunk)
        return (
            None
            if found.hexdigest() == stated
            else f"has the {name} {found.hexdigest()}, and its source states {stated}"
        )


class Origin(Protocol):
    """The methods raise WeightsError, or OSError for the local disk."""

    def files(self) -> Sequence[RemoteFile]:
        """The files that an engine needs."""

    def fetch(self, file: RemoteFile, folder: pathlib.Path) -> None:
        """Writes the file below `folder`. Called from several threads. An earlier attempt may have left a part of it."""


def needed(paths: Iterable[str]) -> set[str]:
    """The files that an engine reads: not the same weights in a second format, as repositories often have them. Raises
    WeightsError for a path that could lead out of the model's folder."""
    every = set(paths)
    for path in sorted(every):
        if not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise weight_report.WeightsError(
                weight_report.Reason.DIFFER,
                f"the source names a file {path!r}, which is no path below the model's folder: rename the file there",
            )
    formats = (".safetensors", ".bin", ".pt", ".gguf")
    weights = {ending: {path for path in every if path.endswith(ending)} for ending in formats}
    chosen = next((ending for ending in formats if weights[ending]), None)
    others = (
        *(ending for ending in formats if ending != chosen),
        ".pth",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".ot",
    )
    return {
        path
        for path in every
        if not path.endswith(others) and not path.startswith((".", "original/", "onnx/", "coreml/", "openvino/"))
    }
