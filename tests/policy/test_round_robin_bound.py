"""The exact bound of `rr`: by how much the starts of two tenants can differ while both wait.

A balance is in seconds for each unit of weight. A round raises it by one quantum, to one quantum at most, and a start is
allowed while it is positive, so it stays above minus the price of one start over the weight. Two tenants that wait all the
time pass the same rounds, or one round more or less. Therefore the work that they started, over their weights, differs at
every instant by less than two quanta and one start of each.

All calls of a tenant have the same size here, so the mean that a start is charged is the work of the call, and the bound
has no part for what later events correct.
"""

import small_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.policies import rr
from tidegate_policy.waiting_queue import WaitingQueue

TENANTS = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(1, 400), st.sampled_from([0.5, 1.0, 4.0])), min_size=2, max_size=4
)
"""Prompt tokens, output tokens and weight of each tenant."""
STARTS = 150


def greatest_excess_s(policy: rr.Rr, tenants: list[tuple[int, int, float]], quantum_s: float) -> float:
    """The greatest difference between two tenants after any start, less its bound. Each tenant always has waiting calls."""
    queue = WaitingQueue(policy)
    for number in range(STARTS):
        for tenant, (prompt_tokens, output, weight) in enumerate(tenants):
            call = small_engine.call(
                f"{tenant}-{number}",
                tenant=str(tenant),
                weight=weight,
                prompt_tokens=prompt_tokens,
                output_predicted=output,
            )
            item = policies.QueuedRequest(call=call, service_s=small_engine.COST.call_seconds(call))
            policy.on_arrival(0.0, item)
            queue.push(item)
    started_s = [0.0] * len(tenants)
    excess_s = float("-inf")
    for _ in range(STARTS):
        item = queue.pop(0.0)
        started_s[int(item.call.tenant)] += policy.work_s(item) / item.call.weight
        most, least = started_s.index(max(started_s)), started_s.index(min(started_s))
        starts_s = sum(start_s(policy, tenants[each]) for each in (most, least))
        excess_s = max(excess_s, started_s[most] - started_s[least] - 2 * quantum_s - starts_s)
    return excess_s


def start_s(policy: rr.Rr, tenant: tuple[int, int, float]) -> float:
    """Work of one call of a tenant, over its weight."""
    prompt_tokens, output, weight = tenant
    call = small_engine.call("one", prompt_tokens=prompt_tokens, output_predicted=output)
    return policy.work_s(policies.QueuedRequest(call=call, service_s=0.0)) / weight


def create(quantum_s: float) -> rr.Rr:
    return rr.Rr(small_engine.context(), quantum_s=quantum_s)


@settings(max_examples=60)
@given(TENANTS, st.sampled_from([0.001, 0.05, 0.25, 2.0]))
def test_two_waiting_tenants_differ_by_less_than_two_quanta_and_one_start_of_each(
    tenants: list[tuple[int, int, float]], quantum_s: float
) -> None:
    assert greatest_excess_s(create(quantum_s), tenants, quantum_s) < 1e-9


class TwoForOne(rr.RoundTurns):
    """A round that pays the first lane twice."""

    def charge(self, lane: int, work_s: float) -> None:
        super().charge(lane, work_s / 2 if lane == min(self.balances, default=lane) else work_s)


def test_a_round_that_favours_a_tenant_is_found() -> None:
    policy = create(0.25)
    policy.turns = TwoForOne(policy, 0.25)
    assert greatest_excess_s(policy, [(500, 50, 1.0), (500, 50, 1.0)], 0.25) > 0
