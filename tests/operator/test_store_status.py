"""The condition StoreReachable: what gateways say of the store reaches the status of their pool."""

import pytest

from tidegate_gateway.store import store_link
from tidegate_operator import pool_status, store_status


@pytest.mark.parametrize(("up", "reaches"), [(True, True), (False, False)])
def test_a_gateway_tells_whether_it_reaches_the_store(up, reaches):
    link = store_link.StoreLink(object())
    link.up = up
    assert store_status.parse({"store": {"reachable": link.reachable}}) is reaches
    assert store_status.parse({"store": {"reachable": store_link.StoreLink(None).reachable}}) is None


@pytest.mark.parametrize("state", [{}, {"store": None}, {"store": {}}, {"store": {"reachable": "yes"}}])
def test_a_state_that_does_not_tell_counts_for_nothing(state):
    assert store_status.parse(state) is None


@pytest.mark.parametrize(
    ("seen", "status", "reason", "message"),
    [
        ({}, None, "NotReported", "No gateway tells whether it reaches the store."),
        ({"a": None}, None, "NotReported", "No gateway tells whether it reaches the store."),
        ({"a": True, "b": None}, True, "Reachable", "The gateways reach the store."),
        (
            {"a": False, "b": None},
            False,
            "Unreachable",
            "The store does not answer the gateways: they serve single calls and shed workflows.",
        ),
        (
            {"a": False, "b": True},
            False,
            "PartlyReachable",
            "The store does not answer 1 of 2 gateways, for example a: they serve single calls and shed workflows.",
        ),
    ],
)
def test_the_condition_tells_how_many_gateways_do_not_reach_the_store(seen, status, reason, message):
    found = store_status.condition(seen)
    assert (found.type, found.status, found.reason, found.message) == ("StoreReachable", status, reason, message)


@pytest.mark.parametrize("seen", [{}, {"a": True}, {"a": False}, {"a": False, "b": True}])
def test_between_two_questions_the_condition_stays_as_it_is_in_the_status(seen):
    stated = store_status.condition(seen)
    before = {"conditions": pool_status.timed([stated], [], generation=1, now="t")}
    assert store_status.carried(before) == stated
    assert store_status.carried({}) == store_status.UNKNOWN
