"""The parts of a form (`multipart/form-data`, RFC 7578): a whole body in, each part by its name out.

Parts are slices of the body, so that a large file is not copied. A form has few parts, each with a short head. The search
for their ends is divided into steps, because a boundary that resembles the content makes it slow.
"""

import re
from dataclasses import dataclass

from tidegate_gateway.loop_steps import LoopSteps
from tidegate_gateway.openai.error_table import BadRequest

MOST_PARTS = 64
HEAD_BYTES = 2048
WINDOW_BYTES = 1024 * 1024
"""What is searched in one step; the slowest boundary takes 7 ms."""
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r'(name|filename)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A field or a file."""

    filename: str | None
    content_type: str
    first: int
    """Where its content begins in the body."""
    end: int

    @property
    def bytes(self) -> int:
        """Of its content."""
        return self.end - self.first


async def parts(body: bytes, content_type: str, steps: LoopSteps) -> dict[str, Part]:
    """The parts of a form by their names. Raises `BadRequest`."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("multipart/form-data needs its boundary in the header content-type")
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if not body.startswith(delimiter):
        raise BadRequest("the form does not begin with its boundary")
    named: dict[str, Part] = {}
    search = _Search(body, b"\r\n" + delimiter, steps)
    at = len(delimiter)
    while not body.startswith(b"--", at):
        first = body.find(b"\r\n\r\n", at, at + HEAD_BYTES) + 4
        end = await search.find(first) if first >= 4 else -1
        if end < 0 or len(named) >= MOST_PARTS:
            raise BadRequest(
                f"the form is cut off, has more than {MOST_PARTS} parts, or a head of more than {HEAD_BYTES} bytes"
            )
        name, part = _part(body[at:first].decode("utf-8", "replace"), first, end)
        if name in named:
            raise BadRequest(f"the form has {name[:64]} twice", param=name[:64])
        named[name] = part
        at = end + 2 + len(delimiter)
    return named


class _Search:
    """Finds the ends of parts, with a step of the event loop after each window."""

    def __init__(self, body: bytes, sought: bytes, steps: LoopSteps) -> None:
        self._body = body
        self._sought = sought
        self._steps = steps
        self._left = WINDOW_BYTES
        """Of the step."""

    async def find(self, first: int) -> int:
        """The next place from `first` on, or -1."""
        while first < len(self._body):
            end = first + self._left
            found = self._body.find(self._sought, first, end + len(self._sought) - 1)
            if found >= 0:
                self._left -= found - first
                return found
            await self._steps.next()
            first, self._left = end, WINDOW_BYTES
        return -1


def _part(head: str, first: int, end: int) -> tuple[str, Part]:
    disposition, content_type = "", ""
    for line in head.strip().split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            disposition = value
        elif header.strip().lower() == "content-type":
            content_type = value.partition(";")[0].strip().lower()
    parameters = dict(_PARAMETER.findall(disposition))
    if not disposition.strip().lower().startswith("form-data") or not parameters.get("name"):
        raise BadRequest('each part of the form needs: Content-Disposition: form-data; name="..."')
    return parameters["name"], Part(
        filename=parameters.get("filename"), content_type=content_type, first=first, end=end
    )
