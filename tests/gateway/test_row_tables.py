"""Rows from JSON, JSON lines and CSV: every wrong row is a clear error, and no table holds the event loop."""

import asyncio
import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_gateway import gateway_settings, loop_steps
from tidegate_gateway.openai import error_table
from tidegate_gateway.relqueries import row_tables, row_template

BOUNDS = gateway_settings.RelQueries()


def collector(template: str = "{{a}}", **bounds: Any) -> row_tables.RowCollector:
    return row_tables.RowCollector(
        row_template.parse(template), gateway_settings.RelQueries(**bounds), loop_steps.LoopSteps()
    )


def read(kind: row_tables.Format, table: bytes, template: str = "{{a}}", **bounds: Any) -> list[Any]:
    rows = collector(template, **bounds)
    asyncio.run(row_tables.read(row_tables.slices(table), kind, rows, gateway_settings.RelQueries(**bounds)))
    return [orjson.loads(row) for row in rows.rows]


def read_json(raw: bytes, template: str = "{{a}}", **bounds: Any) -> list[Any]:
    async def whole() -> list[Any]:
        rows = collector(template, **bounds)
        _, items = await row_tables.split_document(
            raw, gateway_settings.RelQueries(**bounds).rows, loop_steps.LoopSteps()
        )
        await row_tables.read_json_rows(raw, items, rows)
        return [orjson.loads(row) for row in rows.rows]

    return asyncio.run(whole())


def test_csv_has_quotes_newlines_and_a_byte_order_mark() -> None:
    table = '\ufeffa,b\r\n1,"x, ""y""\r\nz"\r\n\r\n2,é\n'.encode()
    assert read("csv", table, "{{a}} {{b}}") == [["1", 'x, "y"\r\nz'], ["2", "é"]]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("kind", "table", "found"),
    [
        ("jsonl", '\ufeff{"a": 1}\n{"a": 2}', [["1"], ["2"]]),
        ("jsonl", '\ufeff{"a": 1}', [["1"]]),
        ("csv", '\ufeff"a","b\nc"\n1,2\n', [["1"]]),
        ("csv", "\ufeff\na\n\ufeff1\n", [["\ufeff1"]]),
        ("jsonl", "\ufeff", []),
    ],
)
def test_a_byte_order_mark_is_left_out_at_the_beginning_alone(
    kind: row_tables.Format, table: str, found: list[Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tables, "SLICE_BYTES", size)
    assert read(kind, table.encode()) == found


def test_a_csv_field_may_be_as_long_as_a_row() -> None:
    field = "x" * 200_000
    assert read("csv", f'a\n"{field}"\n'.encode(), row_bytes=300_000) == [[field]]


def test_json_lines_have_scalars_of_all_kinds() -> None:
    table = b'{"a": "x", "c": [1]}\n\n{"a": 1.5}\r\n{"a": null}\n{"a": true}'
    assert read("jsonl", table) == [["x"], ["1.5"], [""], ["true"]]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_has_a_bounded_number_of_empty_lines(kind: row_tables.Format) -> None:
    with pytest.raises(error_table.BadRequest, match="more than 50 empty lines"):
        read(kind, b"a\n" * (kind == "csv") + b"\n" * 51, rows=50)


@settings(max_examples=40)
@given(
    table=st.lists(st.dictionaries(st.sampled_from("ab"), st.text(max_size=8), min_size=2), min_size=1, max_size=30),
    padding=st.sampled_from([0, 70_000]),
    first=st.booleans(),
)
def test_a_large_json_document_has_the_rows_of_a_small_one(table: Any, padding: int, first: bool) -> None:
    more = {"model": "x" * padding, "n": [{"rows": ["]"]}], "t": 'a "rows": [ b'}
    document = {"rows": table, **more} if first else {**more, "rows": table}
    raw = orjson.dumps(document)
    assert read_json(raw, "{{a}} {{b}}") == [[row["a"], row["b"]] for row in table]


@given(raw=st.binary(max_size=200), kind=st.sampled_from(["csv", "jsonl"]))
def test_any_bytes_are_rows_or_a_bad_request(raw: bytes, kind: row_tables.Format) -> None:
    with contextlib.suppress(error_table.BadRequest):
        read(kind, raw)
    with contextlib.suppress(error_table.BadRequest):
        read_json(b'{"model": "' + b"x" * 70_000 + b'", "rows": [' + raw + b"]}")


@pytest.mark.parametrize(
    ("kind", "table", "words"),
    [
        ("csv", b"a,b\n1,2\n3\n", "row 1 (line 3) has 1 field, and"),
        ("csv", b"a;b\n1;2,5\n", "CSV has commas between its fields, and the first line has semicolons"),
        ("csv", b"a\n1\n\xff\n", "row 1 (line 3) is not CSV in UTF-8"),
        ("csv", b'a\n"1\n2\n', "quote that does not end"),
        ("csv", b'a\n"1"x"\n"', "row 0"),
        ("csv", b"a,a\n1,2\n", "'a' twice"),
        ("csv", b"b\n1\n", "row 0 (line 2) has no column 'a'"),
        ("csv", b"a\n" + b"x" * 70_000, "row 0 is larger"),
        ("csv", b'a\n"' + b"x\n" * 70_000, "is larger than 65536"),
        ("jsonl", b'{"a":1}\n{"a":\n', "row 1 (line 2) is not JSON"),
        ("jsonl", b'{"a":1}\n[1]\n', "row 1 (line 2) must be an object"),
        ("jsonl", b'{"a":1}\n\n{"a":{"b":1}}\n', "row 1 (line 3): column 'a' must be text"),
        (
            "jsonl",
            b'{"a":1}\n{"b":1}\n',
            "row 1 (line 2) has no column 'a', which the template names; its columns are b",
        ),
        ("jsonl", b'{"a":"' + b"x" * 70_000 + b'"}', "row 0"),
        ("jsonl", b"[" * 60_000, "row 0 (line 1) is not JSON"),
        ("jsonl", b'{"a":1}\n' * 1_000_000, "row 100000 is one too many"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_wrong_row_of_a_file_is_named(kind: row_tables.Format, table: bytes, words: str) -> None:
    with pytest.raises(error_table.BadRequest) as caught:
        read(kind, table)
    assert words in caught.value.message
    assert caught.value.param == "rows" or "no column" in words


FILL = b'{"model": "' + b"x" * 70_000 + b'", '


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'"rows": [{"a": 1}, 5]}', "row 1 must be an object"),
        (b'"rows": [{"a": 1} {"a": 2}]}', "row 1 must be an object"),
        (b'"rows": [[]]}', "row 0 must be an object"),
        (b'"rows": [{"a": 1}, {"a": }]}', "row 1 is not JSON"),
        (b'"rows": [{"a": 1}', "does not end"),
        (b'"rows": [{"a": 1}], "rows": [{"a": 2}]}', "rows"),
        (b'"rows": 5}', "rows must be a list"),
        (b'"r\\u006fws": [{"a": 1}]}', "rows must be a list"),
        (b'"rows": [' + b'{"a":1},' * 1_000_000, "row 100000 is one too many"),
        (b'"rows": [' + b"[" * 1_000_000, "row 0 must be an object"),
        (b'"rows": [{"a": ' + b"[" * 4_000_000, "row 0 is larger than 1048576 bytes"),
        (b'"rows": [{"a": "' + b"\\" * 7_000_000, "row 0 is larger"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_wrong_row_of_a_large_document_is_named(raw: bytes, words: str) -> None:
    with pytest.raises(error_table.BadRequest) as caught:
        read_json(FILL + raw)
    assert words in caught.value.message


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
async def test_other_work_has_its_turns_while_a_large_table_is_read(kind: Any) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    rows = collector("{{a}} {{b}}")
    lines = [b'{"a":"value %d","b":%d,"c":"unused"}' % (i, i) for i in range(100_000)]
    if kind == "json":
        raw = b'{"template": "t", "rows": [' + b",".join(lines) + b"]}"
        _, items = await row_tables.split_document(raw, 100_000, rows.steps)
        await row_tables.read_json_rows(raw, items, rows)
    else:
        table = b"\n".join(lines) if kind == "jsonl" else b"a,b\n" + b"".join(b"%d,x\n" % i for i in range(100_000))
        await row_tables.read(row_tables.slices(table), kind, rows, BOUNDS)
    counting.cancel()
    assert len(rows.rows) == 100_000
    assert turns >= len(table if kind != "json" else raw) // row_tables.SLICE_BYTES


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
async def test_tables_that_are_read_together_take_no_longer_turns(kind: Any) -> None:
    steps, most, known = loop_steps.LoopSteps(), 0, 0
    collectors = [row_tables.RowCollector(row_template.parse("{{a}}"), BOUNDS, steps) for _ in range(8)]
    csv, lines = b"a\n" + b"1\n" * 5000, b'{"a":1}\n' * 5000

    async def read(rows: row_tables.RowCollector) -> None:
        if kind == "json":
            await row_tables.read_rows([{"a": "1"}] * 5000, rows)
        else:
            await row_tables.read(row_tables.slices(csv if kind == "csv" else lines), kind, rows, BOUNDS)

    async def watch() -> None:
        nonlocal most, known
        while True:
            now = sum(len(rows.rows) for rows in collectors)
            most, known = max(most, now - known), now
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    reading = [asyncio.create_task(read(rows)) for rows in collectors[1:]]
    await read(collectors[0])
    await asyncio.gather(*reading)
    watching.cancel()
    assert sum(len(rows.rows) for rows in collectors) == 8 * 5000
    assert most <= len(collectors) * row_tables.SLICE_ROWS, "the first steps of all readers, then one at a time"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (5, "template must be text"),
        ("no column", "at least one column"),
        ("{{a", "{{ without a column"),
        ("{{}}", "1 to 128 characters"),
        ("{{" + " " * 300_000 + "}}", "at most 262144 characters"),
        ("{{" * 100_000, "{{ without a column"),
        ("{{a}}" * 2000, "at most 1024 placeholders"),
        ([{"role": "user"}], "template[0].content must be text"),
        ([{"content": "{{a}}"}], "template[0] must be a message"),
        ([], "a list of 1 to 256 messages"),
    ],
)
def test_a_wrong_template_is_an_error(template: Any, words: str) -> None:
    with pytest.raises(error_table.BadRequest) as caught:
        row_template.parse(template)
    assert words in caught.value.message


def test_braces_of_json_are_text_in_a_template() -> None:
    template = row_template.parse('Answer as {"a": {"b": 1}} for {{ a }} and {{a}}.')
    assert template.prompt(["x"]) == 'Answer as {"a": {"b": 1}} for x and x.'
    values = template.texts({"a": "{{b}} {{a}}"}, "row 0")
    assert template.prompt(values).endswith("for {{b}} {{a}} and {{b}} {{a}}.")
