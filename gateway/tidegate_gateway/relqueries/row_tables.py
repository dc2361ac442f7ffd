"""Rows from JSON, JSON lines and CSV, read in slices so that a large table never holds the event loop.

Every reader gives rows to a `RowCollector`, which checks each row against the template and the bounds, and stops at
the first wrong row. A row is counted from 0, as in its result. An error names the row, and for files its line.
"""

import codecs
import collections
import csv
import re
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Literal

import orjson

from tidegate_gateway import gateway_settings
from tidegate_gateway.loop_steps import LoopSteps
from tidegate_gateway.openai import bounded_json, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_gateway.relqueries import row_template

Format = Literal["csv", "jsonl"]

SLICE_BYTES = 16 * 1024
"""Bytes of a table that are read in one step, if they have few rows; some milliseconds."""
SLICE_ROWS, SLICE_TOKENS, SLICE_VALUES = 256, 8192, 8192
WHOLE_BYTES = 64 * 1024
"""A JSON document up to this size is read at once. Of a larger one, this much is searched, and parsed as rows, in one
step."""
MOST_TOKENS = 3_000_000
"""Brackets, quotes and escapes of a JSON document with rows."""
MOST_RAW_BYTES = 1024 * 1024
"""A row of a JSON document with the values that the template does not use."""
MOST_ROW_PARTS = 20_000
"""Lists, objects and fields of a row above 64 KiB, as many as a smaller one may have."""
MOST_COLUMNS = 1024
"""Columns of a table in CSV, and values of a row in a message of gRPC."""
_TOKEN = re.compile(rb'\\.|["{}\[\]]', re.DOTALL)
_ROWS = re.compile(rb"\s{0,9999}+:\s{0,9999}+\[")
_QUOTE = ord('"')
csv.field_size_limit(sys.maxsize)  # a record is bounded before it is read


class RowCollector:
    """The checked rows of one relQuery."""

    def __init__(self, template: row_template.Template, bounds: gateway_settings.RelQueries, steps: LoopSteps) -> None:
        self.rows: list[bytes] = []
        self.bytes = 0
        self.steps = steps
        self._template = template
        self._bounds = bounds
        self._blank = 0

    def add(self, row: object, line: int | None = None) -> None:
        """The next row. Raises `BadRequest`."""
        where = self.where(line)
        if len(self.rows) >= self._bounds.rows:
            raise too_many_rows(self._bounds.rows)
        if not isinstance(row, dict):
            raise BadRequest(f"{where} must be an object with a value for each column", param="rows")
        texts = self._template.texts(row, where)
        if sum(map(len, texts)) > self._bounds.row_bytes:
            raise row_too_large(where, self._bounds.row_bytes)  # their JSON, up to six times as long, is not written
        values = row_template.packed(texts)
        if len(values) > self._bounds.row_bytes:
            raise row_too_large(where, self._bounds.row_bytes)
        self.bytes += len(values)
        self.rows.append(values)

    def blank(self) -> None:
        """An empty line. They cost as much as rows, so there may be as many. Raises `BadRequest`."""
        self._blank += 1
        if self._blank > self._bounds.rows:
            raise BadRequest(f"the table has more than {self._bounds.rows} empty lines", param="rows")

    def where(self, line: int | None = None) -> str:
        """The name of the next row in errors."""
        return f"row {len(self.rows)}" + ("" if line is None else f" (line {line})")

    def whole(self) -> None:
        """All rows are here. Raises `BadRequest`."""
        if not self.rows:
            raise BadRequest("rows must have at least one row", param="rows")


async def read(
    table: AsyncIterator[bytes], kind: Format, rows: RowCollector, bounds: gateway_settings.RelQueries
) -> None:
    """Reads a file of rows. Raises `BadRequest`."""
    await (_read_csv if kind == "csv" else _read_json_lines)(table, rows, bounds)


async def slices(table: bytes, first: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
    """A table that is here, piece by piece."""
    end = len(table) if end is None else end
    for start in range(first, end, SLICE_BYTES):
        yield table[start : min(start + SLICE_BYTES, end)]


async def split_document(
    raw: bytes, most_rows: int, steps: LoopSteps
) -> tuple[dict[str, Any], list[Any] | list[slice]]:
    """A JSON object and the items of its list `rows`: as values from a small document, else as slices of the document.
    Raises `BadRequest`."""
    if len(raw) <= WHOLE_BYTES:
        document = parsed_request.decoded(raw or b"{}")
        if not isinstance(document, dict):
            raise BadRequest("the body must be a JSON object")
        rows = document.pop("rows", None)
        if rows is not None and not isinstance(rows, list):
            raise BadRequest("rows must be a list of objects", param="rows")
        if rows and len(rows) > most_rows:
            raise too_many_rows(most_rows)
        return document, rows or []
    found = await _row_slices(raw, most_rows, steps)
    if found is None:
        return _rest(raw), []
    begin, end, spans = found
    document = _rest(raw[:begin] + raw[end:])
    if document.pop("rows", None) != []:
        raise BadRequest("rows comes twice", param="rows")
    return document, spans


def _rest(raw: bytes) -> dict[str, Any]:
    """The JSON object without its rows. Raises `BadRequest`."""
    document = parsed_request.decoded(raw)
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object")
    if document.get("rows") not in (None, []):
        raise BadRequest("rows must be a list of objects", param="rows")
    return document


async def read_rows(items: Iterable[Mapping[str, str]], rows: RowCollector) -> None:
    """Gives rows that are here to the collector. Raises `BadRequest`."""
    step_rows = step_values = step_characters = 0
    for item in items:
        if len(item) > MOST_COLUMNS:
            raise BadRequest(
                f"{rows.where()} has {len(item)} values, and at most {MOST_COLUMNS} are allowed", param="rows"
            )
        row = dict(item)
        rows.add(row)
        step_rows += 1
        step_values += len(row)
        step_characters += sum(map(len, row.values()))
        if step_rows >= SLICE_ROWS or step_values >= SLICE_VALUES or step_characters >= WHOLE_BYTES:
            step_rows = step_values = step_characters = 0
            await rows.steps.next()


async def read_json_rows(raw: bytes, items: list[Any] | list[slice], rows: RowCollector) -> None:
    """Gives the items of `split_document` to the collector. Raises `BadRequest`."""
    step_bytes = step_rows = 0
    for item in items:
        size = item.stop - item.start if isinstance(item, slice) else 0
        if step_rows and (step_rows >= SLICE_ROWS or step_bytes + size > WHOLE_BYTES):
            step_bytes = step_rows = 0
            await rows.steps.next()
        step_bytes += size
        step_rows += 1
        rows.add(_json(raw[item], rows.where()) if isinstance(item, slice) else item)


async def _row_slices(raw: bytes, most: int, steps: LoopSteps) -> tuple[int, int, list[slice]] | None:
    """Where the list `rows` begins and ends, and each of its objects; None if there is none. The objects themselves are
    checked when they are parsed, so this looks at brackets and quotes only."""
    depth = tokens = quote_at = rows_at = last_end = begin = 0
    text = False
    spans: list[slice] = []
    for token in _tokens(raw):
        if token is None:
            await steps.next()
            continue
        tokens += 1
        if tokens % SLICE_TOKENS == 0:
            if tokens > MOST_TOKENS:
                raise BadRequest("rows has too many values; send JSON lines or CSV, with fewer columns", param="rows")
            await steps.next()
        at = token.start()
        byte = raw[at]
        if depth > 2 and begin and at - rows_at > MOST_RAW_BYTES:
            raise row_too_large(f"row {len(spans)}", MOST_RAW_BYTES)
        if text:
            if byte == _QUOTE:
                text = False
                if depth == 1 and not begin and at - quote_at == 5 and raw[quote_at:at] == b'"rows':
                    match = _ROWS.match(raw, at + 1)
                    begin = last_end = match.end() if match else 0
            continue
        if byte == _QUOTE:
            text, quote_at = True, at
        elif byte in b"{[":
            depth += 1
            if begin and depth == 3:
                rows_at = at
                if raw[last_end:at].strip() != (b"," if spans else b"") or byte != ord("{"):
                    raise _not_objects(len(spans))
        else:
            depth -= 1
            if begin and depth == 2:
                if len(spans) >= most:
                    raise too_many_rows(most)
                spans.append(slice(rows_at, at + 1))
                last_end = at + 1
            elif begin and depth == 1:
                if raw[last_end:at].strip():
                    raise _not_objects(len(spans))
                return begin, at, spans
    if begin:
        raise BadRequest("the body is not JSON that the gateway takes: the list rows does not end", param="rows")
    return None


def _tokens(raw: bytes) -> Iterator[re.Match[bytes] | None]:
    """The tokens of a document, and None after each window of `WHOLE_BYTES`, however few tokens it has."""
    at = 0
    while at < len(raw):
        end = at + WHOLE_BYTES
        token: re.Match[bytes] | None = None
        for token in _TOKEN.finditer(raw, at, end + 1):
            yield token
        yield None
        at = end if token is None else max(end, token.end())  # an escape may lie across the end of a window


async def _lines(table: AsyncIterator[bytes], most_bytes: int, rows: RowCollector) -> AsyncIterator[bytes]:
    """Lines with their ends, without the byte order mark of the table."""
    rest, mark = b"", codecs.BOM_UTF8
    async for piece in table:
        *lines, rest = (rest + piece).split(b"\n")
        for i, line in enumerate(lines):
            yield line.removeprefix(mark) + b"\n"
            mark = b""
            if i % SLICE_ROWS == SLICE_ROWS - 1:
                await rows.steps.next()
        if len(rest) > most_bytes:
            raise row_too_large(rows.where(), most_bytes)
        await rows.steps.next()
    rest = rest.removeprefix(mark)
    if rest:
        yield rest


async def _read_json_lines(
    table: AsyncIterator[bytes], rows: RowCollector, bounds: gateway_settings.RelQueries
) -> None:
    number = 0
    async for line in _lines(table, bounds.row_bytes, rows):
        number += 1
        if len(line) > bounds.row_bytes:
            raise row_too_large(rows.where(number), bounds.row_bytes)
        if line.isspace():
            rows.blank()
        else:
            rows.add(_json(line, rows.where(number)), number)


async def _read_csv(table: AsyncIterator[bytes], rows: RowCollector, bounds: gateway_settings.RelQueries) -> None:
    """CSV as RFC 4180 has it: commas, quotes that are doubled in quoted fields, and a first line with the columns."""
    columns: list[str] | None = None
    record: list[bytes] = []
    size = quotes = number = 0
    async for line in _lines(table, bounds.row_bytes, rows):
        number += 1
        record.append(line)
        size += len(line)
        quotes += line.count(b'"')
        if size > bounds.row_bytes:
            raise row_too_large(rows.where(number), bounds.row_bytes)
        if quotes % 2:
            continue  # the record goes on in the next line
        whole = b"".join(record)
        record.clear()
        size = quotes = 0
        if whole.isspace():
            rows.blank()
            continue
        fields = _csv_fields(whole, rows.where(number))
        if columns is None:
            columns = _header(fields)
        elif len(fields) != len(columns):
            raise BadRequest(_other_width(rows.where(number), fields, columns), param="rows")
        else:
            rows.add(dict(zip(columns, fields, strict=True)), number)
    if record:
        raise BadRequest(f"{rows.where(number)} has a quote that does not end", param="rows")


def _other_width(where: str, fields: list[str], columns: list[str]) -> str:
    """The problem of a line of CSV with more or fewer fields than columns."""
    has = f"{len(fields)} field{'s' * (len(fields) != 1)}"
    names = f"{len(columns)} column{'s' * (len(columns) != 1)}"
    found = f"{where} has {has}, and the first line names {names}"
    for sign, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and sign in columns[0]:
            return f"{found}; CSV has commas between its fields, and the first line has {called}"
    return found


def _csv_fields(record: bytes, where: str) -> list[str]:
    try:
        (fields,) = csv.reader([record.decode().rstrip("\r\n")], strict=True)
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise BadRequest(f"{where} is not CSV in UTF-8: {error}"[:300], param="rows") from error
    return fields


def _header(fields: list[str]) -> list[str]:
    columns = [field.strip() for field in fields]
    if len(columns) > MOST_COLUMNS:
        raise BadRequest(f"a table has at most {MOST_COLUMNS} columns", param="rows")
    if len(set(columns)) < len(columns):
        twice = collections.Counter(columns).most_common(1)[0][0]
        raise BadRequest(f"the first line names the column {twice[:64]!r} twice", param="rows")
    return columns


def _json(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        return bounded_json.loads(raw, most_parts=MOST_ROW_PARTS)  # type: ignore[no-any-return]
    except bounded_json.TooManyParts as error:
        raise BadRequest(f"{where} is too large: {error}", param="rows") from error
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{where} is not JSON: {error}"[:300], param="rows") from error


def _not_objects(number: int) -> BadRequest:
    return BadRequest(f"row {number} must be an object with a value for each column", param="rows")


def too_many_rows(most: int) -> BadRequest:
    return BadRequest(f"row {most} is one too many: a relQuery has at most {most} rows; send several", param="rows")


def row_too_large(where: str, most: int) -> BadRequest:
    return BadRequest(f"{where} is larger than {most} bytes", param="rows", code="body_too_large")
