"""The condition StoreReachable: what gateways say of the store reaches the status of their pool."""

import types

import pytest

from tidegate_gateway import running_gateway
from tidegate_operator import pool_status, store_status


class Link:
    """A gateway's link to its store."""

    def __init__(self, *, up):
        self.store, self.up = object(), up


def said(*, up=True, serves=True, draining=False):
    """What a gateway with this link says of itself, in the form of its state."""
    gateway = types.SimpleNamespace(
        draining=draining,
        directory=types.SimpleNamespace(serves=serves),
        settings=types.SimpleNamespace(queue=types.SimpleNamespace(hold_s=0)),
        authentication=types.SimpleNamespace(can_verify=True),
        link=Link(up=up),
    )
    status, reasons = running_gateway.Gateway.problems(gateway)
    return {"status": status, "reasons": reasons}


@pytest.mark.parametrize(
    ("state", "reaches"),
    [
        (said(), True),
        (said(up=False), False),
        (said(up=False, serves=False), None),
        (said(draining=True), None),
        ({}, None),
    ],
)
def test_a_gateway_tells_whether_it_reaches_the_store_in_its_own_words(state, reaches):
    assert store_status.parse(state) is reaches


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
