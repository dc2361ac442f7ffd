"""What is left of objects that nest deeply, before they are parsed."""

import json
import sys

import pytest

from tidegate_operator import watch_session
from tidegate_operator.cluster import object_parts

IDENTITY = {"apiVersion": "v1", "kind": "ServingPool", "metadata": {"name": "deep", "namespace": "n", "uid": "u"}}
MOST = object_parts.MOST_LEVELS


def deep(levels, opening='{"x":', closing="}"):
    """The text of an object with so many levels."""
    inner = opening * (levels - 1) + "0" + closing * (levels - 1)
    return json.dumps({"spec": 0, **IDENTITY}).replace('"spec": 0', f'"spec": {inner}').encode()


@pytest.mark.parametrize("brackets", [('{"x":', "}"), ("[", "]")], ids=["objects", "lists"])
@pytest.mark.parametrize(
    ("levels", "is_whole"), [(2, True), (MOST, True), (MOST + 1, False), (1025, False), (10_000, False)]
)
def test_an_object_of_too_many_levels_is_known_by_its_name(levels, is_whole, brackets):
    body, limit = deep(levels, *brackets), sys.getrecursionlimit()
    found = object_parts.parsed(body)
    assert ("spec" in found) == is_whole
    assert found["kind"] == "ServingPool"
    assert IDENTITY["metadata"].items() <= found["metadata"].items()
    (first, second), listed = object_parts.page(b'{"items": [%b, {"kind": "x"}], "metadata": {"continue": "c"}}' % body)
    assert (first, second, listed.metadata) == (found, {"kind": "x"}, {"continue": "c"})
    event = json.loads(object_parts.event(b'{"type": "ADDED", "object": %b}' % body))
    assert event == {"type": "ADDED", "object": found}
    assert sys.getrecursionlimit() == limit


def test_brackets_in_strings_are_no_levels():
    body = json.dumps({**IDENTITY, "spec": {"note": "[{" * 5000}}).encode()
    assert object_parts.parsed(body) == json.loads(body)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 200, b"[" * 2000, b"null}"])
def test_what_is_no_json_is_a_value_error(body):
    for read in (object_parts.parsed, object_parts.page):
        with pytest.raises(ValueError):  # noqa: PT011  # each parser has its own words
            read(body)


class Stream:
    def __init__(self, *chunks):
        self.chunks = chunks

    async def iter_chunked(self, size):
        for chunk in self.chunks:
            yield chunk


async def test_a_line_of_a_watch_that_cannot_be_read_is_left_out(caplog):
    good, bad = b'{"type": "ADDED", "object": {}}', b'{"type": "ADDED", "object": ' + b"[" * 50_000
    lines = watch_session._Lines(Stream(good + b"\n" + bad[:30_000], bad[30_000:] + b"\n" + good + b"\n"))
    found = b"".join([part async for part in lines.iter_chunked(1024)])
    assert found.split(b"\n") == [good, b"", good, b""]
    assert "cannot be read" in caplog.text
