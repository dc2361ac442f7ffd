"""What a download of weights tells: lines of progress, and the reason of its end if it fails.

The last line of the container's log is the progress. Its termination message is `REASON: SENTENCE`; the operator makes the
reason that of a condition, so each sentence says what a person can do.
"""

import enum
import re


class Reason(enum.StrEnum):
    NOT_FOUND = "WeightsNotFound"
    REFUSED = "WeightsRefused"
    DISK_FULL = "WeightsDiskFull"
    DIFFER = "WeightsDiffer"
    """A file is not what its source states."""
    UNREACHABLE = "WeightsUnreachable"
    UNWRITABLE = "WeightsCacheUnwritable"


LASTING = (Reason.NOT_FOUND, Reason.REFUSED, Reason.DISK_FULL, Reason.UNWRITABLE)
"""Reasons that another attempt alone does not end."""


class WeightsError(Exception):
    """The weights could not be downloaded."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {self.args[0]}"


def parse(message: str) -> tuple[Reason, str] | None:
    """Reason and sentence of a termination message; None if the download did not write it."""
    found = re.match(r"(\w+): (.+)", message.strip(), re.DOTALL)
    if found is None or found[1] not in list(Reason):
        return None
    return Reason(found[1]), found[2]


def size(count: float) -> str:
    """Bytes, for persons."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def progress(done: int, total: int, bytes_per_s: float) -> str:
    """One line. `done` may lie above `total` for a moment, while an origin writes a file twice."""
    percent = 100 * min(done, total) // max(total, 1)
    speed = f", {size(bytes_per_s)}/s" if bytes_per_s > 0 else ""
    return f"{percent}% of {size(total)}{speed}"
