"""Tenants share the KV memory of the engines and the computation of prompts, as they share places."""

from dataclasses import replace

from tidegate_policy import policies
from tidegate_policy.admit.pool_places import ALONE_OF_LIMITS, FIRST_CALLS, MEMORY_OF_PLACES
from tidegate_policy.admit.prompt_window import PromptCosts, PromptSeconds
from tidegate_policy.admit.tenant_shares import ACTIVE_S, HEADROOM, TenantShares
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest

LIMITS, PLACES, MEMORY = 96.0, 40.0, 100_000.0
SHORT, LONG = 100, 5000
"""Tokens of a prompt."""


def item(name: str, tenant: str, prompt: int, blocks: tuple[int, ...] = ()) -> QueuedRequest:
    call = Call(
        id=CallId(name), arrived_at_s=0.0, prompt_tokens=prompt, output_predicted=2, tenant=tenant, blocks=blocks,
        block_tokens=256.0,
    )  # fmt: skip
    return QueuedRequest(call=call, service_s=100.0)


def pool(*, prompt_s: float = 0.0, engines: int = 1000) -> TenantShares:
    """Prompts of `LONG` tokens take `prompt_s` seconds."""
    costs = PromptCosts(
        seconds=lambda call: PromptSeconds(prompt_s, prompt_s * call.prompt_tokens / LONG), engines=lambda now: engines
    )
    shares = TenantShares(
        policies.create("fcfs"), bounded=True, limits=lambda: LIMITS, memory=lambda: MEMORY, prompts=costs
    )
    for _ in range(FIRST_CALLS):
        shares.observe(100.0, 100.0 / PLACES)
    return shares


def sent(shares: TenantShares, now: float, tenant: str, count: int, prompt: int, **more: object) -> list[Call]:
    """Sends calls of a tenant and returns those that entered."""
    found = []
    for index in range(count):
        one = item(f"{tenant}{now}-{index}", tenant, prompt, **more)  # type: ignore[arg-type]
        shares.competes(now, one.call)
        entering = shares.arrived(now, one)
        if entering is not None:
            shares.enter(now, entering)
            found.append(entering.call)
    return found


def released(shares: TenantShares, now: float) -> list[Call]:
    items = shares.release(now)
    for each in items:
        shares.enter(now, each)
    return [each.call for each in items]


def tokens(calls: list[Call]) -> int:
    return sum(call.prompt_tokens for call in calls)


def test_long_calls_take_the_places_of_their_memory() -> None:
    shares = pool()
    sent(shares, 0.0, "other", 1, SHORT)
    flood = sent(shares, 0.0, "flood", 100, LONG)
    most = HEADROOM / 2 * MEMORY_OF_PLACES * MEMORY
    assert most < tokens(flood) <= MEMORY_OF_PLACES * MEMORY + LONG, "it may have all places while they are free"
    assert len(sent(shares, 1.0, "other", 10, SHORT)) == 10, "they have room in the memory"


def test_what_prompts_share_takes_no_places() -> None:
    shares = pool()
    sent(shares, 0.0, "other", 1, SHORT)
    alike = tuple(range(LONG // 256))
    assert len(sent(shares, 0.0, "agents", 30, LONG, blocks=alike)) == 30


def test_a_tenant_that_is_alone_for_now_leaves_a_part_of_the_memory() -> None:
    shares = pool()
    for call in sent(shares, 0.0, "other", 1, SHORT):
        shares.leave(call)
    now = 2 * ACTIVE_S
    assert (
        ALONE_OF_LIMITS * MEMORY - LONG
        < tokens(sent(shares, now, "flood", 100, LONG))
        <= ALONE_OF_LIMITS * MEMORY + LONG
    )
    assert not shares.is_owed(now, "flood")


def test_places_come_back_when_calls_leave() -> None:
    shares = pool()
    sent(shares, 0.0, "other", 1, SHORT)
    flood = sent(shares, 0.0, "flood", 100, LONG)
    assert released(shares, 1.0) == []
    for call in flood:
        shares.leave(call)
    assert released(shares, 1.0)
    for call in [*shares._tenants["flood"].memory._own]:
        shares.leave(replace(flood[0], id=call))
    assert shares._tenants["flood"].memory.tokens == 0
    assert shares._tokens == sum(tenant.memory.tokens for tenant in shares._tenants.values())


def test_few_prompts_of_a_tenant_wait_at_engines() -> None:
    shares = pool(prompt_s=2.0, engines=2)
    sent(shares, 0.0, "other", 1, SHORT)
    first, second = sent(shares, 0.0, "busy", 10, LONG)
    assert len(sent(shares, 0.0, "other", 5, SHORT)) == 5, "its prompts are short"
    assert released(shares, 0.1) == []
    assert shares.on_first_token(first)
    assert len(released(shares, 0.1)) == 1
    shares.leave(second)
    assert len(released(shares, 0.1)) == 1


def test_prompts_wait_for_no_first_token_where_no_other_tenant_is_known() -> None:
    assert len(sent(pool(prompt_s=2.0, engines=2), 0.0, "only", 10, LONG)) == 10


def test_long_prompts_of_a_tenant_that_sends_more_than_its_part_yield() -> None:
    shares = pool(prompt_s=0.9, engines=2)
    sent(shares, 0.0, "other", 1, SHORT)
    calls = sent(shares, 0.0, "busy", 20, LONG)
    assert not any(call.yields for call in calls), "it sent little before"
    shares.on_first_token(calls[0])
    (after,) = released(shares, 0.1)
    assert after.yields
    assert not any(call.yields for call in sent(shares, 0.2, "other", 3, SHORT))


def test_very_long_prompts_yield_while_another_tenant_competes() -> None:
    shares = pool(prompt_s=1.5, engines=2)
    assert not any(call.yields for call in sent(shares, 0.0, "busy", 1, LONG))
    assert not any(call.yields for call in sent(shares, 1.0, "other", 1, SHORT))
    assert all(call.yields for call in sent(shares, 2.0, "busy", 1, LONG))
    assert not any(call.yields for call in sent(shares, 2.0, "other", 1, LONG // 2))


def test_a_call_of_a_tenant_with_less_than_its_part_is_owed_a_place_while_another_tenant_has_too_much() -> None:
    shares = pool()
    sent(shares, 0.0, "flood", 100, SHORT)
    (first,) = sent(shares, 1.0, "quiet", 1, SHORT)
    assert first.owed
    assert not first.yields
    assert not any(call.owed for call in sent(shares, 1.0, "flood", 1, SHORT))
    for index in range(90):
        shares.leave(item(f"flood0.0-{index}", "flood", SHORT).call)
    assert not any(call.owed for call in sent(shares, 2.0, "quiet", 1, SHORT))


def test_the_work_that_a_tenant_sends_is_that_of_its_own_calls() -> None:
    """A mean over all calls would count the short prompts of one tenant for the long ones of another."""
    shares = pool()
    for name, demand_s in (("short", 0.01), ("long", 0.5)):
        shares.sends(0.0, item(name, name, SHORT), demand_s)
    rates = {name: shares._tenants[name].rate(0.0) for name in ("short", "long")}
    assert rates["long"] == 50 * rates["short"]
