"""What other gateways tell is read also where they have another version."""

from tidegate_gateway.store import store_answers
from tidegate_policy.admit.tenant_load import TenantLoad


def test_what_a_newer_gateway_tells_beside_the_known_numbers_is_left_out() -> None:
    told = {"tenants": {"old": [1, 2, 3.0], "new": [1, 2, 3.0, 0.5, 7], "same": [4, 5, 6.0, 0.25], "odd": "text"}}
    load = store_answers.pool_load(
        [told, {"tenants": {"odd": [1, 2, 3.0, None]}, "parts": {"part": {"new": [1, 1, 1.0, 0, 9]}}}]
    )
    assert dict(load.tenants) == {"new": TenantLoad(1, 2, 3.0, 0.5), "same": TenantLoad(4, 5, 6.0, 0.25)}
    assert dict(load.parts["part"]) == {"new": TenantLoad(1, 1, 1.0, 0)}


def test_backlogs_of_other_versions_are_read_as_far_as_they_are_known() -> None:
    told = [{"http://a": [1, 2, 3, 4]}, {"http://b": [1, 2]}, {"http://a": [5, 6, 7]}]
    assert list(store_answers.numbers(told, 3)) == [("http://a", [1, 2, 3]), ("http://a", [5, 6, 7])]
