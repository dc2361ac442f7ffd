"""The parts of a form (`multipart/form-data`, RFC 7578): a whole body in, each part by its name out.

Parts are slices of the body, so that a large file is not copied. A form has few parts, each with a short head.
"""

import re
from dataclasses import dataclass

from tidegate_gateway.openai.error_table import BadRequest

MOST_PARTS = 64
HEAD_BYTES = 2048
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


def parts(body: bytes, content_type: str) -> dict[str, Part]:
    """The parts of a form by their names. Raises `BadRequest`."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("multipart/form-data needs its boundary in the header content-type")
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if not body.startswith(delimiter):
        raise BadRequest("the form does not begin with its boundary")
    named: dict[str, Part] = {}
    at = len(delimiter)
    while not body.startswith(b"--", at):
        first = body.find(b"\r\n\r\n", at, at + HEAD_BYTES) + 4
        end = body.find(b"\r\n" + delimiter, first)
        if first < 4 or end < 0 or len(named) >= MOST_PARTS:
            raise BadRequest(
                f"the form is cut off, has more than {MOST_PARTS} parts, or a head of more than {HEAD_BYTES} bytes"
            )
        name, part = _part(body[at:first].decode("utf-8", "replace"), first, end)
        if name in named:
            raise BadRequest(f"the form has {name[:64]} twice", param=name[:64])
        named[name] = part
        at = end + 2 + len(delimiter)
    return named


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
