"""Which tenants are counted by name, and that an answer costs no look at all of them."""

from collections import OrderedDict

import counted_looks
import pytest

from tidegate_policy import served_tokens
from tidegate_policy.served_tokens import HALF_LIFE_S, MAX_TENANTS, TenantService


def full() -> TenantService:
    """As many tenants as are counted, each of which was served much."""
    service = TenantService()
    for number in range(MAX_TENANTS):
        service.observe(0.0, f"t{number}", 10_000, 1.0)
    return service


def test_a_newcomer_is_counted_however_little_it_was_served() -> None:
    service = full()
    service.observe(1.0, "t0", 1, 1.0)
    for _ in range(3):
        service.observe(2.0, "new", 7, 1.0)
    shares = service.shares(2.0)
    assert service.served(2.0, "new") == pytest.approx(21.0)
    assert len(shares) == MAX_TENANTS
    assert {"new", "t0", "t2"} <= shares.keys()
    assert "t1" not in shares, "it was served least recently"


class Counted(counted_looks.CountedLooks, OrderedDict[str, tuple[float, float]]):
    """What tenants were served, with the number of looks at all of them."""


def test_an_answer_costs_no_look_at_all_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tokens, "OrderedDict", Counted)
    service = full()
    for number in range(500):
        service.observe(1.0, f"invented-{number}", 10, 1.0)
    assert Counted.looks == 0
    assert len(service.shares(1.0)) == MAX_TENANTS


def test_service_decays_and_counts_by_weight() -> None:
    service = TenantService()
    service.observe(0.0, "heavy", 300, 3.0)
    service.observe(HALF_LIFE_S, "heavy", 300, 3.0)
    assert service.served(HALF_LIFE_S, "heavy") == pytest.approx(150.0)
    assert service.served(2 * HALF_LIFE_S, "heavy") == pytest.approx(75.0)
    assert service.served(0.0, "other") == 0.0
