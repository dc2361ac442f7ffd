"""Text for a terminal: names from clients and engines cannot move the cursor, and lines fit the width."""

import math
import re
from collections.abc import Sequence

STYLES = {"bold": "1", "dim": "2", "good": "32", "fair": "33", "bad": "31", "main": "36"}
_STYLED = re.compile(r"\x1b\[[0-9;]*m")
_BLOCKS = " ▁▂▃▄▅▆▇█"


def plain(value: object) -> str:
    """A value as one printable word or sentence; control characters become `?`."""
    return "".join(character if character.isprintable() else "?" for character in str(value))


def number(value: float | None) -> str:
    """A number in the length that can be read; `-` for none."""
    if value is None:
        return "-"
    if math.isclose(value, round(value)) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{number(math.floor(1000 * share) / 10)}%"


def sparkline(values: Sequence[float]) -> str:
    """One column for each value; the highest value fills its column."""
    most = max(values, default=0) or 1
    return "".join(_BLOCKS[math.ceil(value / most * (len(_BLOCKS) - 1))] for value in values)


def bar(share: float | None, width: int) -> str:
    """A share of a whole as a bar."""
    full = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return "█" * full + "·" * (width - full)


class Painter:
    """Writes styles if the terminal shows them."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colours and style else text


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; a head that begins with # is over numbers. Cells may have styles."""
    names = [head.removeprefix("#") for head in heads]
    widths = [max(map(length, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            " " * (width - length(cell)) + cell if head.startswith("#") else cell + " " * (width - length(cell))
            for head, cell, width in zip(heads, row, widths, strict=True)
        ).rstrip()
        for row in (names, *rows)
    ]


def length(text: str) -> int:
    """Columns of a text on the terminal, without its styles."""
    return len(_STYLED.sub("", text))


def cut(text: str, width: int) -> str:
    """The text without what does not fit into the width."""
    if length(text) <= width:
        return text
    kept, left = [], width - 1
    for part in re.split(r"(\x1b\[[0-9;]*m)", text):
        if _STYLED.fullmatch(part):
            kept.append(part)
        else:
            kept.append(part[: max(left, 0)])
            left -= len(part)
    return "".join(kept) + "…"
