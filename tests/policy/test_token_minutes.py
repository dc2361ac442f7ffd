"""The tokens of a minute that a gateway counts without its store."""

import pytest

from tidegate_policy.admit.token_minutes import TokenMinutes


def test_a_tenant_has_its_minute_and_comes_again_when_the_bucket_has_room() -> None:
    minutes = TokenMinutes()
    assert minutes.spend(0.0, "acme", 600, 1000, used=False) == 0
    assert minutes.spend(0.0, "acme", 600, 1000, used=False) == pytest.approx(12)
    assert minutes.spend(0.0, "other", 600, 1000, used=False) == 0, "each tenant has its own"
    assert minutes.spend(12.0, "acme", 600, 1000, used=False) == 0


def test_an_empty_bucket_takes_a_call_of_any_size_and_used_tokens_are_always_booked() -> None:
    minutes = TokenMinutes()
    assert minutes.spend(0.0, "acme", 5000, 1000, used=False) == 0
    assert minutes.spend(0.0, "acme", 1000, 1000, used=True) == 0
    assert minutes.spend(0.0, "acme", 1, 1000, used=False) == pytest.approx(300.06)
    assert minutes.spend(0.0, "acme", -6000, 1000, used=True) == 0
    assert minutes.spend(0.0, "acme", 1000, 1000, used=False) == 0, "what was booked was given back"


def test_what_is_left_in_the_bucket_is_taken_once() -> None:
    minutes = TokenMinutes()
    minutes.spend(0.0, "acme", 1000, 1000, used=False)
    assert minutes.take(30.0, "acme", 1000) == 500
    assert minutes.take(30.0, "acme", 1000) == 0
    assert minutes.spend(30.0, "acme", 1000, 1000, used=False) == 0
