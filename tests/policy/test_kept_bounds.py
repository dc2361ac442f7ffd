"""The bounds of tenants are kept while nothing changes them, and no decision shows it."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.admit.max_min_places import FLOODING, FLOODS_PART
from tidegate_policy.admit.pool_places import FIRST_CALLS
from tidegate_policy.admit.prompt_window import PromptSeconds
from tidegate_policy.admit.tenant_shares import HEADROOM, KEEPS, LEAST_PLACES, TenantShares
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest

TENANTS = ("a", "b", "c", "d", "e")
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5, "e": 1.0}


@dataclass(slots=True)
class History:
    """One gateway's tenants, to which the same events happen as to another's."""

    shares: TenantShares
    forgets: bool
    """The bounds are computed anew at each event."""

    def begin(self) -> None:
        if self.forgets:
            self.shares._bounds_hold = False

    def arrives(self, now: float, call: Call, service_s: float) -> object:
        self.begin()
        self.shares.competes(now, call)
        item = QueuedRequest(call=call, service_s=service_s)
        enters = self.shares.arrived(now, item)
        if enters:
            self.shares.enter(now, item)
        return enters

    def releases(self, now: float, engines: int) -> list[Call]:
        self.begin()
        prompts = self.shares.prompts
        prompts.seconds, prompts._engines = (lambda call: PromptSeconds(1.0, 1.0)), (lambda now: engines)
        items = self.shares.release(now)
        for item in items:
            self.shares.enter(now, item)
        return [item.call for item in items]

    def shows(self, now: float) -> object:
        self.begin()
        surplus = self.shares.surplus(now)
        known = [name for name in TENANTS if name in self.shares._tenants]
        return surplus, [self.shares.is_owed(now, name) for name in known]


def of_two_tellings(places: float, policy: str) -> tuple[History, History]:
    pair = []
    for forgets in (False, True):
        shares = TenantShares(policies.create(policy), bounded=True, limits=lambda: places, serving=lambda now: places)
        pair.append(History(shares, forgets))
    return pair[0], pair[1]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrives", "arrives", "arrives", "leaves", "leaves", "releases", "answered", "token", "gone"]),
        st.sampled_from(TENANTS),
        st.sampled_from([0.0, 0.001, 0.3, 4.0, 35.0]),
        st.integers(1, 3),
    ),
    max_size=120,
)


@given(EVENTS, st.sampled_from([4.0, 10.0, 33.0]), st.sampled_from(["fcfs", "rr"]), st.booleans())
def test_bounds_that_are_kept_change_no_decision(events, places, policy, learned) -> None:
    kept, computed = of_two_tellings(places, policy)
    entered: list[Call] = []
    now = 0.0
    for pair in (kept, computed):
        for _ in range(FIRST_CALLS if learned else 0):
            pair.shares.observe(10.0, 10.0 / places)
    for number, (event, tenant, later_s, count) in enumerate(events):
        now += later_s
        call = Call(
            id=CallId(f"{number}"), arrived_at_s=now, prompt_tokens=10, output_predicted=10,
            tenant=tenant, weight=WEIGHTS[tenant], sequences=count,
        )  # fmt: skip
        if event == "arrives":
            enters = kept.arrives(now, call, 10.0 * count)
            assert enters == computed.arrives(now, call, 10.0 * count)
            entered += [call] if enters else []
        elif event == "leaves" and entered:
            gone = entered.pop(0)
            kept.shares.leave(gone)
            computed.shares.leave(gone)
        elif event == "answered":
            kept.shares.observe(10.0, 10.0 / places / count)
            computed.shares.observe(10.0, 10.0 / places / count)
        elif event == "token" and entered:
            assert kept.shares.on_first_token(entered[-1]) == computed.shares.on_first_token(entered[-1])
        elif event == "gone":
            held = [item.call for item in kept.shares]
            for one in held[:1]:
                assert kept.shares.remove(now, one.id, one.tenant) is not None
                assert computed.shares.remove(now, one.id, one.tenant) is not None
        released = kept.releases(now, count)
        assert released == computed.releases(now, count)
        entered += released
        assert kept.shows(now) == computed.shows(now)
        assert kept.shares._bounds(now) == computed.shares._bounds(now)


def plain(shares: TenantShares, now: float) -> dict[str, float]:
    """The bounds of the tenants as the head of the module states them, one tenant after the other."""
    active = {name: it for name, it in shares._tenants.items() if it.wanted or it.seen_at_s + 30.0 > now}
    left, weight = shares.places, sum(it.weight for it in active.values())
    part, rate = HEADROOM * left / weight, 1 / weight
    bounds, flooding = {}, {}
    for name, it in sorted(active.items(), key=lambda each: each[1].wanted / each[1].weight):
        share = left * it.weight / weight
        bounds[name] = max(share, part * it.weight * (KEEPS if it.rate(now) <= rate * it.weight else 1.0), LEAST_PLACES)
        if it.wanted > FLOODING * bounds[name]:
            flooding[name] = max(FLOODS_PART * share, LEAST_PLACES)
        left -= min(share, it.wanted)
        weight -= it.weight
    return bounds | flooding if len(flooding) < len(active) else bounds


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 70)), min_size=2, max_size=8), st.floats(3.1, 97.3))
def test_what_one_tenant_leaves_goes_to_the_others(wishes, places) -> None:
    shares = TenantShares(policies.create("fcfs"), bounded=True)
    for _ in range(FIRST_CALLS):
        shares.observe(100.0, 100.0 / places)
    history = History(shares, forgets=False)
    for number, (tenant, count) in enumerate(wishes):
        for index in range(count):
            call = Call(
                id=CallId(f"{number}-{index}"), arrived_at_s=0.0, prompt_tokens=10, output_predicted=10,
                tenant=tenant, weight=WEIGHTS[tenant],
            )  # fmt: skip
            history.arrives(0.0, call, 100.0)
    if len(shares._tenants) > 1:
        assert shares._bounds(0.0)[0] == pytest.approx(plain(shares, 0.0))


def test_bounds_are_kept_while_a_flood_goes_on() -> None:
    """What a tenant wants beyond its share changes nothing for the others."""
    shares = TenantShares(policies.create("fcfs"), bounded=True, limits=lambda: 10.0)
    history = History(shares, forgets=False)
    for index in range(60):
        for tenant in ("a", "b"):
            call = Call(
                id=CallId(f"{tenant}{index}"), arrived_at_s=0.0, prompt_tokens=9, output_predicted=9, tenant=tenant
            )
            history.arrives(0.0, call, 100.0)
    shares._bounds(1.0)
    before = shares._bounds_found[0]
    history.arrives(
        1.0, Call(id=CallId("next"), arrived_at_s=1.0, prompt_tokens=9, output_predicted=9, tenant="a"), 9.0
    )
    assert shares._bounds(1.0)[0] is before
    assert math.isinf(shares._bounds_hold_until_s) or shares._bounds_hold_until_s > 1.0
    shares.observe(1.0, 1.0)
    assert shares._bounds(1.0)[0] is not before
