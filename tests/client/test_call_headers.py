"""The headers of the client helper are the headers that the gateway reads."""

import inspect
from typing import Any

import pytest

import tidegate_client
from tidegate_gateway.openai import http_headers

EVERY = {
    "tenant": "t", "slo_class": "c", "urgency": 0, "deadline_s": 1.5, "ttft_s": 0.25, "tpot_s": 0.06,
    "session": "s", "workflow": "w", "stage": "a",
}  # fmt: skip


def test_the_gateway_reads_every_header() -> None:
    assert set(EVERY) == set(inspect.signature(tidegate_client.headers).parameters)
    read = http_headers.read(tidegate_client.headers(**EVERY))  # type: ignore[arg-type]
    assert (read.tenant, read.slo_class, read.urgency, read.workflow, read.stage) == ("t", "c", 0, "w", "a")
    assert (read.ttft_s, read.tpot_s, read.deadline_s, read.session) == (0.25, 0.06, 1.5, "s")


def test_what_is_not_given_has_no_header() -> None:
    assert tidegate_client.headers() == {}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"deadline_s": 0}, "deadline_s must be a number of seconds"),
        ({"deadline_s": -3}, "deadline_s must be a number of seconds"),
        ({"deadline_s": "20s"}, "deadline_s must be a number of seconds"),
        ({"ttft_s": float("nan")}, "ttft_s must be a number of seconds"),
        ({"tpot_s": float("inf")}, "tpot_s must be a number of seconds"),
        ({"tenant": "größe"}, "tenant must be printable ASCII"),
        ({"slo_class": ""}, "slo_class must be printable ASCII"),
        ({"stage": "a\nb"}, "stage must be printable ASCII"),
    ],
)
def test_an_argument_that_no_header_can_have_is_named(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tidegate_client.headers(**wrong)
