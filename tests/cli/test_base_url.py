"""Addresses as people write them."""

import pytest

from tidegate_cli import base_url


@pytest.mark.parametrize(
    "given",
    [
        "127.0.0.1:8000",
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/",
        "http://127.0.0.1:8000/v1/",
        "127.0.0.1:8000/v1",
    ],
)
def test_an_address_needs_no_scheme_and_may_be_that_of_an_openai_client(given: str) -> None:
    assert base_url.of(given) == "http://127.0.0.1:8000"


def test_the_scheme_that_is_given_stays() -> None:
    assert base_url.of("https://gateway.example/pool/v1") == "https://gateway.example/pool"
