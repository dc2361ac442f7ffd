"""What the picker writes by hand is what the protobuf library reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway.edge import ext_proc_messages
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_proto.envoy import ext_proc_pb2

names = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=300)
values = st.dictionaries(names, st.text(max_size=300), max_size=4)
bodies = st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(bytes))


def read(raw: bytes) -> ext_proc_pb2.ProcessingResponse:
    return ext_proc_pb2.ProcessingResponse.FromString(raw)


def check(changed: ext_proc_pb2.HeaderMutation, given_values: dict[str, str], removed: list[str]) -> None:
    found = {option.header.key: option.header.raw_value for option in changed.set_headers}
    assert found == {name: value.encode("utf-8", "replace") for name, value in given_values.items()}
    assert all(option.append_action == ext_proc_pb2.OVERWRITE_IF_EXISTS_OR_ADD for option in changed.set_headers)
    assert list(changed.remove_headers) == removed


@given(headers=values, removed=st.lists(names, max_size=4), body=bodies)
def test_choices(headers: dict[str, str], removed: list[str], body: bytes) -> None:
    changed = ext_proc_messages.changes(headers, removed)
    buffered = read(ext_proc_messages.buffered_choice("10.0.0.1:8000", changed, body))
    check(buffered.request_body.response.header_mutation, headers, removed)
    assert buffered.request_body.response.body_mutation.body == body
    first, *parts = map(read, ext_proc_messages.streamed_choice("10.0.0.1:8000", changed, body, trailers=False))
    check(first.request_headers.response.header_mutation, headers, removed)
    streamed = [part.request_body.response.body_mutation.streamed_response for part in parts]
    assert b"".join(part.body for part in streamed) == body
    assert [part.end_of_stream for part in streamed] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.body) <= 64 * 1024 for part in streamed)
    for response in (buffered, first):
        assert response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:8000"


@given(headers=values, body=bodies, last=st.booleans())
def test_answers(headers: dict[str, str], body: bytes, last: bool) -> None:
    check(read(ext_proc_messages.answer_head(headers)).response_headers.response.header_mutation, headers, [])
    shed = read(ext_proc_messages.immediate(429, headers, body, "tidegate_saturated")).immediate_response
    check(shed.headers, headers, [])
    assert (shed.status.code, shed.body, shed.details) == (429, body, "tidegate_saturated")
    part = ext_proc_pb2.HttpBody(body=body, end_of_stream=last)
    same = read(ext_proc_messages.same_answer_part(part, streamed=True)).response_body.response.body_mutation
    assert (same.streamed_response.body, same.streamed_response.end_of_stream) == (body, last)
    kept = read(ext_proc_messages.same_answer_part(part, streamed=False)).response_body
    assert not kept.response.HasField("body_mutation")


def test_a_subset_comes_as_a_list_or_as_a_text() -> None:
    request = ext_proc_pb2.ProcessingRequest()
    assert ext_proc_messages.subset(request) is None
    hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    for value in (["10.0.0.1:1", "10.0.0.2:2"], "10.0.0.1:1, 10.0.0.2:2"):
        hint["x-gateway-destination-endpoint-subset"] = value
        assert ext_proc_messages.subset(request) == ["10.0.0.1:1", "10.0.0.2:2"]
    hint["x-gateway-destination-endpoint-subset"] = ""
    assert ext_proc_messages.subset(request) == []


def test_a_subset_that_is_a_long_text_is_a_bad_request() -> None:
    request = ext_proc_pb2.ProcessingRequest()
    hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint["x-gateway-destination-endpoint-subset"] = "10.0.0.1:1," * 10_000
    with pytest.raises(BadRequest, match="more than 65536 characters"):
        ext_proc_messages.subset(request)
