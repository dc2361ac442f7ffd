"""One client with a costly form or table does not hold the event loop: its work is bounded, and done in small steps."""

import io
from typing import Any

import aiohttp
import event_loop_turns
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway import gateway_settings, loop_steps
from tidegate_gateway.edge import relquery_http
from tidegate_gateway.openai import error_table, parsed_request, request_fields
from tidegate_gateway.relqueries import relquery_submission, row_tables, row_template

PATH = "/v1/relqueries"


def form(**fields: bytes) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value.decode())
    data.add_field("rows", io.BytesIO(b"x\na\n"), filename="t.csv", content_type="text/csv")
    return data


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({f"f{i}": b"[" + b"[]," * 119_990 + b"1]" for i in range(63)}, "template", "larger than 1048576 bytes"),
        ({f"f{i}": b"[" + b"[]," * 20_000 + b"1]" for i in range(16)}, "f5", "more than 120000 lists"),
    ],
    ids=["bytes", "parts"],
)
async def test_the_fields_of_a_form_have_one_bound_before_any_is_parsed(
    up: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, bytes], param: str, words: str
) -> None:
    parsed: list[int] = []
    decoded = parsed_request.decoded
    monkeypatch.setattr(parsed_request, "decoded", lambda raw: (parsed.append(len(raw)), decoded(raw))[1])
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", PATH, data=form(**fields))
        assert (status, error["error"]["param"]) == (400, param)
        assert words in error["error"]["message"]
        assert not parsed


async def test_the_fields_of_a_form_are_parsed_a_few_at_a_time(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, field = event_loop_turns.Turns(), relquery_http._field

    def counted(name: str, raw: bytes, part: Any) -> Any:
        turns.add(part.end - part.first)
        return field(name, raw, part)

    monkeypatch.setattr(relquery_http, "_field", counted)
    fields = {f"f{i}": b'"' + b"x" * 20_000 + b'"' for i in range(48)}
    async with fake_engine.engine() as engine, up(engine) as client, event_loop_turns.running(turns):
        await client.send("POST", PATH, data=form(**fields))
    assert sum(turns.counts.values()) == 48 * 20_002
    assert max(turns.counts.values()) <= 2 * relquery_http.FIELDS_STEP_BYTES


def collector(steps: loop_steps.LoopSteps | None = None) -> row_tables.RowCollector:
    template, bounds = row_template.parse("{{a}}"), gateway_settings.RelQueries()
    return row_tables.RowCollector(template, bounds, steps or loop_steps.LoopSteps())


async def test_rows_of_a_json_document_are_parsed_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, parse, rows = event_loop_turns.Turns(), row_tables._json, collector()

    def counted(raw: bytes, where: str) -> Any:
        turns.add(len(raw))
        return parse(raw, where)

    monkeypatch.setattr(row_tables, "_json", counted)
    row = b'{"a":"x","unused":"' + b"u" * 30_000 + b'"}'
    raw = b'{"rows":[' + b",".join([row] * 100) + b"]}"
    async with event_loop_turns.running(turns):
        _, items = await row_tables.split_document(raw, 1000, rows.steps)
        await row_tables.read_json_rows(raw, items, rows)
    assert len(rows.rows) == 100
    assert max(turns.counts.values()) <= 2 * row_tables.WHOLE_BYTES


async def test_a_row_of_a_json_document_has_few_parts() -> None:
    rows, row = collector(), b'{"a":"x","unused":[' + b"[]," * 340_000 + b"1]}"
    raw = b'{"rows":[{"a":"y"},' + b",".join([row] * 4) + b"]}"
    _, items = await row_tables.split_document(raw, 1000, rows.steps)
    with pytest.raises(error_table.BadRequest, match="row 1 is too large: it has more than 20000 lists"):
        await row_tables.read_json_rows(raw, items, rows)


@pytest.mark.parametrize(
    "raw",
    [b'{"x":"' + b"a" * 4_000_000 + b'"}', b'{"x":5' + b" " * 4_000_000 + b"}", b'{"rows":null}' + b" " * 4_000_000],
    ids=["text", "blanks", "blanks behind"],
)
async def test_a_document_without_brackets_is_searched_in_windows(raw: bytes) -> None:
    steps = event_loop_turns.CountedSteps()
    await row_tables.split_document(raw, 1000, steps)
    assert steps.taken >= len(raw) // row_tables.WHOLE_BYTES


async def test_blanks_behind_the_name_of_the_rows_are_read_up_to_a_bound() -> None:
    raw = b'{"rows"%s:%s[{"a":"x"}],"x":"' + b"x" * 70_000 + b'"}'
    some, many = b" " * 9000, b" " * 4_000_000
    document, items = await row_tables.split_document(raw % (some, some), 1000, loop_steps.LoopSteps())
    assert (list(document), len(items)) == (["x"], 1)
    for blanks in ((many, b""), (b"", many)):
        with pytest.raises(error_table.BadRequest, match="rows must be a list"):
            await row_tables.split_document(raw % blanks, 1000, loop_steps.LoopSteps())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@given(raw=st.lists(st.sampled_from([b"\\", b'"', b"a", b"[", b"}"]), max_size=30).map(b"".join))
def test_windows_have_the_tokens_of_the_whole_document(size: int, raw: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_tables, "WHOLE_BYTES", size)
        found = [token.span() for token in row_tables._tokens(raw) if token is not None]
    assert found == [token.span() for token in row_tables._TOKEN.finditer(raw)]


@pytest.mark.parametrize(
    ("row", "least"),
    [
        (dict.fromkeys(("a", *map(str, range(899))), ""), 256 * 900 // row_tables.SLICE_VALUES - 4),
        ({"a": "", "unused": "u" * 30_000}, 256 * 30_000 // row_tables.WHOLE_BYTES // 2),
    ],
    ids=["values", "characters"],
)
async def test_a_step_reads_few_values_and_characters_of_rows_in_a_message(row: dict[str, str], least: int) -> None:
    steps = event_loop_turns.CountedSteps()
    rows = collector(steps)
    await row_tables.read_rows([row] * 256, rows)
    assert len(rows.rows) == 256
    assert steps.taken >= least


async def test_a_row_in_a_message_has_as_many_values_as_csv_has_columns() -> None:
    row = dict.fromkeys(("a", *map(str, range(row_tables.MOST_COLUMNS - 1))), "")
    rows = collector()
    await row_tables.read_rows([row], rows)
    with pytest.raises(error_table.BadRequest, match="row 1 has 1025 values, and at most 1024 are allowed"):
        await row_tables.read_rows([row | {"b": ""}], rows)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each JSON that is written."""
    found, dumps = list[int](), orjson.dumps

    def counted(value: Any) -> bytes:
        raw = dumps(value)
        found.append(len(raw))
        return raw

    monkeypatch.setattr(orjson, "dumps", counted)
    return found


def test_a_row_that_is_too_large_is_not_written_as_json(written: list[int]) -> None:
    with pytest.raises(error_table.BadRequest, match="row 0 is larger than 65536 bytes"):
        collector().add({"a": "\x01" * 1_000_000})
    assert not written


@pytest.mark.parametrize(
    "template",
    [
        [{"role": "user", "content": "{{a}}" + "\x01" * 200_000}] * 10,
        [{"role": "\x01" * 2_000_000, "content": "{{a}}"}],
    ],
    ids=["contents", "a role"],
)
def test_a_template_that_is_too_large_is_not_written_as_json(written: list[int], template: Any) -> None:
    with pytest.raises(error_table.BadRequest, match="larger than 1048576 bytes"):
        relquery_submission.spec({"model": "m", "template": template}, request_fields.RequestFields())
    assert not written
